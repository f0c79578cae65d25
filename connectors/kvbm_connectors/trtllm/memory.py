"""Memory: where the blocks of TensorRT-LLM's KV pool are, as regions.

The V1 manager gives one tensor, [blocks, layers, K and V, rest]: already whole blocks. The V2
manager (1.3) describes regions of its own, which are ours under other names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbm_common.errors import KvbmError
from kvbm_common.wire.local import Region

from kvbm_connectors.client.tensors import regions_of
from kvbm_connectors.trtllm.protocols import Tensor

DEVICES = ("cpu", "cuda")


class CannotLend(KvbmError):
    """KV memory that cannot be lent to the host tier."""

    code = "cannot_lend"


class PoolRegion(Protocol):
    """`KvCacheRegion` (1.3, _torch/pyexecutor/connectors/kv_cache_layout.py): the bytes of page i
    are at base + i * stride."""

    @property
    def base(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    def as_tensor(self) -> Tensor: ...


class LayerGroup(Protocol):
    """`KvCacheLayerGroupLayout` (1.3, the same file). Read if they are there: `replicated_regions`,
    whose bytes are the same on all ranks."""

    @property
    def window_size(self) -> int | None: ...
    @property
    def regions(self) -> Sequence[PoolRegion]: ...


class Layout(Protocol):
    """`KvCacheLayout` (1.3, the same file)."""

    @property
    def groups(self) -> Sequence[LayerGroup]: ...


def regions_of_tensor(tensor: Tensor) -> list[Region]:
    """Return the regions of the V1 manager's pool. Raises CannotLend and UnknownLayout."""
    _check_device(tensor)
    return regions_of([tensor], tensor.shape[0])


def regions_of_layout(layout: Layout) -> list[Region]:
    """Return the regions of the V2 manager's pools. Raises CannotLend."""
    if len(layout.groups) != 1:
        raise CannotLend(f"the KV cache has {len(layout.groups)} layer groups, one is supported")
    [group] = layout.groups
    if group.window_size is not None:
        raise CannotLend("sliding windows are not supported")
    regions = [*group.regions, *getattr(group, "replicated_regions", ())]
    for region in regions:
        _check_device(region.as_tensor())
    return [
        Region(address=region.base, stride=region.stride, piece_bytes=region.size,
               blocks=region.num_slots)
        for region in regions
    ]  # fmt: skip


def _check_device(tensor: Tensor) -> None:
    if tensor.device.type not in DEVICES:
        raise CannotLend(f"the KV pool is on {tensor.device.type}")
