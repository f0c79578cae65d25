"""SGLang's own cache controller over a test's host pools: its threads call the storage."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.model_runner_components import weight_updater

ANSWER_S = 30.0
TREE = "sglang.srt.mem_cache.unified_radix_cache"


class LatentPool(MLATokenToKVPool):  # type: ignore[misc]
    """A device pool of latent attention, as far as a controller looks at it."""

    def __init__(self) -> None:
        self.device, self.layer_num = "cpu", 1

    def register_layer_transfer_counter(self, counter: Any) -> None:
        """Take the counter, which nothing here waits for."""


def page_keys(tokens: Sequence[int], prior: str | None = None, page_size: int = 1) -> list[str]:
    """Return page keys of a sequence, in place of SGLang's, for which it compiles C++."""
    keys: list[str] = []
    for start in range(0, len(tokens), page_size):
        text = f"{prior}{list(tokens[start : start + page_size])}"
        prior = hashlib.sha256(text.encode()).hexdigest()
        keys.append(prior)
    return keys


def make_controller(
    pool: Any, *, is_latent: bool, ranks: Mapping[str, int], backend: str, extra: Mapping[str, Any]
) -> Any:
    """Return a real HiCacheController with its storage attached, as a server makes it."""
    device: Any = LatentPool() if is_latent else MagicMock(device="cpu", layer_num=1)
    here = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1,
        "attn_dcp_rank": 0,
    }  # fmt: skip
    cache_controller.get_parallel = lambda: SimpleNamespace(**(here | dict(ranks)))
    cache_controller.is_dp_attention_enabled = lambda: False
    cache_controller.get_storage_hash_str = page_keys
    return cache_controller.HiCacheController(
        SimpleNamespace(get_kvcache=lambda: device), pool, pool.page_size, None, None,
        write_policy="write_through", io_backend="direct", storage_backend=backend,
        model_name="tiny", storage_backend_extra_config=dict(extra),
    )  # fmt: skip


def reset_of_the_tree() -> Any:
    """Return `UnifiedRadixCache._reset_full`, SGLang's flush, from its source: importing the tree
    needs more than the environment has."""
    found = find_spec(TREE)
    assert found is not None, f"{TREE} is gone"
    assert found.origin is not None, f"{TREE} has no source"
    text = Path(found.origin).read_text()
    (method,) = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == "_reset_full"
    )
    names: dict[str, Any] = {"StoragePrefetchRetries": MagicMock}
    source = ast.get_source_segment(text, method)
    assert source is not None, "_reset_full has no text"
    exec("from __future__ import annotations\n" + source, names)
    return names["_reset_full"]


def flush(controller: Any) -> None:
    """Flush as Scheduler.flush_cache does, as far as the caches go."""
    reset_of_the_tree()(MagicMock(cache_controller=controller, buffer_pipeline=None))


class TinyModel(torch.nn.Module):  # type: ignore[misc]
    """A model that takes weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


def push(way: str) -> None:
    """Have SGLang's own model runner take new weights, as its scheduler does in one way."""
    weight_updater.get_parallel = lambda: SimpleNamespace(tp_rank=0)
    weight_updater.get_model = lambda: SimpleNamespace(weight_cache_mode="off")
    layers = SimpleNamespace(BaseLayerWithLoRA=type("BaseLayerWithLoRA", (), {}))
    sys.modules.setdefault("sglang.srt.lora.layers", cast("ModuleType", layers))  # It needs a GPU.
    model = TinyModel()
    updater = weight_updater.WeightUpdater(
        tp_rank=0, device="cpu", gpu_id=0, model_config=None, custom_weight_loaders={},
        get_model=lambda: model, update_model_fields=MagicMock(), recapture_cuda_graph=MagicMock(),
        get_model_runner=MagicMock(),
    )  # fmt: skip
    if way == "join":
        with suppress(AssertionError):  # There is no process group here.
            updater.init_weights_update_group("127.0.0.1", 1, 0, 2, group_name="trainer")
        return
    weights = [("weight", torch.ones(4))]
    updater.begin_weight_update()
    if way == "tensor":
        assert updater.update_weights_from_tensor(weights)[0]
    elif way == "distributed":
        assert updater.load_weights_from_distributed(weights)[0]
    else:  # A trainer writes into the parameters over RDMA.
        model.load_weights(weights)
    updater.end_weight_update(run_post_load=way == "remote")
    assert model.weight.tolist() == [1.0] * 4


def back_up(controller: Any, tokens: Sequence[int], slots: torch.Tensor, wait: bool) -> int:
    """Write pages back; return how many tokens were stored, if told to wait."""
    keys = page_keys(tokens, page_size=controller.page_size)
    controller.write_storage(slots, list(tokens), keys)
    return controller.ack_backup_queue.get(timeout=ANSWER_S).completed_tokens if wait else 0


def prefetch(controller: Any, tokens: Sequence[int], slots: torch.Tensor, wait: bool) -> int:
    """Ask for a sequence and, if told to wait, load what was found; return how many tokens came."""
    controller.prefetch("request", list(tokens))
    if not wait:
        return 0
    operation = controller.prefetch_hit_queue.get(timeout=ANSWER_S)
    if not operation.storage_hit_count:
        return 0
    operation.host_indices = slots[: operation.storage_hit_count]
    controller.prefetch_buffer.put(operation)
    came = 0
    while not (ack := controller.ack_prefetch_queue.get(timeout=ANSWER_S)).completed_req:
        came = ack.completed_tokens
    return came
