"""KVBM for vLLM: `kv_connector=KvbmConnector`, `kv_connector_module_path=kvbm_connectors.vllm`.

Light on purpose: vLLM imports this in its front end too, and its plug-ins in every process. The
connector itself, and with it vLLM, is imported when its class is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvbm_common.extras import engine_needed

if TYPE_CHECKING:
    from kvbm_connectors.vllm.connector import DynamoConnector, KvbmConnector
    from kvbm_connectors.vllm.pd_connector import PdConnector

__all__ = ["DynamoConnector", "KvbmConnector", "PdConnector", "register"]

_MODULES = {
    "KvbmConnector": "kvbm_connectors.vllm.connector",
    "DynamoConnector": "kvbm_connectors.vllm.connector",
    "PdConnector": "kvbm_connectors.vllm.pd_connector",
}
"""Class → its module. The last two names are NVIDIA KVBM's: its users change the module path."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        with engine_needed("vllm"):
            found = getattr(import_module(_MODULES[name]), name)
            _make_known()  # `VLLM_PLUGINS` may leave our plug-in out.
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _make_known() -> None:
    """Have vLLM know the connectors by name: its `MultiConnector` asks for the class of a child's
    statistics so, and ends the engine where the name is unknown."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, module in _MODULES.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)


def register() -> None:
    """Make the connectors known by name, keep embedding inputs as they are configured, and see to
    the outer configuration of KV transfer: the entry point of `vllm.general_plugins`."""
    from vllm.config import VllmConfig

    from kvbm_connectors.vllm.embedding_inputs import keep_as_configured
    from kvbm_connectors.vllm.outer_config import keep_kvbm

    keep_as_configured(VllmConfig)
    keep_kvbm(VllmConfig)
    _make_known()
