"""Adapter loads: vLLM's engine core is watched for adapters that take the place of others.

vLLM tells no connector of an adapter that it loads before a request brings it. With `load_inplace`
(`POST /v1/load_lora_adapter`) an adapter takes another one's number while requests with the old one
run: from then on the engine computes them with the new weights, under the old name.
"""

from __future__ import annotations

import logging
from typing import Any

from kvbm_connectors.vllm.core_calls import ours, watch

LOAD = "add_lora"
"""The method of vLLM's engine core that loads an adapter."""

log = logging.getLogger(__name__)


def watch_loads(core_class: Any = None) -> None:
    """Have vLLM's `EngineCore` tell our connectors of each adapter that it has loaded, or failed
    to: it may have taken the old one away by then."""
    without = (
        "an adapter that is loaded in place is not seen before a request brings it; load each "
        "under a new name"
    )
    watch(LOAD, _loaded, core_class, without=without)


def _loaded(engine: Any, failed: bool, lora_request: Any) -> None:
    kept = not failed or _keeps(engine, lora_request)
    for connector in ours(engine, "adapters_lost"):
        _tell(connector, lora_request, failed=failed, kept=kept)


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
