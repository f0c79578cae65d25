"""PdConnector: KVBM's name for several connectors in one prefill worker (KVBM and NIXL).

It is vLLM's `MultiConnector`, but for one thing: vLLM's scheduler reads `kv_load_failure_policy`
from the outer configuration, where no child can set it.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvbm_connectors.vllm.options import recompute_failed_loads, refusal_beside_nixl


class PdConnector(MultiConnector):  # type: ignore[misc]
    """The connectors of `kv_connector_extra_config.connectors`, side by side."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Make all of them. Raises ValueError where vLLM must see that NixlConnector is among them:
        its decode workers would read wrong KV."""
        if refusal := refusal_beside_nixl(vllm_config):
            raise ValueError(refusal)
        recompute_failed_loads(vllm_config.kv_transfer_config)
        super().__init__(vllm_config, role, kv_cache_config)
