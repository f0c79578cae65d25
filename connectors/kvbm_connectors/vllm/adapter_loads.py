"""Adapter loads: vLLM's engine core is watched for adapters that take the place of others.

vLLM tells no connector of an adapter that it loads before a request brings it. With `load_inplace`
(`POST /v1/load_lora_adapter`) an adapter takes another one's number while requests with the old one
run: from then on the engine computes them with the new weights, under the old name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

LOAD = "add_lora"
"""The method of vLLM's engine core that loads an adapter, in the scheduler's process and thread."""
WATCHED = "kvbm_watches"
"""Attribute of the method that stands for vLLM's own."""

log = logging.getLogger(__name__)


def watch_loads(core_class: Any = None) -> None:
    """Have vLLM's `EngineCore` tell our connectors of each adapter that it has loaded, or failed
    to: it may have taken the old one away by then."""
    if core_class is None:
        core_class = engine_core()
    load = getattr(core_class, LOAD, None)
    if load is None:
        log.warning("vLLM's engine core has no %r: an adapter that is loaded in place is not seen "
                    "before a request brings it; load each under a new name", LOAD)  # fmt: skip
        return
    if hasattr(load, WATCHED):
        return

    @functools.wraps(load)
    def loaded(engine: Any, lora_request: Any) -> Any:
        failed = True
        try:
            answer = load(engine, lora_request)
            failed = False
            return answer
        finally:
            kept = not failed or _keeps(engine, lora_request)
            for connector in ours(getattr(engine.scheduler, "connector", None), "adapters_lost"):
                _tell(connector, lora_request, failed=failed, kept=kept)

    setattr(loaded, WATCHED, True)
    setattr(core_class, LOAD, loaded)


def engine_core() -> Any:
    """Return vLLM's class, or None where this vLLM has it elsewhere."""
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return None
    return EngineCore


def _keeps(engine: Any, lora_request: Any) -> bool:
    """Return whether vLLM may go on with what a load that has failed has brought: it counts an
    adapter as loaded before all of its weights are in place."""
    try:
        return int(lora_request.lora_int_id) in engine.list_loras()
    except Exception:
        return True


def _tell(connector: Any, lora_request: Any, *, failed: bool, kept: bool) -> None:
    """Tell a connector of a load. vLLM has loaded the adapter: an error of ours is not vLLM's."""
    try:
        connector.adapter_loaded(lora_request, failed=failed, kept=kept)
    except Exception:
        log.exception("cannot follow the adapters that vLLM loads; "
                      "requests with adapters are not cached from now on")  # fmt: skip
        connector.adapters_lost()


def ours(connector: Any, method: str) -> Iterator[Any]:
    """Yield our connectors, which have this method: an engine's only one, or children of vLLM's
    `MultiConnector`."""
    children = getattr(connector, "_connectors", None)
    for child in children if isinstance(children, (list, tuple)) else ():
        yield from ours(child, method)
    if hasattr(connector, method):
        yield connector
