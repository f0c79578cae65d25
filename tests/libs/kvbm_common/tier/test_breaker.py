"""What fails is bypassed, and tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.tier.breaker import (
    FAILURES_MAX,
    PAUSE_MAX_MS,
    PAUSE_MS,
    Breaker,
    BreakerState,
)


def opened(now_ms: int = 0) -> Breaker:
    """A breaker that has just opened."""
    breaker = Breaker()
    said = [breaker.trouble(now_ms) for _ in range(FAILURES_MAX)]
    assert said == [False] * (FAILURES_MAX - 1) + [True]
    return breaker


def test_troubles_that_are_not_in_a_row_do_not_count() -> None:
    breaker = Breaker()
    for _ in range(5):
        for _ in range(FAILURES_MAX - 1):
            assert not breaker.trouble(0)
        breaker.good()
    assert breaker.allows(0)


def test_while_open_nothing_goes() -> None:
    breaker = opened()
    assert not breaker.allows(PAUSE_MS - 1)
    assert not breaker.trouble(1), "late failures of what was in flight do not open it anew"


def test_one_probe_goes_and_decides() -> None:
    breaker = opened()
    assert breaker.allows(PAUSE_MS)
    breaker.start()
    assert not breaker.allows(PAUSE_MS), "one at a time"
    breaker.good()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allows(PAUSE_MS)


def test_the_pause_doubles_with_every_failed_probe() -> None:
    breaker, now_ms, pauses = opened(), 0, []
    for _ in range(8):
        started_ms = now_ms
        while not breaker.allows(now_ms):
            now_ms += 500
        pauses.append(now_ms - started_ms)
        breaker.start()
        assert breaker.trouble(now_ms)
    assert pauses[:4] == [PAUSE_MS, 2 * PAUSE_MS, 4 * PAUSE_MS, 8 * PAUSE_MS]
    assert pauses[-1] == PAUSE_MAX_MS


@given(st.lists(st.sampled_from(["start", "good", "trouble", "wait"])))
def test_it_never_stays_open_for_ever(steps: list[str]) -> None:
    breaker, now_ms = Breaker(), 0
    for step in steps:
        match step:
            case "start":
                if breaker.allows(now_ms):
                    breaker.start()
            case "good":
                breaker.good()
            case "trouble":
                breaker.trouble(now_ms)
            case _:
                now_ms += PAUSE_MS
    # Whatever has happened: requests in flight end, and after the longest pause one may probe.
    if breaker.state is BreakerState.PROBING:
        breaker.trouble(now_ms)
    assert breaker.allows(now_ms + PAUSE_MAX_MS)
