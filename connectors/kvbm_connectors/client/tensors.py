"""Tensors: where the blocks of an engine's KV tensors are, as regions of memory.

A layer is a view [block, …] of some storage, in any physical order: from vLLM 0.29 on one of six,
of head, token and content. Only addresses and strides count here: the bytes of a block are cut
into dense pieces, pieces that touch are joined, and layers that share their bytes count once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvbm_common.errors import KvbmError
from kvbm_common.wire.local import Region

PIECES_MAX = 4_096
"""Pieces of one block: more means that we misread a layout."""


class Tensor(Protocol):
    """torch.Tensor, as far as its place in memory goes."""

    @property
    def shape(self) -> Sequence[int]: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...


class UnknownLayout(KvbmError):
    """KV tensors that are not cut into blocks as we understand it."""

    code = "unknown_layout"


def regions_of(layers: Iterable[Tensor], block_count: int) -> list[Region]:
    """Return the regions of all layers, in the order of the layers. Raises UnknownLayout.

    `block_count` is the number of the manager's blocks: a view may count smaller kernel blocks.
    """
    regions: list[Region] = []
    for tensor in layers:
        for region in _regions_of_layer(tensor, block_count):
            last = regions[-1] if regions else None
            if last is not None and _touches(last, region):
                regions[-1] = _region(last.address, last.stride, last.piece_bytes
                                      + region.piece_bytes, block_count)  # fmt: skip
            elif region not in regions:
                regions.append(region)
    if not 0 < len(regions) <= PIECES_MAX:
        raise UnknownLayout(f"a block has {len(regions)} pieces")
    return regions


def regions_of_groups(groups: Sequence[Iterable[Tensor]], block_count: int) -> list[Region]:
    """Return the regions of the KV group with the largest blocks; those of the others lie in them.

    Groups overlay each other: a block's bytes belong to the group that has the block. Raises
    UnknownLayout where a group has bytes that the largest one has not.
    """
    found = sorted((regions_of(layers, block_count) for layers in groups), key=_block_bytes)
    if not found:
        raise UnknownLayout("an engine without layers has no blocks")
    *others, largest = found
    for regions in others:
        for region in regions:
            if not any(_contains(one, region) for one in largest):
                raise UnknownLayout(f"KV groups do not overlay each other: {region}")
    return largest


def _block_bytes(regions: Sequence[Region]) -> int:
    return sum(region.piece_bytes for region in regions)


def _contains(outer: Region, inner: Region) -> bool:
    starts_inside = outer.address <= inner.address
    ends_inside = inner.address + inner.piece_bytes <= outer.address + outer.piece_bytes
    return starts_inside and ends_inside and outer.stride == inner.stride


def _regions_of_layer(tensor: Tensor, block_count: int) -> list[Region]:
    shape, item = list(tensor.shape), tensor.element_size()
    if not shape or shape[0] == 0 or shape[0] % block_count:
        raise UnknownLayout(f"a layer of shape {shape} does not have {block_count} blocks")
    strides = [stride * item for stride in tensor.stride()]
    ratio = shape[0] // block_count
    # Kernel blocks are a dimension inside the manager's block.
    inner = [(ratio, strides[0]), *zip(shape[1:], strides[1:], strict=True)]
    piece_bytes, outer = _dense_run(inner, item)
    return [
        _region(tensor.data_ptr() + offset, strides[0] * ratio, piece_bytes, block_count)
        for offset in _offsets(outer)
    ]


def _dense_run(
    dimensions: Sequence[tuple[int, int]], item: int
) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes of the longest dense piece, and the dimensions (size, stride) outside it."""
    left = sorted((d for d in dimensions if d[0] > 1), key=lambda d: d[1])
    run = item
    while left and left[0][1] == run:
        run *= left.pop(0)[0]
    return run, left[::-1]


def _offsets(dimensions: Sequence[tuple[int, int]]) -> Iterable[int]:
    if math.prod(size for size, _ in dimensions) > PIECES_MAX:
        raise UnknownLayout("the bytes of a block are scattered")
    steps = [range(0, size * stride, stride) for size, stride in dimensions]
    return (sum(offsets) for offsets in itertools.product(*steps))


def _touches(last: Region, following: Region) -> bool:
    joined = last.piece_bytes + following.piece_bytes
    adjacent = last.address + last.piece_bytes == following.address
    return adjacent and last.stride == following.stride and joined <= last.stride


def _region(address: int, stride: int, piece_bytes: int, blocks: int) -> Region:
    return Region(address=address, stride=stride, piece_bytes=piece_bytes, blocks=blocks)
