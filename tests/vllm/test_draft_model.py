"""A draft model on a real vLLM: its KV is stored and loaded with the model's, and is right.

The draft model is the model itself. With the right KV nearly every draft is right, with any other
few are: the device's own hits say how many.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conversation import Answer, Ask
from tests.vllm.harness import (
    VLLM_PYTHON,
    EngineProcess,
    LiveStack,
    alike,
    live_stack,
    prompt,
    same,
    vllm_minor,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        VLLM_PYTHON.exists() and vllm_minor() < 32, reason="an older vLLM drafts on GPUs alone"
    ),
]

LENGTHS = (300, 400, 500)
FULL_TOKENS = (288, 384, 480)
"""Of these prompts, in whole blocks."""


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    with live_stack({"cpu_cache_gb": 0.05, "scrub_cpu_percent": 0}) as running:
        yield running


def drafted(engine: EngineProcess, asks: list[Ask]) -> tuple[list[Answer], float]:
    """The answers, and which share of the drafts was right."""
    made, right = engine.state().drafts
    answers = engine.run(*asks)
    made_by_now, right_by_now = engine.state().drafts
    return answers, (right_by_now - right) / (made_by_now - made)


def test_one_token_is_enough_to_store_a_prompt(stack: LiveStack, model: str, log_dir: Path) -> None:
    """Goal: a prefill node, or an engine of short answers, stores what it computes.

    1. Prompts that arrive together get one token each: the engine comes to rest, and all of their
       blocks are stored.
    2. The device has them, then forgets them: answers are those of vLLM alone, and the drafts are
       as right as with the device's own blocks.
    """
    speculative = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    arguments = {"speculative_config": speculative}
    asks = [Ask(name=f"prompt {n}", tokens=prompt(n, n), new_tokens=60) for n in LENGTHS]
    alone = EngineProcess(
        model, None, log=log_dir / "alone.log", blocks=256, arguments=arguments
    ).wait_started()
    expected = alone.run(*asks)
    alone.stop()
    engine = EngineProcess(
        model, stack.settings, log=log_dir / "drafts.log", blocks=256, arguments=arguments
    ).wait_started()
    try:
        engine.wait_attached(stack)
        engine.run(*(Ask(name=one.name, tokens=one.tokens, new_tokens=1) for one in asks))
        assert engine.count("offload_blocks") == sum(FULL_TOKENS) // 32
        local, right = drafted(engine, asks)
        assert alike(local, expected)
        engine.reset()
        loaded, right_after_loads = drafted(engine, asks)
        assert [answer.cached for answer in loaded] == list(FULL_TOKENS)
        assert same(loaded, local)
        assert right_after_loads >= right - 0.05 > 0.5
        assert engine.count("load_failed_blocks") == 0
    finally:
        engine.stop()
