"""The watch over vLLM's engine core, on a core with two methods; `tests/vllm/test_resets.py` runs
the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_connectors.vllm.adapter_loads import watch_loads


class Core:
    """vllm.v1.engine.core.EngineCore."""

    def __init__(self, connector: Any) -> None:
        self.scheduler = SimpleNamespace(connector=connector)

    def add_lora(self, lora_request: str) -> bool:
        if lora_request == "broken":
            raise OSError(lora_request)
        return True


class Connector:
    """Ours: it hears of adapters."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bool]] = []

    def adapter_loaded(self, lora: str, *, failed: bool) -> None:
        self.heard.append((lora, failed))


def test_our_connector_hears_of_each_load_once() -> None:
    """Alone, or a child of `MultiConnector`. A load that fails may have replaced an adapter."""

    class Watched(Core):
        add_lora = Core.add_lora

    for _ in range(2):
        watch_loads(Watched)
    ours = Connector()
    several = SimpleNamespace(_connectors=[SimpleNamespace(), ours])
    for connector in (ours, several, SimpleNamespace(), None):
        assert Watched(connector).add_lora("poet")
    assert ours.heard == [("poet", False)] * 2
    with pytest.raises(OSError, match="broken"):
        Watched(ours).add_lora("broken")
    assert ours.heard[2:] == [("broken", True)]


def test_a_core_without_the_method_stays_as_it_is() -> None:
    watch_loads(SimpleNamespace)
    assert not hasattr(SimpleNamespace, "add_lora")
