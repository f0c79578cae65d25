"""Lends the KV tensors of a vLLM worker to the host tier, KV group by KV group."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvbm_common.errors import KvbmError

from kvbm_connectors.client.affinity import unbound
from kvbm_connectors.client.torch_device import gpu_maker
from kvbm_connectors.vllm.worker_side import WorkerSide

log = logging.getLogger(__name__)


def lend_layers(worker: WorkerSide, kv_caches: Mapping[str, Any], kv_cache_config: Any) -> None:
    """Lend the layers of every KV group; log why, where they cannot be lent.

    `kv_caches` has the tensor of each layer, [block, …]; `kv_cache_config` is vLLM's.
    """
    groups = [
        [kv_caches[name] for name in group.layer_names if name in kv_caches]
        for group in kv_cache_config.kv_cache_groups
    ]
    layers = [tensor for group in groups for tensor in group]
    devices = {tensor.device.type for tensor in layers}
    if devices not in ({"cpu"}, {"cuda"}):
        log.error("KVBM passes through: KV tensors on %s are not lent", devices)
        return
    make_gpu = gpu_maker(layers[0].device) if devices == {"cuda"} else None
    try:
        with unbound():
            worker.register(groups, kv_cache_config.num_blocks, make_gpu)
    except KvbmError as error:
        log.error("KVBM passes through: %s (%s)", error, error.code)
