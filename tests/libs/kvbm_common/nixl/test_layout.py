"""Layout: a block's pieces, gathered into a slot and scattered back, are the block."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.nixl.layout import Addresses, device_pieces, part_bytes, slot_pieces
from kvbm_common.wire.local import Region

Memory = npt.NDArray[np.uint8]
Pieces = list[tuple[Addresses, int]]


def region(address: int, *, stride: int, piece: int, blocks: int = 4) -> Region:
    """Device memory: block b's piece is at address + b · stride."""
    return Region(address=address, stride=stride, piece_bytes=piece, blocks=blocks)


def as_ints(pieces: Pieces) -> list[tuple[list[int], int]]:
    """Plain numbers."""
    return [([int(address) for address in addresses], size) for addresses, size in pieces]


def test_device_pieces_are_where_the_stride_says() -> None:
    """Two layers; blocks 3 and 1 are asked for, in that order."""
    regions = [region(1000, stride=10, piece=8), region(2000, stride=20, piece=4)]
    assert as_ints(device_pieces(regions, [3, 1])) == [([1030, 1010], 8), ([2060, 2020], 4)]
    assert part_bytes(regions) == 12


def test_slot_pieces_follow_each_other_behind_the_ranks_offset() -> None:
    """Rank 1's part begins 12 bytes into each slot of 100."""
    regions = [region(0, stride=8, piece=8), region(0, stride=4, piece=4)]
    pieces = slot_pieces(regions, [0, 2], arena_address=5000, slot_bytes=100, part_offset=12)
    assert as_ints(pieces) == [([5012, 5212], 8), ([5020, 5220], 4)]


def test_no_address_is_lost_to_arithmetic() -> None:
    """Addresses above 2**63 are addresses, and a slot number may be large."""
    high = 2**64 - 2**20
    assert as_ints(device_pieces([region(high, stride=16, piece=16)], [2])) == [([high + 32], 16)]
    pieces = slot_pieces(
        [region(0, stride=1, piece=1)],
        [2**20],
        arena_address=2**47,
        slot_bytes=2**22,
        part_offset=0,
    )
    assert as_ints(pieces) == [([2**47 + 2**42], 1)]


def copy(source: Memory, source_pieces: Pieces, target: Memory, target_pieces: Pieces) -> None:
    """What a mover does: piece by piece, in order."""
    for (at, size), (to, length) in zip(source_pieces, target_pieces, strict=True):
        assert size == length
        for one, other in zip(at, to, strict=True):
            target[int(other) : int(other) + size] = source[int(one) : int(one) + size]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    ranks=st.integers(1, 3),
    blocks=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
    data=st.data(),
)
@settings(max_examples=50, deadline=None)
def test_there_and_back_again(
    sizes: list[int], ranks: int, blocks: list[int], data: st.DataObject
) -> None:
    """Blocks of every rank go into slots and come back into other blocks, bit by bit.

    The parts of the ranks fill the slot without a hole and without overlap.
    """
    slots = data.draw(st.permutations(range(4)))[: len(blocks)]
    others = data.draw(st.permutations(range(4)))[: len(blocks)]
    part = sum(sizes)
    arena = np.zeros(4 * part * ranks, dtype=np.uint8)
    for rank in range(ranks):
        starts = np.cumsum([0, *(4 * (size + 3) for size in sizes)])
        regions = [
            region(int(start), stride=size + 3, piece=size)
            for start, size in zip(starts, sizes, strict=False)
        ]
        device = np.random.default_rng(rank).integers(1, 255, starts[-1], dtype=np.uint8)
        back = np.zeros_like(device)
        in_slots = slot_pieces(
            regions, slots, arena_address=0, slot_bytes=part * ranks, part_offset=rank * part
        )
        copy(device, device_pieces(regions, blocks), arena, in_slots)
        copy(arena, in_slots, back, device_pieces(regions, others))
        for block, other in zip(blocks, others, strict=True):
            for start, size in zip(starts, sizes, strict=False):
                one, two = (int(start) + b * (size + 3) for b in (block, other))
                assert (device[one : one + size] == back[two : two + size]).all()
    for slot in slots:
        filled = arena[slot * part * ranks : (slot + 1) * part * ranks]
        assert filled.all(), "every byte of the slot belongs to a rank"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_pieces_in_a_slot_touch_and_do_not_overlap(sizes: list[int], offset: int) -> None:
    """Each begins where the one before it ends."""
    regions = [region(0, stride=size, piece=size) for size in sizes]
    pieces = slot_pieces(regions, [0], arena_address=0, slot_bytes=1000, part_offset=offset)
    spans = [(int(at[0]), int(at[0]) + size) for at, size in pieces]
    assert spans[0][0] == offset
    assert spans[-1][1] == offset + part_bytes(regions)
    assert all(one[1] == two[0] for one, two in pairwise(spans))
