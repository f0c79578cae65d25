"""Watched calls of an engine core, on a class of its kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_connectors.vllm.core_calls import ours, watch


def test_each_end_of_a_call_is_told_of_once() -> None:
    """Also where it raises, and where the method is watched twice."""
    told: list[tuple[Any, ...]] = []

    class Core:
        def load(self, number: int, *, half: bool = False) -> int:
            if half:
                raise OSError(number)
            return number

    def tell(_engine: Any, failed: bool, number: int, **more: Any) -> None:
        told.append((failed, number, more))

    for _ in range(2):
        watch("load", tell, Core, without="")
    assert Core().load(1) == 1
    with pytest.raises(OSError, match="2"):
        Core().load(2, half=True)
    assert told == [(False, 1, {}), (True, 2, {"half": True})]


def test_a_method_that_is_missing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    watch("load", print, SimpleNamespace, without="no loads are seen")
    assert "no 'load': no loads are seen" in caplog.text


def test_our_connectors_are_found_in_each_place() -> None:
    """None before a core has a scheduler; with `MultiConnector` they are its children."""
    one = SimpleNamespace(hears=None)
    several = SimpleNamespace(_connectors=[SimpleNamespace(), one])
    for connector, found in ((None, []), (one, [one]), (several, [one])):
        core = SimpleNamespace(scheduler=SimpleNamespace(connector=connector))
        assert list(ours(core, "hears")) == found
    assert list(ours(SimpleNamespace(), "hears")) == []
