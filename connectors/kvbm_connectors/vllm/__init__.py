"""KVBM for vLLM: `kv_connector=KvbmConnector`, `kv_connector_module_path=kvbm_connectors.vllm`.

Light on purpose: vLLM imports this in its front end too, and its plug-ins in every process. The
connector itself, and with it vLLM, is imported when somebody asks for the class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbm_connectors.vllm.connector import DynamoConnector, KvbmConnector

__all__ = ["DynamoConnector", "KvbmConnector", "register"]

_NAMES = ("KvbmConnector", "DynamoConnector")
"""The second is what NVIDIA's KVBM calls it: its users change only the module path."""


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        from kvbm_connectors.vllm import connector

        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """The entry point of `vllm.general_plugins`: make the connector known by name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in _NAMES:
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "kvbm_connectors.vllm.connector", name)
