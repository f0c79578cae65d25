"""The health of the bucket: when it goes down, and how often it is probed."""

from __future__ import annotations

from collections.abc import Iterator

from kvbm_disk_tier.objects.core.bucket_health import (
    PAUSE_MAX_S,
    PAUSE_S,
    TROUBLES_MAX,
    UNREADABLE_MAX,
    BucketHealth,
)

from tests.libs.helpers import name


def doubling(pause_s: float, max_s: float) -> Iterator[float]:
    """Pauses as they are drawn, without the draw."""
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, max_s)


def test_troubles_in_a_row_take_it_down_and_what_works_between_does_not() -> None:
    """The reason of the last one is told; what came before is forgotten with a success."""
    health = BucketHealth(doubling)
    for _ in range(3):
        assert [health.trouble("slow") for _ in range(TROUBLES_MAX - 1)] == [False] * 2
        health.good()
    assert not health.trouble("slow")
    assert not health.trouble("slow")
    assert health.trouble("away")
    assert health.reason == "away"
    assert not health.trouble("again"), "it is down already"
    assert health.reason == "away"


def test_blocks_that_cannot_be_read_take_it_down_when_they_are_many() -> None:
    """Goal: one bad file costs no other block; a key that may list and not read costs few reads."""
    health, names = BucketHealth(doubling), [name(n) for n in range(UNREADABLE_MAX)]
    assert not any(health.trouble("denied", alone=names[0]) for _ in range(100))
    assert not any(health.trouble("denied", alone=one) for one in names[1:-1])
    health.good()
    assert health.trouble("denied", alone=names[-1]), "a listing that succeeds is no read"
    health.up()
    assert not any(health.trouble("denied", alone=one) for one in names[1:])
    health.good(read=True)
    assert not health.trouble("denied", alone=names[0])


def test_a_refusal_takes_it_down_at_once() -> None:
    """Who is not let in need not knock three times."""
    health = BucketHealth(doubling)
    assert health.trouble("denied", refused=True)


def test_probes_come_ever_more_rarely_until_something_has_worked() -> None:
    """A probe that succeeds proves little: only work resets the pause."""
    health = BucketHealth(doubling)
    health.trouble("away", refused=True)
    pauses = [health.pause_s() for _ in range(10)]
    assert (pauses[0], pauses[4], pauses[-1]) == (PAUSE_S, 16 * PAUSE_S, PAUSE_MAX_S)
    health.up()
    health.trouble("away", refused=True)
    assert health.pause_s() == PAUSE_MAX_S
    health.good()
    assert health.pause_s() == PAUSE_S


def test_another_reason_is_news() -> None:
    """The operator reads the newest one."""
    health = BucketHealth(doubling)
    health.trouble("away", refused=True)
    assert not health.still_down("away")
    assert health.still_down("denied")
    assert health.reason == "denied"
