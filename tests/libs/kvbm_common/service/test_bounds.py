"""The bounds of a process: which are shown, under which labels, and what queues tell of them."""

from __future__ import annotations

import asyncio

import pytest
from kvbm_common.errors import DeadlineExceeded
from kvbm_common.identity import SequenceHash
from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.service.bounds import Bounds
from kvbm_common.service.footprint import Footprint
from kvbm_common.tier.departures import DEPARTURES_MIN, Departures
from kvbm_common.tier.former_blocks import FormerBlocks
from kvbm_common.wire.bounds import BOUNDS, Usage


def shown(bounds: Bounds) -> dict[tuple[str, str], float]:
    """Series and value of everything that Prometheus would read."""
    metrics = Metrics()
    metrics.include(bounds.collect)
    return {
        (sample.name, sample.labels["bound"]): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
    }


def test_a_bound_has_four_series_and_a_history_its_reach() -> None:
    bounds = Bounds()
    bounds.declare(lambda: {"explanations": Usage(7, 10, 3, 60.0), "lookups": Usage(1, 4)})
    assert shown(bounds) == {
        ("kvbm_bound_used", "explanations"): 7,
        ("kvbm_bound_size", "explanations"): 10,
        ("kvbm_bound_dropped_total", "explanations"): 3,
        ("kvbm_bound_reach_seconds", "explanations"): 60,
        ("kvbm_bound_used", "lookups"): 1,
        ("kvbm_bound_size", "lookups"): 4,
        ("kvbm_bound_dropped_total", "lookups"): 0,
    }


def test_a_bound_without_a_size_is_not_shown_yet() -> None:
    bounds = Bounds()
    bounds.declare(lambda: {"pinned": Usage(0, 0)})
    assert bounds.usages() == {}


@pytest.mark.parametrize("names", [["no_such"], ["lookups", "lookups"]])
def test_names_are_a_closed_set_and_declared_once(names: list[str]) -> None:
    """Goal: labels cannot explode, and no part hides another's bound."""
    bounds = Bounds()
    for name in names:
        bounds.declare(lambda name=name: {name: Usage(0, 1)})  # type: ignore[misc]
    with pytest.raises(AssertionError, match=names[0]):
        bounds.usages()


def test_every_process_shows_its_memory_and_descriptors() -> None:
    footprint = Footprint()
    footprint.declare(lambda: {"slots": 1 << 30})
    usages = footprint.usages()
    assert 0 < usages["memory"].used < usages["memory"].size
    assert 0 < usages["descriptors"].used < usages["descriptors"].size


class Nothing:
    """A core that takes whatever comes."""

    def step(self, event: int, now_ms: int) -> list[str]:
        """Do nothing."""
        return []


async def test_an_inbox_counts_what_it_refuses() -> None:
    loop: CoreLoop[int, str] = CoreLoop(Nothing(), lambda _: None, inbox_size=2)
    assert [loop.offer_nowait(number) for number in range(3)] == [True, True, False]
    with pytest.raises(DeadlineExceeded):
        await loop.offer(3, deadline_s=0.01)
    assert loop.usage() == Usage(2, 2, 2)
    running = asyncio.create_task(loop.run())
    await loop.wait_idle(deadline_s=5)
    assert loop.usage() == Usage(0, 2, 2)
    running.cancel()


def test_departures_tell_what_they_have_forgotten() -> None:
    former = FormerBlocks(1_000)
    departures = Departures(DEPARTURES_MIN, former)
    for number in range(DEPARTURES_MIN + 2_000):
        departures.note([SequenceHash(number.to_bytes(16, "big"))], "evicted", 1_000 + number)
    now_ms = 1_000 + DEPARTURES_MIN + 2_000
    usage = departures.usage(now_ms)
    assert usage == Usage(DEPARTURES_MIN, DEPARTURES_MIN, 2_000, (now_ms - 1_000 - 1_999) / 1_000)
    assert former.usage(now_ms).used == former.horizon
    assert former.usage(now_ms).dropped == 2_000 - former.horizon
    assert former.usage(now_ms).reach_s == pytest.approx(former.horizon / 1_000, rel=0.1)


@pytest.mark.parametrize("name", BOUNDS)
def test_each_bound_says_what_it_holds_and_what_to_change(name: str) -> None:
    bound = BOUNDS[name]
    assert bound.holds
    assert bound.advice.endswith((".", "log."))
