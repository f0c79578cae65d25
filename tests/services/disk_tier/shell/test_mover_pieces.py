"""Pieces: what moves, in fewer requests, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_disk_tier.shell.mover import PIECE_BYTES_MAX, pieces_of, places

ADDRESS = 1 << 20
SLOT_BYTES = PIECE_BYTES_MAX // 4
SLOTS = st.integers(0, 40)
PAIRS = st.lists(
    st.tuples(SLOTS, SLOTS),
    min_size=1,
    max_size=24,
    unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
)


def rows(pairs: list[tuple[int, int]], slot_bytes: int = SLOT_BYTES) -> list[tuple[int, int, int]]:
    """(memory, file, bytes) of each piece, for pairs of (memory slot, file slot); all in slots."""
    near, far = zip(*pairs, strict=True)
    sizes = [slot_bytes] * len(pairs)
    memory, file = pieces_of(ADDRESS, places(near, slot_bytes), places(far, slot_bytes), sizes)
    assert memory.rows[:, 1].tolist() == file.rows[:, 1].tolist()
    return [
        ((int(m) - ADDRESS) // slot_bytes, int(f) // slot_bytes, int(length) // slot_bytes)
        for (m, length, _), (f, _, _) in zip(memory.rows, file.rows, strict=True)
    ]


@pytest.mark.parametrize(
    ("pairs", "pieces"),
    [
        ([(5, 1), (6, 2), (7, 3)], [(5, 1, 3)]),
        ([(7, 3), (5, 1), (6, 2)], [(5, 1, 3)]),
        ([(5, 1), (6, 3)], [(5, 1, 1), (6, 3, 1)]),
        ([(5, 1), (7, 2)], [(5, 1, 1), (7, 2, 1)]),
        ([(6, 1), (5, 2)], [(6, 1, 1), (5, 2, 1)]),
        ([(slot, slot) for slot in range(6)], [(0, 0, 4), (4, 4, 2)]),
    ],
    ids=[
        "a run",
        "in any order",
        "apart in the file",
        "apart in memory",
        "crosswise",
        "a long run",
    ],
)
def test_neighbours_on_both_sides_are_one_piece(
    pairs: list[tuple[int, int]], pieces: list[tuple[int, int, int]]
) -> None:
    assert rows(pairs) == pieces


def test_a_slot_that_is_longer_than_a_piece_is_a_piece() -> None:
    assert rows([(0, 0), (1, 1)], 2 * PIECE_BYTES_MAX) == [(0, 0, 1), (1, 1, 1)]


@given(PAIRS)
def test_what_moves_is_what_was_asked_for(pairs: list[tuple[int, int]]) -> None:
    """Cut into slots again, the pieces are the pairs, in the order of the file."""
    pieces = rows(pairs)
    again = [(near + i, far + i) for near, far, count in pieces for i in range(count)]
    assert again == sorted(pairs, key=lambda pair: pair[1])
    assert all(count * SLOT_BYTES <= PIECE_BYTES_MAX for _, _, count in pieces)
