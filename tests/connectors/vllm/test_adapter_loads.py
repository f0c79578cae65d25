"""The watch over vLLM's engine core, on a core with two methods; `tests/vllm/test_resets.py` runs
the real one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_connectors.vllm.adapter_loads import watch_loads

BROKEN = SimpleNamespace(lora_int_id=7)


class Core:
    """vllm.v1.engine.core.EngineCore."""

    def __init__(self, connector: Any, listed: set[int] | None = None) -> None:
        self.scheduler = SimpleNamespace(connector=connector)
        self._listed = listed

    def add_lora(self, lora_request: Any) -> bool:
        if lora_request is BROKEN:
            raise OSError("broken")
        return True

    def list_loras(self) -> set[int]:
        if self._listed is None:
            raise RuntimeError("the workers have different adapters")
        return self._listed


class Connector:
    """Ours: it hears of adapters, and does not understand `odd` ones."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, bool, bool]] = []
        self.is_lost = False

    def adapter_loaded(self, lora: Any, *, failed: bool, kept: bool) -> None:
        if lora == "odd":
            raise TypeError(lora)
        self.heard.append((lora, failed, kept))

    def adapters_lost(self) -> None:
        self.is_lost = True


def test_our_connector_hears_of_each_load_once() -> None:
    """Alone, or a child of `MultiConnector`. A load that fails may have replaced an adapter, and
    vLLM may have kept a part of it."""

    class Watched(Core):
        add_lora = Core.add_lora

    for _ in range(2):
        watch_loads(Watched)
    ours = Connector()
    several = SimpleNamespace(_connectors=[SimpleNamespace(), ours])
    for connector in (ours, several, SimpleNamespace(), None):
        assert Watched(connector).add_lora("poet")
    assert ours.heard == [("poet", False, True)] * 2
    for listed, kept in ((None, True), ({7}, True), ({1}, False)):
        with pytest.raises(OSError, match="broken"):
            Watched(ours, listed).add_lora(BROKEN)
        assert ours.heard.pop() == (BROKEN, True, kept)


def test_a_load_does_not_fail_because_of_a_connector() -> None:
    """Foreign connectors have what they like under our names, and ours may have an error."""

    class Watched(Core):
        add_lora = Core.add_lora

    watch_loads(Watched)
    ours = Connector()
    for children in (None, 1, "ab", ()):
        assert Watched(SimpleNamespace(_connectors=children)).add_lora("poet")
    assert not ours.is_lost
    assert Watched(ours).add_lora("odd")
    assert ours.is_lost


@pytest.mark.parametrize("missing", ["method", "module"])
def test_a_core_that_is_elsewhere_is_not_watched(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine starts, and its log names what is not seen."""
    if missing == "method":
        watch_loads(SimpleNamespace)
        assert not hasattr(SimpleNamespace, "add_lora")
    else:
        monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", None)
        watch_loads()
    assert "no 'add_lora'" in caplog.text
