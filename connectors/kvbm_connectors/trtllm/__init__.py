"""KVBM for TensorRT-LLM: `kv_connector_config.connector_module: kvbm_connectors.trtllm`.

The classes, and with them the engine, are imported when one is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbm_connectors.trtllm.connector import (
        DynamoKVBMConnectorLeader,
        DynamoKVBMConnectorWorker,
        KvbmConnectorLeader,
        KvbmConnectorWorker,
    )

__all__ = [
    "DynamoKVBMConnectorLeader",
    "DynamoKVBMConnectorWorker",
    "KvbmConnectorLeader",
    "KvbmConnectorWorker",
]
"""The first two are what NVIDIA's KVBM calls them: its users change only the module."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kvbm_connectors.trtllm import connector

        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
