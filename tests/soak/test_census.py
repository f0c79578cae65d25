"""What a census of a service counts, and which points it makes."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest
from kvbm_index.core.core import IndexCore
from kvbm_index.core.messages import SourceJoined, SourceKey

from tests.soak import census, plants
from tests.soak.fills import fills
from tests.soak.judge import Point
from tests.soak.measure import Censuses, Series


def test_places_that_fill_are_known_by_class_or_attribute() -> None:
    assert fills("index Source objects")
    assert fills("index Source.tail")
    assert fills("index IndexCore._sources")
    assert not fills("index IndexCore._routes")
    assert not fills("consolidator tests.soak.plants.kept")


class _Leaky:
    """An object with a container in a container, and one that another has, too."""

    def __init__(self, shared: list[int]) -> None:
        self._by_engine = {"a": [1, 2], "b": [3]}
        self._shared = shared


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_census_counts_every_entry_once(monkeypatch: pytest.MonkeyPatch, is_frozen: bool) -> None:
    """Goal: what a service has frozen when it was ready counts like all else."""
    monkeypatch.setattr(census, "OURS", (__name__,))
    shared = [1, 2, 3]
    alive = [_Leaky(shared), _Leaky(shared)]
    if is_frozen:
        gc.freeze()
    counted = census.entries()
    assert counted["_Leaky objects"] == len(alive)
    assert counted["_Leaky._by_engine"] == 2 * 5
    assert counted["_Leaky._shared"] == 3


def test_a_census_leaves_out_what_was_left_out() -> None:
    """Goal: no collection of a service walks its tables because a census was taken."""
    gc.freeze()
    table = gc.get_freeze_count()
    census.entries()
    assert gc.get_freeze_count() > 0.9 * table


def test_garbage_in_cycles_is_not_kept_by_a_census(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what fails again and again, and leaves cycles, does not seem to grow."""
    monkeypatch.setattr(census, "OURS", (__name__,))
    gc.freeze()
    for _ in range(3):
        cycle: list[object] = []
        cycle.append((cycle, _Leaky([])))
        del cycle
        assert "_Leaky objects" not in census.entries()


def test_a_leak_into_a_core_is_seen_in_its_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the plant is found where leaks of the product would be, in a service that is ready."""
    core = IndexCore()
    gc.freeze()
    monkeypatch.setattr(IndexCore, "step", IndexCore.step)  # Is put back at the end.
    monkeypatch.setenv(plants.VARIABLE, "index-core-entry")
    plants.plant_service("index")
    for number in range(7):
        core.step(SourceJoined(SourceKey("h", f"e{number}"), 1), number)
    assert census.entries()["IndexCore.planted"] == 7


def test_a_place_that_is_empty_has_points_of_zero(tmp_path: Path) -> None:
    """Goal: before its first entry, between two, and in the next life, too."""
    series: Series = {}
    censuses = Censuses(tmp_path, series)
    lives = [(1, {"a": 3}), (1, {"a": 3, "queue": 90}), (1, {"a": 3}), (2, {"a": 1})]
    for at, (pid, counted) in enumerate(lives):
        path = tmp_path / f"{pid}.json"
        path.write_text(json.dumps(counted))
        os.utime(path, ns=(at + 1, at + 1))
        for _ in range(2):  # A census that was read counts no more.
            censuses.note("index", pid, Point(float(at), at, pid, 0.0))
    found = [(point.life, point.value) for point in series["entries", "index queue"]]
    assert found == [(1, 0), (1, 90), (1, 0), (2, 0)]
