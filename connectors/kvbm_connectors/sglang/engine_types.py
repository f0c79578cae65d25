"""Types of SGLang: the small part of its objects that we read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Indices(Protocol):
    """A tensor of token slots: page i of a call begins at element i × page size."""

    def __len__(self) -> int: ...
    def tolist(self) -> list[int]: ...


class HostPool(Protocol):
    """sglang.srt.mem_cache.pool_host.HostKVCache: pages in host memory."""

    @property
    def size(self) -> int:
        """Return the size in token slots."""
        ...

    @property
    def page_size(self) -> int: ...
    @property
    def layout(self) -> str: ...
    @property
    def dtype(self) -> Any: ...
    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Return the addresses and sizes of all pieces, page by page."""
        ...


class StorageConfig(Protocol):
    """SGLang's `HiCacheStorageConfig` (srt/mem_cache/hicache_storage.py), as used here."""

    @property
    def tp_rank(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def pp_rank(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def attn_cp_rank(self) -> int: ...
    @property
    def attn_cp_size(self) -> int: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def is_mla_model(self) -> bool:
        """All ranks hold the same bytes."""
        ...

    @property
    def is_storage_writer(self) -> bool: ...
    @property
    def model_name(self) -> str | None: ...
    @property
    def extra_config(self) -> Mapping[str, Any] | None: ...


class PoolTransfer(Protocol):
    """One pool's part of a v2 call."""

    @property
    def name(self) -> str: ...
    @property
    def keys(self) -> Sequence[str] | None: ...
    @property
    def host_indices(self) -> Indices | None: ...
    @property
    def hit_policy(self) -> str: ...


class ExtraInfo(Protocol):
    """SGLang's `HiCacheStorageExtraInfo` (srt/mem_cache/hicache_storage.py), as used here."""

    @property
    def prefix_keys(self) -> Sequence[str] | None:
        """The pages before the call's, from the beginning of the sequence."""
        ...
