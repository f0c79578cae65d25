"""Embedding inputs of multimodal models: with KVBM an engine takes those that its operator allows.

vLLM (0.32, `VllmConfig._resolve_mm_embedding_inputs`) takes an engine whose connector loads KV for
the decode worker of a prefill worker. Requests may then name embeddings without sending them: their
KV is to come from the other worker. KVBM brings no KV that was not stored, and one such request
would end the engine.
"""

from __future__ import annotations

import functools
from typing import Any

RESOLVE = "_resolve_mm_embedding_inputs"
"""The method that derives two settings of a multimodal model from those of KV transfer."""
OURS = ("KvbmConnector", "DynamoConnector")
KEPT = "kvbm_keeps_inputs"
"""Attribute of the method that stands for vLLM's own."""


def keep_as_configured(config_class: Any) -> None:
    """Have vLLM's `VllmConfig` keep an operator's `enable_mm_embeds` where KVBM is the connector.

    Nothing changes for other connectors, with a child of another kind, or in a version of vLLM
    without the rule.
    """
    resolve = getattr(config_class, RESOLVE, None)
    if resolve is None or hasattr(resolve, KEPT):
        return

    @functools.wraps(resolve)
    def resolved(config: Any) -> None:
        inputs = getattr(config.model_config, "multimodal_config", None)
        if inputs is None or not _loads_by_kvbm_alone(config):
            resolve(config)
            return
        allowed = inputs.enable_mm_embeds
        resolve(config)
        inputs.allow_missing_mm_embeddings, inputs.enable_mm_embeds = False, allowed

    setattr(resolved, KEPT, True)
    setattr(config_class, RESOLVE, resolved)


def _loads_by_kvbm_alone(config: Any) -> bool:
    transfer = config.kv_transfer_config
    embeddings = getattr(config, "ec_transfer_config", None)
    if embeddings is not None and embeddings.is_ec_consumer:
        return False  # Embeddings come from a worker that computes nothing else.
    return transfer is not None and transfer.kv_connector in OURS
