"""Layout of KV memory that vLLM is asked for: heads outside of tokens, where engines gain by it.

On most GPUs vLLM's own choice is heads inside of tokens. There a rank's bytes are no use to engines
with another number of ranks (`shape.py`). vLLM's `resolve_kv_cache_layout` decides, in this order,
which is the same in all versions:

    VLLM_KV_CACHE_LAYOUT        an operator's choice: no connector is asked
    a connector's answer        taken where all attention back ends support it, else dropped with
                                a warning
    the back ends' first choice
"""

from __future__ import annotations

from typing import Any

from kvbm_connectors.vllm.namespace import drafts_write_kv, refusal_of_engine

HEADS_OUTSIDE = "LBHNC"
"""The answer of vLLM's own connectors: NIXL, Mooncake and native offloading. A `MultiConnector`
refuses to start with two different answers."""
CUT_BY_HEADS = frozenset({"auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"})
"""Formats of KV in which a head has nothing beside its tokens."""


def wanted_layout(config: Any) -> str | None:
    """Return the layout that vLLM is asked for; None: its own choice.

    On ROCm it is None: some back ends have faster kernels for other layouts.
    """
    from vllm.platforms import current_platform

    is_known = current_platform.is_cuda() or current_platform.is_cpu()
    return HEADS_OUTSIDE if is_known and _gains(config) else None


def _gains(config: Any) -> bool:
    """Tell whether other numbers of ranks can read the blocks if heads lie outside of tokens, and
    cannot otherwise."""
    model = config.model_config
    if model is None or refusal_of_engine(config) or _has_layout_of_its_own(config):
        return False
    if model.use_mla or model.get_total_num_kv_heads() == 1:
        return False  # They can in any layout.
    if model.is_hybrid or drafts_write_kv(config):
        return False  # Such blocks are cut by ranks in any layout.
    return str(config.cache_config.cache_dtype) in CUT_BY_HEADS


def _has_layout_of_its_own(config: Any) -> bool:
    """Tell whether vLLM keeps KV in host memory itself (HiSparse, from 0.30 on)."""
    return getattr(config.attention_config, "hisparse_config", None) is not None
