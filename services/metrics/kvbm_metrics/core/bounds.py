"""Bounds of the whole fleet: from what the instances count to what an operator sees.

Pure: families of metrics go in, bodies of the HTTP API come out. What an instance says that makes
no sense is left out: it may be of another release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from kvbm_common.wire.bounds import DROPPED, REACH, SIZE, USED
from kvbm_common.wire.metrics import Family, MetricsSnapshot, Sample
from pydantic import BaseModel, Field

from kvbm_metrics.core.fleet_view import FleetView, Instance

MISSED = "kvbm_missed_blocks_total"
UNEXPLAINED = ("not_remembered", "unknown")
"""Reasons of misses that explain nothing."""
JOURNAL_DUE = "kvbm_journal_due_seconds"
BEHIND = ("kvbm_index_sources_behind", "kvbm_consolidator_tiers_behind")
SAMPLE_MAX = 1e18
"""No count of blocks, bytes or seconds is larger, and the sum of all of them is a number."""
KINDS = ("queue", "table", "history")
BOUNDS_MAX = 64
"""Bounds of one instance: twice as many as there are."""


class BoundView(BaseModel, frozen=True):
    """The usage of one queue, table or history of a service."""

    bound: str
    kind: Literal["queue", "table", "history"]
    used: float
    size: float
    dropped: Annotated[
        float, Field(description="Refused, dropped or forgotten since the service began.")
    ]
    reach_s: Annotated[
        float | None, Field(description="How far back a history reaches that has forgotten.")
    ] = None


class BoundsOf(BaseModel, frozen=True):
    """The bounds of one instance, with the figures that say whether it can tell what it did."""

    service: str
    host: str
    instance: str
    answers: bool
    ready: bool
    reasons: list[str]
    bounds: list[BoundView]
    missed_blocks: float
    unexplained_blocks: Annotated[
        float, Field(description="Missed blocks whose reason is `not_remembered` or `unknown`.")
    ]
    journal_due_s: Annotated[
        float, Field(description="How long a rewrite of the journal has been wanted.")
    ]
    behind: Annotated[
        float, Field(description="Sources or tiers whose events are missing until a snapshot.")
    ] = 0.0


def bounds_view(view: FleetView) -> list[BoundsOf]:
    """Return the bounds of every registered instance."""
    return [_of(one) for one in view.instances]


def _of(one: Instance) -> BoundsOf:
    record = one.record
    families = _families(one.snapshot)
    missed = _by_label(families.get(MISSED), "reason")
    found = list(_bounds(families))[:BOUNDS_MAX]
    assert len({bound.bound for bound in found}) == len(found), "two bounds have one name"
    return BoundsOf(
        service=record.kind,
        host=record.host,
        instance=record.instance,
        answers=one.up,
        ready=one.ready,
        reasons=one.reasons,
        bounds=found,
        missed_blocks=sum(missed.values()),
        unexplained_blocks=sum(missed.get(reason, 0.0) for reason in UNEXPLAINED),
        journal_due_s=sum(sample.value for sample in _samples(families.get(JOURNAL_DUE))),
        behind=sum(one.value for name in BEHIND for one in _samples(families.get(name))),
    )


def _families(snapshot: MetricsSnapshot | None) -> Mapping[str, Family]:
    return {family.name: family for family in snapshot.families} if snapshot else {}


def _bounds(families: Mapping[str, Family]) -> Iterator[BoundView]:
    sizes, dropped = _by_label(families.get(SIZE)), _by_label(families.get(DROPPED))
    reaches, kinds = _by_label(families.get(REACH)), _kinds(families.get(USED))
    for name, used in _by_label(families.get(USED)).items():
        kind, size = kinds[name], sizes.get(name, 0.0)
        if kind in KINDS and size > 0:
            yield BoundView.model_validate(
                {
                    "bound": name,
                    "kind": kind,
                    "used": used,
                    "size": size,
                    "dropped": dropped.get(name, 0.0),
                    "reach_s": reaches.get(name),
                }
            )


def _by_label(family: Family | None, label: str = "bound") -> dict[str, float]:
    return {sample.labels.get(label, ""): sample.value for sample in _samples(family)}


def _kinds(family: Family | None) -> dict[str, str]:
    return {one.labels.get("bound", ""): one.labels.get("kind", "") for one in _samples(family)}


def _samples(family: Family | None) -> list[Sample]:
    found = family.samples if family is not None else []
    return [sample for sample in found if 0 <= sample.value <= SAMPLE_MAX]
