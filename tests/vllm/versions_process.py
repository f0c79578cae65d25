"""Names that only some versions of vLLM have: which of them this vLLM has.

`python -m tests.vllm.versions_process` writes a JSON object: name → whether it is there.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
from typing import Any

PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1"
"""Where vLLM has its interface for connectors."""


def has_field(owner: Any, name: str) -> bool:
    """Return whether a dataclass, or a class with properties, has this field."""
    fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    return hasattr(owner, name) or name in {field.name for field in fields}


def has_module(name: str) -> bool:
    """Return whether a module can be imported."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def main() -> None:
    """Write the answer to a copy of stdout: vLLM writes to stdout too."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm.config import VllmConfig
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.core.sched.output import KVConnectorBlockState
    from vllm.v1.request import Request

    base = importlib.import_module(f"{PACKAGE}.base")
    found = {
        "KVConnectorTransferResults": hasattr(base, "KVConnectorTransferResults"),
        "get_block_ids": hasattr(KVConnectorBlockState, "get_block_ids"),
        "host_resident": has_field(interface.KVCacheGroupSpec, "host_resident"),
        "kv_hints": "kv_hints" in inspect.signature(Request).parameters,
        "kv_tp_replicas": has_field(interface.KVCacheConfig, "kv_tp_replicas"),
        "num_prefill_lookahead_tokens": has_field(VllmConfig, "num_prefill_lookahead_tokens"),
        "prefix_replay_tokens": has_field(interface.KVCacheSpec, "prefix_replay_tokens"),
        "cache_hit_source": has_module("vllm.v1.metrics.cache_hit_source"),
        "unregister_kv_caches": hasattr(base.KVConnectorBase_V1, "unregister_kv_caches"),
    }
    json.dump(found, ours)
    ours.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
