"""Content: every byte follows from the block's name and its place."""

from __future__ import annotations

import numpy as np
import pytest
from kvbm_connectors.sim.pages import Content

from tests.connectors.helpers import name

WORDS = 64


def filled(number: int, *, content: Content | None = None) -> np.ndarray:
    """What block `number` holds."""
    block = np.zeros(WORDS, dtype=np.uint64)
    (content or Content(WORDS * 8)).fill(block, name(number))
    return block


def test_a_block_holds_what_its_name_demands() -> None:
    content = Content(WORDS * 8)
    assert content.holds(filled(1), name(1))
    assert not content.holds(filled(1), name(2))
    assert np.array_equal(filled(1), filled(1))


@pytest.mark.parametrize("byte", [0, 7, 8, 255, WORDS * 8 - 1])
def test_one_wrong_bit_is_found(byte: int) -> None:
    block = filled(3)
    block.view(np.uint8)[byte] ^= 1
    assert not Content(WORDS * 8).holds(block, name(3))


def test_a_swapped_shifted_or_torn_block_is_found() -> None:
    """Half of another block, the same words elsewhere, zeros."""
    content, block = Content(WORDS * 8), filled(5)
    torn = np.concatenate([filled(5)[: WORDS // 2], filled(6)[WORDS // 2 :]])
    for wrong in (torn, np.roll(block, 1), block[::-1].copy(), np.zeros_like(block)):
        assert not content.holds(wrong, name(5))


def test_the_parts_of_two_ranks_make_the_whole() -> None:
    """A rank's part begins where the part before it ends."""
    parts = [Content(WORDS * 4, rank=rank) for rank in (0, 1)]
    halves = []
    for part in parts:
        half = np.zeros(WORDS // 2, dtype=np.uint64)
        part.fill(half, name(9))
        halves.append(half)
    assert np.array_equal(np.concatenate(halves), filled(9))
    assert not parts[0].holds(halves[1], name(9))
