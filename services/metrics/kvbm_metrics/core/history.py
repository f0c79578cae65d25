"""History: the last hour of what engines asked for and found, by host and in all.

Pure: the rates of a moment go in with the time. A point is what `Rates` knows at the first look in
its slot of time: the rate over the ten seconds before. A slot without a look stays unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from kvbm_metrics.core import flows
from kvbm_metrics.core.collector import counted, tier_of
from kvbm_metrics.core.fleet_view import FleetView, Instance
from kvbm_metrics.core.models import LookupsView
from kvbm_metrics.core.rates import WINDOW_S, Rates
from kvbm_metrics.core.recent_models import HistoryPoint

SPACING_S = WINDOW_S
"""Seconds between two points: the window of a rate, so that each second counts in one point."""
POINTS = 360
"""An hour."""
SERIES_MAX = 65
"""All hosts together, and 64 hosts; the longest silent host is forgotten first."""
POINT_BYTES = 320
"""A tuple, its numbers, and its place in a deque, at most."""
BYTES_MAX = SERIES_MAX * POINTS * POINT_BYTES
ALL = ""
"""The name of the series of all hosts together."""


class _Kept(NamedTuple):
    slot: int
    hit_rate: float | None
    lookups: float
    matched_tokens: float


def lookups_by_host(view: FleetView, rates: Rates) -> dict[str, LookupsView]:
    """Return the lookups of every host with a tier, and those of all together (`ALL`)."""
    by_host: dict[str, list[Instance]] = {}
    for one in view.instances:
        if tier_of(one) is not None:
            by_host.setdefault(one.record.host, []).append(one)
    assert ALL not in by_host, "a host has no name"
    found = {
        host: flows.lookups_of(counted(replace(view, instances=group), rates))
        for host, group in by_host.items()
    }
    return found | {ALL: flows.lookups_of(counted(view, rates))}


class History:
    """The points of every host."""

    def __init__(self) -> None:
        self._series: dict[str, deque[_Kept]] = {}
        self._slot = -1

    def is_due(self, now_s: float) -> bool:
        """Tell whether the slot of now has not been looked at."""
        return int(now_s // SPACING_S) > self._slot

    def take(self, lookups: Mapping[str, LookupsView], now_s: float) -> None:
        """Take the rates of all (`ALL`) and of hosts; the first of a slot is kept."""
        assert ALL in lookups, f"only {sorted(lookups)}, and not all together"
        slot = self._slot = int(now_s // SPACING_S)
        hosts = [name for name in lookups if name != ALL]
        for name in [*hosts, ALL]:  # The last is the last to be forgotten.
            series = self._series.pop(name, deque[_Kept](maxlen=POINTS))
            said = lookups[name]
            if said.window_s > 0 and (not series or series[-1].slot < slot):
                series.append(_Kept(slot, said.hit_rate, said.lookups, said.matched_tokens))
            self._series[name] = series
        for name, series in list(self._series.items()):
            if name not in lookups and (not series or slot - series[-1].slot >= POINTS):
                del self._series[name]
        while len(self._series) > SERIES_MAX:
            del self._series[next(iter(self._series))]
        assert ALL in self._series, "the series of all hosts is forgotten"

    def of(self, host: str, now_s: float) -> list[HistoryPoint]:
        """Return the points of the last hour, oldest first; none for a host that is not known."""
        now = int(now_s // SPACING_S)
        kept = [one for one in self._series.get(host, ()) if now - one.slot < POINTS]
        assert all(one.slot <= now for one in kept), f"points of {host!r} after {now_s} s"
        return [
            HistoryPoint(
                ago_s=(now - one.slot) * SPACING_S,
                hit_rate=one.hit_rate,
                lookups=one.lookups,
                matched_tokens=one.matched_tokens,
            )
            for one in kept
        ]

    def check(self) -> None:
        """Assert every invariant; O(points)."""
        assert len(self._series) <= SERIES_MAX
        for name, series in self._series.items():
            slots = [one.slot for one in series]
            assert len(slots) <= POINTS, name
            assert slots == sorted(set(slots)), f"{name}: {slots}"
