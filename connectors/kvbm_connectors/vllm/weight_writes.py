"""Weight writes: vLLM's engine core is watched for calls of its workers that write weights.

vLLM tells no connector of `reload_weights` or `update_weights`. Without a reset that follows,
blocks of the old weights would be found by requests that compute with the new ones, and blocks of
the new ones stored under the names of the old. Such calls go through the engine core, in the
scheduler's process and thread, by names that each RL framework makes up. A name that is not known
as harmless counts as a write: a false alarm costs what is cached until the next reset, a missed
write costs right answers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvbm_connectors.vllm.core_calls import ours, watch

CALL = "collective_rpc"
"""The method of vLLM's engine core that calls a method of all workers."""
APPLY = "apply_model"
"""The method of workers that calls a function with the model, which is its first argument."""
READERS = (
    "check_", "close_", "collect_", "compute_", "count_", "destroy_", "dump_", "get_", "has_",
    "inspect_", "is_", "list_", "measure_", "report_", "save_", "shutdown_", "supports_",
    "validate_", "verify_",
)  # fmt: skip
"""Beginnings of names that write no weights."""
CONNECTED = ("_collective", "_communicator", "_engine", "_group")
"""Endings of names that begin with `init_` and connect workers, as `init_weight_update_group`."""
OTHERS = frozenset({
    "barrier", "checkpoint_prepare", "checkpoint_restore", "finish_benchmark_kda_state",
    "fpm_disable_cudagraph_metrics", "fpm_engine_probe", "fpm_gc_stop", "health", "health_check",
    "heartbeat", "liveness_probe", "pin_lora", "ping", "profile",
    "release_late_interaction_query_cache", "remove_lora", "reset_encoder_cache", "reset_mm_cache",
    "snapshot_worker_identity", "start_profile", "stop_profile", "synchronize_device",
    "update_max_model_len",
})  # fmt: skip
"""Further names that write none: vLLM's own, those of Dynamo's start, and looks at health. Not
`sleep` and `wake_up`: called by name they leave vLLM's prefix cache, while its memory is gone."""
SECOND_WORDS = ("_and_", "_then_", "_or_", "_from_")
"""Words before what may write: `check_and_update_weights`, `get_weights_from_trainer`."""
WRITTEN = ("weight", "param", "load")
"""Words in names that surely write."""
WARNED_MAX = 64
"""Names that are logged, each once."""

log = logging.getLogger(__name__)
_warned: set[str] = set()


def watch_writes(core_class: Any = None) -> None:
    """Have vLLM's `EngineCore` tell our connectors of calls that have written weights, or failed
    to: they may have written some."""
    without = "new weights are not seen; reset the caches with reset_connector after each update"
    watch(CALL, _called, core_class, without=without)


def _called(engine: Any, _failed: bool, method: Any, *arguments: Any, **more: Any) -> None:
    name = name_of(method, *arguments, **more)
    if is_harmless(name):
        return
    for connector in ours(engine, "weights_written"):
        if connector.weights_written(name):
            _warn(name)


def name_of(
    method: Any,
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *_: Any,
    **__: Any,
) -> str:
    """Return the name of what a call of workers runs; `""` where it has none.

    The method may be a function. Of `apply_model` it is the name of its argument. Later versions of
    vLLM may give more arguments.
    """
    if method == APPLY:
        method = next(iter((*(args or ()), *(kwargs or {}).values())), "")
    while isinstance(method, functools.partial):
        method = method.func
    return method if isinstance(method, str) else str(getattr(method, "__name__", ""))


def is_harmless(name: str) -> bool:
    """Return whether a method of workers is known to write no weights, by its name."""
    name = name.lstrip("_")
    if name in OTHERS:
        return True
    if any(word in name for word in SECOND_WORDS):
        return False
    if name.startswith(READERS):
        return True
    return name.startswith("init_") and name.endswith(CONNECTED)


def _warn(name: str) -> None:
    """Say once of each name that may write none that it counts as a write, and the way out."""
    if name in _warned or len(_warned) >= WARNED_MAX or any(word in name for word in WRITTEN):
        return
    _warned.add(name)
    log.warning("vLLM's workers were called by %r, which may write weights: the engine finds "
                "nothing that was stored before, and stores nothing of requests that hit its "
                "device cache until that is reset. If it writes none, name it in harmless_calls",
                name)  # fmt: skip
