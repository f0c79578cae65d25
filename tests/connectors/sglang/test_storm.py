"""Drawn programs of threads at several storages: no page is wrong, and no call waits too long."""

from __future__ import annotations

import pytest
from kvbm_connectors.client.worker import WorkerHalf
from kvbm_connectors.sglang.store import Store

from tests.connectors.sglang import storm
from tests.sglang.plants import PLANTS
from tests.vllm.harness import live_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CALM, STORMY = range(6), range(3)
"""Seeds; `storm` runs more of them."""


def test_in_calm_weather_what_is_stored_is_loaded() -> None:
    """No write fails, also beside another engine's of the same pages, and no page is lost."""
    with live_stack(storm.CALM, storm.SERVICES) as stack:
        for seed in CALM:
            found = storm.run(stack, seed, calm=True)
            assert not found.errors, f"seed {seed}: {found.errors}"
            assert found.counts["pages loaded"] > 500


def test_in_a_storm_no_page_is_wrong() -> None:
    """Services are killed and stand still, weights change, storages end; afterwards all works."""
    with live_stack(storm.STORMY, storm.SERVICES) as stack:
        for seed in STORMY:
            found = storm.run(stack, seed)
            assert not found.errors, f"seed {seed}: {found.errors}"
            assert found.counts["pages loaded"] > 100


@pytest.mark.parametrize("plant", ["early-pages", "shifted-pages"])
def test_a_planted_mistake_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "store", Store.store)  # So that it is there again afterwards.
    monkeypatch.setattr(Store, "load", Store.load)
    monkeypatch.setattr(WorkerHalf, "__init__", WorkerHalf.__init__)
    PLANTS[plant]()
    with live_stack(storm.CALM, storm.SERVICES) as stack:
        assert any(storm.run(stack, seed, calm=True).errors for seed in CALM)
