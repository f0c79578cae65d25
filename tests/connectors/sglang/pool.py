"""A host pool and a configuration as SGLang has them, over numpy: layouts in its own order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LAYERS, HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 3, 2, 8, 4, 12
ROW_BYTES = HEADS * HEAD_DIM * 2


class Pool:
    """`page_first` and `page_first_direct`: K and V of a page in one piece each; `layer_first`: of
    every layer. `mla` has one buffer instead of two."""

    def __init__(
        self, layout: str = "page_first", *, mla: bool = False, pages: int = PAGES,
        page_size: int = PAGE_SIZE, start_layer: int = 0,
    ) -> None:  # fmt: skip
        self.layout, self.page_size, self.size = layout, page_size, pages * page_size
        self.dtype = "torch.bfloat16"
        self.layer_num = LAYERS
        self.start_layer, self.end_layer = start_layer, start_layer + LAYERS
        if not mla:
            self.head_num, self.head_dim = HEADS, HEAD_DIM
        self._parts = 1 if mla else 2
        shape = (self._parts, self.size * LAYERS * ROW_BYTES)
        self.memory = np.zeros(shape, dtype=np.uint8)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        starts = indices.tolist()[:: self.page_size]
        base, part = self.memory.ctypes.data, self.memory.shape[1]
        if self.layout == "layer_first":
            row, count = ROW_BYTES, LAYERS
            step = self.size * row
        else:
            row, count, step = ROW_BYTES * LAYERS, 1, 0
        addresses = [
            base + p * part + layer * step + start * row
            for start in starts
            for layer in range(count)
            for p in range(self._parts)
        ]
        return addresses, [row * self.page_size] * len(addresses)

    def pieces(self, page: int) -> list[np.ndarray]:
        """The memory of a page."""
        addresses, lengths = self.get_page_buffer_meta(self.indices([page]))
        base, flat = self.memory.ctypes.data, self.memory.reshape(-1)
        return [flat[a - base : a - base + n] for a, n in zip(addresses, lengths, strict=True)]

    def indices(self, pages: Sequence[int]) -> np.ndarray:
        """The token slots of some pages."""
        slots = np.arange(self.page_size)
        return np.concatenate([page * self.page_size + slots for page in pages])

    def fill(self, page: int, seed: int) -> None:
        """Write a content that only this seed gives."""
        generator = np.random.default_rng(seed)
        for piece in self.pieces(page):
            piece[:] = generator.integers(0, 256, len(piece), dtype=np.uint8)

    def holds(self, page: int, seed: int) -> bool:
        """Is it that content, byte by byte?"""
        generator = np.random.default_rng(seed)
        return all(
            bool((piece == generator.integers(0, 256, len(piece), dtype=np.uint8)).all())
            for piece in self.pieces(page)
        )


@dataclass
class Config:
    """HiCacheStorageConfig."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dp_rank: int = 0
    is_mla_model: bool = False
    model_name: str | None = "tiny"
    extra_config: Mapping[str, Any] | None = None

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == 0


@dataclass
class Transfer:
    """PoolTransfer."""

    name: str
    keys: Sequence[str] | None = None
    host_indices: Any = None
    hit_policy: str = "all_pages"


@dataclass
class Extra:
    """HiCacheStorageExtraInfo."""

    prefix_keys: Sequence[str] | None = None


def keys_of(seed: int | str, count: int) -> list[str]:
    """Page keys as SGLang makes them: 64 hex digits, chained."""
    keys, digest = [], b""
    for page in range(count):
        digest = hashlib.sha256(digest + f"{seed}/{page}".encode()).digest()
        keys.append(digest.hex())
    return keys
