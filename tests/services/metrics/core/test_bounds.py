"""The bounds of the fleet: what instances count is shown, what makes no sense is left out."""

from __future__ import annotations

import math

import pytest
from kvbm_common.wire.bounds import SIZE, USED
from kvbm_common.wire.metrics import Family, MetricsSnapshot, Sample
from kvbm_metrics.core.bounds import BEHIND, JOURNAL_DUE, MISSED, BoundsOf, bounds_view
from kvbm_metrics.core.fleet_view import FleetView, Instance

from tests.services.metrics.samples import record, stats


def family(name: str, *values: float, **labels: str) -> Family:
    """A gauge with as many samples."""
    return Family(name, "gauge", "", [Sample(labels, value) for value in values])


def shown(*families: Family) -> BoundsOf:
    """What is shown of one host tier."""
    snapshot = MetricsSnapshot("host-tier", "a", "0", 1, list(families))
    one = Instance(record=record("host-tier"), stats=stats("host-tier"), snapshot=snapshot, up=True)
    (found,) = bounds_view(FleetView(instances=[one]))
    return found


def inbox(used: float, size: float) -> list[Family]:
    """The two gauges of one bound."""
    return [family(USED, used, bound="inbox", kind="queue"), family(SIZE, size, bound="inbox")]


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -1.0, 1.7e308])
def test_samples_that_make_no_sense_are_left_out(absurd: float) -> None:
    assert shown(*inbox(absurd, 9)).bounds == []
    assert shown(*inbox(3, absurd)).bounds == []
    assert shown(family(JOURNAL_DUE, absurd, absurd, 2)).journal_due_s == 2
    assert shown(family(MISSED, absurd, reason="evicted")).missed_blocks == 0


def test_the_sum_of_what_is_believed_is_a_number() -> None:
    assert math.isfinite(shown(family(JOURNAL_DUE, *[1e18] * 1_000)).journal_due_s)


def test_what_is_behind_is_counted() -> None:
    assert shown(*(family(name, 2) for name in BEHIND)).behind == 4
    assert shown(*inbox(3, 9)).behind == 0
