"""Weight writes: vLLM's engine core is watched for calls of its workers that write weights.

vLLM tells no connector of `reload_weights` or `update_weights`. Without a reset that follows,
blocks of the old weights would be found by requests that compute with the new ones, and blocks of
the new ones stored under the names of the old. Such calls go through the engine core, in the
scheduler's process and thread: by their names it is known what they do.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from kvbm_connectors.vllm.adapter_loads import WATCHED, engine_core, ours

CALL = "collective_rpc"
"""The method of vLLM's engine core that calls a method of all workers."""
WRITTEN = ("weight", "param")
"""Words in the names of methods that write weights, of vLLM's own and of RL frameworks':
`update_weights_from_ipc`, `update_named_param`."""
READERS = ("init_", "shutdown_", "compute_", "get_", "save_", "check_", "list_", "dump_")
"""Beginnings of names of methods that write none, as `init_weight_transfer_engine`."""
OTHERS = frozenset({"load_model"})
"""Further methods that write weights."""

log = logging.getLogger(__name__)


def watch_writes(core_class: Any = None) -> None:
    """Have vLLM's `EngineCore` tell our connectors of calls that have written weights, or failed
    to: they may have written some."""
    if core_class is None:
        core_class = engine_core()
    call = getattr(core_class, CALL, None)
    if call is None:
        log.warning("vLLM's engine core has no %r: new weights are not seen; reset the caches with "
                    "reset_connector after each update", CALL)  # fmt: skip
        return
    if hasattr(call, WATCHED):
        return

    @functools.wraps(call)
    def called(engine: Any, method: Any, *arguments: Any, **more: Any) -> Any:
        try:
            return call(engine, method, *arguments, **more)
        finally:
            if writes(method):
                for connector in ours(_connector_of(engine), "weights_written"):
                    connector.weights_written()

    setattr(called, WATCHED, True)
    setattr(core_class, CALL, called)


def writes(method: Any) -> bool:
    """Return whether a method of workers writes weights, by its name; it may be a function."""
    name = method if isinstance(method, str) else str(getattr(method, "__name__", ""))
    name = name.lstrip("_")
    if name in OTHERS:
        return True
    return any(word in name for word in WRITTEN) and not name.startswith(READERS)


def _connector_of(engine: Any) -> Any:
    """Return the scheduler's connector. vLLM calls workers before it has a scheduler."""
    return getattr(getattr(engine, "scheduler", None), "connector", None)
