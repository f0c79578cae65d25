"""Stops of SGLang's storage threads, on a class of its kind."""

from __future__ import annotations

import pytest
from kvbm_connectors.sglang.stops import METHOD, Stops


def test_a_stop_is_under_way_until_it_ends_or_fails() -> None:
    """And a second watch, of another storage, counts none twice."""
    stops = Stops()
    seen: list[int] = []

    class Controller:
        def _stop_storage_threads(self) -> None:
            seen.append(stops.count)
            raise RuntimeError("Failed to stop HiCache storage threads cleanly")

    for _ in range(2):
        stops.watch(Controller)
        with pytest.raises(RuntimeError):
            getattr(Controller(), METHOD)()
    assert (seen, stops.count) == ([1, 1], 0)


def test_another_class_is_refused() -> None:
    with pytest.raises(AttributeError):
        Stops().watch(object)
