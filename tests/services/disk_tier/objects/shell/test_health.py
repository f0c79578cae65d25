"""The health of the bucket: when it goes down, and how often it is probed."""

from __future__ import annotations

from kvbm_disk_tier.objects.shell.health import PAUSE_MAX_S, PAUSE_S, TROUBLES_MAX, Health


def test_troubles_in_a_row_take_it_down_and_what_works_between_does_not() -> None:
    """The reason of the last one is told; what came before is forgotten with a success."""
    health = Health()
    for _ in range(3):
        assert [health.trouble("slow", write=False) for _ in range(TROUBLES_MAX - 1)] == [False] * 2
        health.good()
    assert not health.trouble("slow", write=False)
    assert not health.trouble("slow", write=False)
    assert health.trouble("away", write=True)
    assert (health.reason, health.needs_write) == ("away", True)
    assert not health.trouble("again", write=False), "it is down already"
    assert health.reason == "away"


def test_a_refusal_takes_it_down_at_once() -> None:
    """Who is not let in need not knock three times."""
    health = Health()
    assert health.trouble("denied", write=False, refused=True)


def test_probes_come_ever_more_rarely_until_something_has_worked() -> None:
    """A probe that succeeds proves little: only work resets the pause."""
    health = Health()
    pauses = [health.pause_s() for _ in range(10)]
    assert PAUSE_S / 2 <= pauses[0] <= PAUSE_S
    assert pauses[4] > pauses[0]
    assert PAUSE_MAX_S / 2 <= pauses[-1] <= PAUSE_MAX_S
    health.up()
    assert health.pause_s() >= PAUSE_MAX_S / 2
    health.good()
    assert health.pause_s() <= PAUSE_S


def test_another_reason_is_news() -> None:
    """The operator reads the newest one."""
    health = Health()
    health.trouble("away", write=False, refused=True)
    assert not health.still_down("away")
    assert health.still_down("denied")
    assert health.reason == "denied"
