"""Requests that share a prefix and arrive together, compared with vLLM alone token for token.

The connector runs with the settings that ship. The answers to compare with come from a vLLM
without a connector that computes each prompt alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.vllm.conversation import Answer, Ask
from tests.vllm.harness import EngineProcess, LiveStack, live_stack, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPTS = 6
CLIENTS = 24
TURNS = 3
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    with live_stack({"cpu_cache_gb": 0.2}) as running:
        yield running


@pytest.fixture(scope="module")
def engines(
    stack: LiveStack, model: str, log_dir: Path
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """The engine under test and vLLM alone."""
    # Room for several prompts in a step, as a server has by default: only then do requests hit
    # blocks that the same step computes. The prompts are long, so that the step takes its time.
    arguments = {"max_num_batched_tokens": 8192}
    tested = EngineProcess(
        model,
        stack.settings,
        log=log_dir / "tested.log",
        blocks=1000,
        arguments=arguments,
        shipped=True,
    )
    alone = EngineProcess(model, None, log=log_dir / "alone.log", blocks=1000, arguments=arguments)
    tested.wait_started().wait_attached(stack)
    alone.wait_started()
    yield tested, alone
    tested.stop()
    alone.stop()


def clients(seed: int) -> list[list[int]]:
    """The prompts of all clients: a few system prompts, each with the tails of several.

    A tail is shorter than a block: a request that hits the whole system prompt on the device has
    nothing to look up, and is admitted in the step that computes it.
    """
    systems = [prompt(seed + number, 960 + 64 * number) for number in range(PROMPTS)]
    return [systems[n * PROMPTS // CLIENTS] + prompt(seed + 100 + n, 5 + n) for n in range(CLIENTS)]


def answers(engine: EngineProcess, wave: str, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """The answers to prompts that arrive together."""
    return engine.run(
        *(Ask(name=f"{wave} {n}", tokens=list(tokens), new_tokens=NEW_TOKENS)
          for n, tokens in enumerate(prompts))
    )  # fmt: skip


def computed_alone(
    engine: EngineProcess, wave: str, prompts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """The tokens that vLLM alone answers, one prompt after the other."""
    return [answers(engine, f"{wave} {n}", [tokens])[0].tokens for n, tokens in enumerate(prompts)]


def wrong(found: Sequence[Answer], expected: Sequence[Sequence[int]]) -> list[str]:
    """The names of the answers that differ."""
    return [
        answer.name
        for answer, tokens in zip(found, expected, strict=True)
        if answer.tokens != tokens
    ]


def test_clients_that_arrive_together_get_the_answers_of_vllm_alone(
    engines: tuple[EngineProcess, EngineProcess],
) -> None:
    """Goal: a block that is still being computed is not stored.

    1. 24 clients with 6 shared system prompts arrive together: most hit blocks on the device
       that are computed in the same step.
    2. The device's cache is emptied, and the same clients arrive again: the prefixes are loaded.
    """
    tested, alone = engines
    prompts = clients(1000)
    expected = computed_alone(alone, "alone", prompts)
    assert wrong(answers(tested, "first", prompts), expected) == []
    tested.reset()
    again = answers(tested, "again", prompts)
    assert wrong(again, expected) == []
    assert sum(answer.cached > 0 for answer in again) == CLIENTS


def test_conversations_that_share_system_prompts(
    engines: tuple[EngineProcess, EngineProcess],
) -> None:
    """Goal: the same over several turns, each of which begins with an empty device."""
    tested, alone = engines
    prompts = clients(2000)[:16]
    for turn in range(TURNS):
        expected = computed_alone(alone, f"alone {turn}", prompts)
        assert wrong(answers(tested, f"turn {turn}", prompts), expected) == []
        tested.reset()
        prompts = [
            [*tokens, *reply, *prompt(3000 + 100 * turn + n, 30)]
            for n, (tokens, reply) in enumerate(zip(prompts, expected, strict=True))
        ]
