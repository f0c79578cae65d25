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
from kvbm_common.nixl.layout import part_bytes
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


def regions_of(
    layers: Iterable[Tensor], block_count: int, *, by_head: bool = False
) -> list[Region]:
    """Return the regions of all layers, in the order of the layers. Raises UnknownLayout.

    `block_count` is the number of the manager's blocks: a view may count smaller kernel blocks.
    `by_head`: a layer is [block, head, …], and its regions are in the order of the heads.
    """
    regions: list[Region] = []
    for tensor in layers:
        for region in _regions_of_layer(tensor, block_count, by_head):
            last = regions[-1] if regions else None
            if last is not None and _touches(last, region):
                regions[-1] = _region(last.address, last.stride, last.piece_bytes
                                      + region.piece_bytes, block_count)  # fmt: skip
            elif region not in regions:
                regions.append(region)
    if not 0 < len(regions) <= PIECES_MAX:
        raise UnknownLayout(f"a block has {len(regions)} pieces")
    return regions


def regions_of_groups(
    groups: Sequence[Iterable[Tensor]], block_count: int, *, by_head: bool = False
) -> list[Region]:
    """Return the regions of all KV groups: bytes that several have are in one region.

    Groups overlay each other: a block's bytes belong to the group that has the block. The largest
    group's regions come first; a smaller one may have bytes beside them, where its pages are
    fuller. Raises UnknownLayout where blocks of different numbers would have the same bytes.
    """
    cut = [regions_of(layers, block_count, by_head=by_head) for layers in groups]
    found = sorted(cut, key=part_bytes)
    if not found:
        raise UnknownLayout("an engine without layers has no blocks")
    *others, regions = found
    for region in itertools.chain.from_iterable(reversed(others)):
        regions = _with(regions, region)
    return regions


def _with(regions: Sequence[Region], added: Region) -> list[Region]:
    """Return regions with another one, joined to those that it overlaps."""
    joined, place = added, None
    result: list[Region] = []
    for region in regions:
        if _is_apart(region, joined):
            result.append(region)
            continue
        start = min(region.address, joined.address)
        end = max(region.address + region.piece_bytes, joined.address + joined.piece_bytes)
        if region.stride != joined.stride or end - start > region.stride:
            raise UnknownLayout(f"KV groups do not overlay each other: {region}, {joined}")
        joined = _region(start, region.stride, end - start, region.blocks)
        place = len(result) if place is None else place
    result.insert(len(result) if place is None else place, joined)
    return result


def _is_apart(one: Region, other: Region) -> bool:
    """Return whether two regions have no byte in common, of any two blocks."""
    first, second = sorted((one, other), key=lambda region: region.address)
    distance = second.address - first.address
    if distance >= first.stride * (first.blocks - 1) + first.piece_bytes:
        return True
    if first.stride != second.stride:
        return False
    ahead = distance % first.stride
    return first.piece_bytes <= ahead <= first.stride - second.piece_bytes


def _regions_of_layer(tensor: Tensor, block_count: int, by_head: bool) -> list[Region]:
    shape, item = list(tensor.shape), tensor.element_size()
    if not shape or shape[0] == 0 or shape[0] % block_count:
        raise UnknownLayout(f"a layer of shape {shape} does not have {block_count} blocks")
    strides = [stride * item for stride in tensor.stride()]
    ratio = shape[0] // block_count
    # Kernel blocks are a dimension inside the manager's block.
    inner = [(ratio, strides[0]), *zip(shape[1:], strides[1:], strict=True)]
    heads = [inner.pop(1)] if by_head else []
    piece_bytes, outer = _dense_run(inner, item)
    return [
        _region(tensor.data_ptr() + offset, strides[0] * ratio, piece_bytes, block_count)
        for offset in _offsets([*heads, *outer])
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
