"""Device memory as real bytes: vLLM's own tensors of a kind, laid out as its model runner does.

A cell is filled with pairs of 64-bit numbers: which head of which layer and group it is, and the
prefix. So what attention reads is checked in every layer, and a page that was loaded for another
group, layer, head or token is seen. Runs in vLLM's environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tests.vllm.device.memory import STATE, Group

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # Before 0.33.
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

LAYERS = 2
"""Of each group, unless its specs name them."""
GROUP_TAG = 0x6B76_0000_0100
"""A layer's number is a multiple of this, and its own: nothing that a block holds by chance."""
HEAD_TAG = 0x1_0000_0000_0000
"""A head's number is a multiple of this beside that of its layer."""
SPOILT = 0x5A5A_5A5A


def laid_out(config: Any, vllm_config: Any) -> Any:
    """Return a KVCacheConfig with layers, and with the tensors that vLLM places them in.

    Pages of several sizes are beside each other in a block; vLLM has no other layout for them.
    """
    groups = [_with_layers(number, group) for number, group in enumerate(config.kv_cache_groups)]
    sizes = {group.kv_cache_spec.page_size_bytes for group in groups}
    layout = config.kv_cache_layout if len(sizes) == 1 else "BLHNC"
    cache = vllm_config.cache_config
    cache.kv_cache_layout, cache.num_gpu_blocks_override = layout, config.num_blocks
    placed = get_kv_cache_config_from_groups(vllm_config, groups, 1)
    return replace(
        config, kv_cache_groups=groups, kv_cache_tensors=placed.kv_cache_tensors,
        kv_cache_layout=layout,
    )  # fmt: skip


def _with_layers(number: int, group: Any) -> Any:
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    names = list(inner) if inner else [f"group{number}.{layer}" for layer in range(LAYERS)]
    return KVCacheGroupSpec(names, group.kv_cache_spec, is_eagle_group=group.is_eagle_group)


def allocated(config: Any) -> dict[str, Any]:
    """Return the KV tensor of each layer."""
    layout = KVCacheLayout[config.kv_cache_layout]
    tensors: dict[str, Any] = allocate_kv_cache(config, "cpu", layout)
    return tensors


@dataclass(frozen=True)
class Layer:
    """The pages of one layer."""

    tag: int
    numbers: np.ndarray[Any, np.dtype[np.int64]]
    """[block, place, head, number]."""


class Pages:
    """Blocks as bytes of these tensors; `Group.number` is the index in the config."""

    def __init__(self, config: Any, tensors: Mapping[str, Any]) -> None:
        self._layers = [
            [
                Layer(GROUP_TAG * (number + 1) + at, _numbers(tensors[name], group))
                for at, name in enumerate(group.layer_names)
            ]
            for number, group in enumerate(config.kv_cache_groups)
        ]

    def clear(self, block: int) -> None:
        for layer in self._all_layers:
            layer.numbers[block] = 0

    def copy(self, source: int, target: int) -> None:
        for layer in self._all_layers:
            layer.numbers[target] = layer.numbers[source]

    def write(
        self, group: Group, blocks: Sequence[int], places: Sequence[int], prefixes: Sequence[int]
    ) -> None:
        at = _indices(blocks, places)
        for layer in self._layers[group.number]:
            layer.numbers[at] = _right(layer, prefixes)

    def first_wrong(
        self, group: Group, blocks: Sequence[int], places: Sequence[int], prefixes: Sequence[int]
    ) -> int | None:
        at = _indices(blocks, places)
        wrong = np.zeros(len(blocks), dtype=bool)
        for layer in self._layers[group.number]:
            wrong |= (layer.numbers[at] != _right(layer, prefixes)).any(axis=(1, 2))
        return int(wrong.argmax()) if wrong.any() else None

    def found(self, group: Group, block: int, place: int) -> object:
        at = 0 if place == STATE else place
        return [
            sorted({(hex(tag), number) for tag, number in
                    layer.numbers[block, at].reshape(-1, 2).tolist()})
            for layer in self._layers[group.number]
        ]  # fmt: skip

    def is_clear(self, block: int) -> bool:
        """Whether a block has zeros alone."""
        return not any(layer.numbers[block].any() for layer in self._all_layers)

    def spoil(self) -> None:
        """Fill all blocks: whoever reads them later stores nonsense."""
        for layer in self._all_layers:
            layer.numbers[:] = SPOILT

    @property
    def is_spoilt(self) -> bool:
        """Whether nothing was written since."""
        return all((layer.numbers == SPOILT).all() for layer in self._all_layers)

    @property
    def _all_layers(self) -> list[Layer]:
        return [layer for layers in self._layers for layer in layers]


def _numbers(tensor: Any, group: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a view [block, place, head, number] of a layer's tensor."""
    import torch

    spec = group.kv_cache_spec
    is_state = type(spec).__name__ == "MambaSpec"
    places = 1 if is_state else int(spec.block_size)
    whole = tensor.view(torch.int64)
    if is_state or getattr(spec, "num_kv_heads", 1) == 1:
        whole = whole.view(tensor.shape[0], places, 1, -1)
    else:
        whole = whole.permute(0, 2, 1, 3)  # vLLM's order is block, head, place.
    numbers: np.ndarray[Any, np.dtype[np.int64]] = whole.numpy()
    assert numbers.shape[3] % 2 == 0, numbers.shape
    return numbers


def _indices(blocks: Sequence[int], places: Sequence[int]) -> tuple[Any, Any]:
    found = np.array(places, dtype=np.int64)
    return np.array(blocks, dtype=np.int64), np.where(found == STATE, 0, found)


def _right(layer: Layer, prefixes: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return what these places hold; each head has numbers of its own."""
    heads, count = layer.numbers.shape[2:]
    rows = np.empty((len(prefixes), heads, count), dtype=np.int64)
    rows[:, :, 0::2] = layer.tag + HEAD_TAG * np.arange(heads)[:, None]
    rows[:, :, 1::2] = np.array(prefixes, dtype=np.int64)[:, None, None]
    return rows
