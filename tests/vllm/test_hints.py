"""Hints of agents in a real vLLM: a pinned session outlives noise in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conversation import Ask
from tests.vllm.harness import EngineProcess, LiveStack, alike, live_stack, prompt, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SLOTS = 64
"""Of host memory, and no other tier: what leaves it is computed again."""
TOKENS, CACHED, BLOCKS = 300, 288, 9
NOISY, NOISE_TOKENS = 10, 400
"""Ten sessions with 12 full blocks each: nearly twice the slots."""
HINTS: dict[str, dict[str, object]] = {
    "cache_control": {
        "session_id": "agent-1",
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
    },
    "kv_hints": {
        "session_id": "agent-2",
        "kv_hints": {"actions": [{"action_type": "kv.pin", "payload": {"ttl": "1h"}}]},
    },
    "plain": {},
}


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    overrides = {"cpu_cache_override_num_blocks": SLOTS, "scrub_cpu_percent": 0}
    with live_stack(overrides, ("index", "host-tier", "consolidator")) as running:
        yield running


def test_a_pinned_session_is_loaded_after_noise_and_one_without_a_hint_is_computed(
    stack: LiveStack, model: str, log_dir: Path
) -> None:
    """Goal: the hint of a request decides what is loaded, and no answer changes with it.

    1. Three sessions: two say a hint, each in another form, and one says none.
    2. Ten noisy sessions fill host memory nearly twice. The device forgets all.
    3. Each session resumes: the two are loaded from host memory, the third is computed.
    4. The two end their pins. After the same noise all three are computed.
    """
    sessions = [
        Ask(name=kind, tokens=prompt(place, TOKENS), new_tokens=8, transfer=transfer)
        for place, (kind, transfer) in enumerate(HINTS.items())
    ]
    alone = EngineProcess(model, None, log=log_dir / "alone.log", blocks=256).wait_started()
    expected = alone.run(*sessions)
    alone.stop()
    engine = EngineProcess(model, stack.settings, log=log_dir / "hints.log", blocks=256)
    engine.wait_started()
    try:
        engine.wait_attached(stack)
        assert alike(engine.run(*sessions), expected)
        wait_for(
            lambda: stack.figures("host-tier").get("hint_blocks_pinned") == 2 * BLOCKS,
            "the sessions are not pinned",
            details=lambda: f"{stack.figures('host-tier')} {engine.state().counts}",
        )
        make_noise(stack, engine, seed=100)
        resumed = engine.run(*sessions)
        assert [answer.cached for answer in resumed] == [CACHED, CACHED, 0]
        assert [answer.tokens for answer in resumed] == [answer.tokens for answer in expected]
        assert alike(resumed, expected)
        assert engine.count("loaded_blocks") == 2 * BLOCKS

        ended = [
            Ask(name=f"{ask.name}, over", tokens=ask.tokens, new_tokens=8, transfer=over(ask))
            for ask in sessions
        ]
        engine.run(*ended)
        wait_for(
            lambda: stack.figures("host-tier").get("hint_pinned_bytes") == 0,
            "the pins do not end",
            details=lambda: f"{stack.figures('host-tier')}",
        )
        make_noise(stack, engine, seed=200)
        forgotten = engine.run(*sessions)
        assert [answer.cached for answer in forgotten] == [0, 0, 0]
        assert alike(forgotten, expected)
    finally:
        engine.stop()


def over(ask: Ask) -> dict[str, object]:
    """The session ends its pin with this request."""
    session = ask.transfer.get("session_id")
    ended = {"type": "ephemeral", "ttl": 0}
    return {"session_id": session, "cache_control": ended} if session else {}


def make_noise(stack: LiveStack, engine: EngineProcess, *, seed: int) -> None:
    """Other sessions take turns until host memory has blocks of theirs and pinned ones alone."""
    before = stack.figures("host-tier").get("offload_blocks_d2h", 0)
    for number in range(NOISY):
        name = f"noise {seed + number}"
        engine.run(Ask(name=name, tokens=prompt(seed + number, NOISE_TOKENS), new_tokens=1))
    wait_for(
        lambda: stack.figures("host-tier").get("offload_blocks_d2h", 0) - before >= SLOTS,
        "the noise is not stored",
        details=lambda: f"{stack.figures('host-tier')}",
    )
    engine.reset()
