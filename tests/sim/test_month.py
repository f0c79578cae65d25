"""A month of the simulation's clock: counters near their ends, clocks that step, weeks of rest."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.sim.month import MONTH_MS, Month
from tests.sim.plant import Plant
from tests.sim.plants_month import PLANTS

FEW = range(4)
SEEDS = range(4, 50)
SEEDS_PER_TEST = 5
PLANT_SEEDS = range(1_000, 1_025)


def outcome(seed: int) -> tuple[str, Counter[str], bool]:
    """How a month went ("" is good), what was seen in it, and whether its counters were old."""
    month = Month(seed)
    try:
        month.run()
    except AssertionError as error:
        return f"month {seed} at {month.world.now:.0f} ms: {error}", month.world.marks, True
    assert month.world.now > MONTH_MS
    return "", month.world.marks, month.world.plan.aged


def test_a_few_months_hold() -> None:
    """1. They keep every promise. 2. Among them are old counters, and a clock that has stepped."""
    outcomes = [outcome(seed) for seed in FEW]
    assert [text for text, _, _ in outcomes if text] == []
    assert {aged for _, _, aged in outcomes} == {False, True}
    seen = sum((marks for _, marks, _ in outcomes), Counter[str]())
    for mark in ("time of day: -1 h", "time of day: 1 h", "blocks from host", "blocks from below"):
        assert seen[mark], mark


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", SEEDS[::SEEDS_PER_TEST])
def test_every_month_holds(first: int) -> None:
    """All cores keep their promises over thirty days; a failure says which seed."""
    seeds = range(first, min(first + SEEDS_PER_TEST, SEEDS.stop))
    assert [text for text, _, _ in map(outcome, seeds) if text] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_planted_bugs_of_long_runs_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a month can fail. One mistake is planted, and the right checker finds it."""
    plant.sow(monkeypatch)
    seeds = plant.seeds(PLANT_SEEDS)
    found = next((error for seed in seeds if (error := violation(seed, plant))), "")
    assert found, f"no seed of {PLANT_SEEDS} has found it"
    assert re.search(plant.found_as, found), found


def violation(seed: int, plant: Plant) -> str:
    """What a checker says of a month; "" if it holds."""
    try:
        Month(seed, **plant.plan).run()
    except AssertionError as error:
        return f"month {seed}: {error}"
    return ""
