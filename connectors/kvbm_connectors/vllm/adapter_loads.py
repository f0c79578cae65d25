"""Adapter loads: vLLM's engine core is watched for adapters that take the place of others.

vLLM tells no connector of an adapter that it loads before a request brings it. With `load_inplace`
(`POST /v1/load_lora_adapter`) an adapter takes another one's number while requests with the old one
run: from then on the engine computes them with the new weights, under the old name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

LOAD = "add_lora"
"""The method of vLLM's engine core that loads an adapter, in the scheduler's process and thread."""
WATCHED = "kvbm_watches"
"""Attribute of the method that stands for vLLM's own."""


def watch_loads(core_class: Any = None) -> None:
    """Have vLLM's `EngineCore` tell our connectors of each adapter that it has loaded, or failed
    to: it may have taken the old one away by then."""
    if core_class is None:
        from vllm.v1.engine.core import EngineCore

        core_class = EngineCore
    load = getattr(core_class, LOAD, None)
    if load is None or hasattr(load, WATCHED):
        return

    @functools.wraps(load)
    def loaded(core: Any, lora_request: Any) -> Any:
        failed = True
        try:
            answer = load(core, lora_request)
            failed = False
            return answer
        finally:
            for connector in _ours(getattr(core.scheduler, "connector", None)):
                connector.adapter_loaded(lora_request, failed=failed)

    setattr(loaded, WATCHED, True)
    setattr(core_class, LOAD, loaded)


def _ours(connector: Any) -> Iterator[Any]:
    """Yield our connectors: an engine's only one, or children of vLLM's `MultiConnector`."""
    for child in getattr(connector, "_connectors", ()):
        yield from _ours(child)
    if hasattr(connector, "adapter_loaded"):
        yield connector
