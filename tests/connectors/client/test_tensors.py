"""Regions of KV tensors: of layers, and of KV groups that overlay each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from kvbm_common.wire.local import Region
from kvbm_connectors.client.tensors import UnknownLayout, regions_of, regions_of_groups

BLOCKS = 3


@dataclass
class Layer:
    """A tensor of bytes, [block, …], somewhere in memory."""

    address: int
    shape: Sequence[int] = (BLOCKS, 2, 4)
    strides: Sequence[int] = (8, 4, 1)

    def stride(self) -> Sequence[int]:
        return self.strides

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return self.address


def region(address: int, piece_bytes: int = 8, stride: int = 8) -> Region:
    return Region(address=address, stride=stride, piece_bytes=piece_bytes, blocks=BLOCKS)


def test_each_layer_is_a_region_and_the_same_bytes_are_one() -> None:
    assert regions_of([Layer(100), Layer(200), Layer(100)], BLOCKS) == [region(100), region(200)]


def test_keys_and_values_apart_are_two_regions() -> None:
    apart = Layer(100, shape=(BLOCKS, 2, 4), strides=(4, 12, 1))
    assert regions_of([apart], BLOCKS) == [region(100, 4, 4), region(112, 4, 4)]


def test_layers_side_by_side_in_each_block_are_joined() -> None:
    layers = [Layer(100, strides=(16, 4, 1)), Layer(108, strides=(16, 4, 1))]
    assert regions_of(layers, BLOCKS) == [region(100, 16, 16)]


def test_groups_that_overlay_each_other_are_lent_once() -> None:
    """A group of two layers, one of the same two, one of a single layer that lies on the second."""
    two, one = [Layer(100), Layer(200)], [Layer(200)]
    assert regions_of_groups([one, two, two], BLOCKS) == [region(100), region(200)]


def test_a_group_inside_the_joined_blocks_of_another_is_part_of_it() -> None:
    joined = [Layer(100, strides=(16, 4, 1)), Layer(108, strides=(16, 4, 1))]
    inside = [Layer(108, strides=(16, 4, 1))]
    assert regions_of_groups([joined, inside], BLOCKS) == [region(100, 16, 16)]


def test_a_smaller_group_may_have_fuller_pages() -> None:
    """Goal: states fill a part of a page of eight bytes; attention fills pages, of fewer layers.

    Three layers of six bytes are the larger group; two of eight bytes have bytes behind theirs.
    """
    states = [Layer(at, shape=(BLOCKS, 6), strides=(8, 1)) for at in (100, 200, 300)]
    attention = [Layer(200), Layer(100)]
    assert regions_of_groups([attention, states], BLOCKS) == [
        region(100), region(200), region(300, 6)
    ]  # fmt: skip


def test_a_group_may_have_memory_of_its_own() -> None:
    assert regions_of_groups([[Layer(100), Layer(200)], [Layer(300)]], BLOCKS) == [
        region(100), region(200), region(300)
    ]  # fmt: skip


def test_a_group_that_joins_two_regions() -> None:
    """Pages of 16 bytes: two layers fill the first and the last four bytes, one the middle."""
    ends = [Layer(at, shape=(BLOCKS, 6), strides=(16, 1)) for at in (100, 110)]
    middle = [Layer(104, strides=(16, 4, 1))]
    assert regions_of_groups([ends, middle], BLOCKS) == [region(100, 16, 16)]


@pytest.mark.parametrize(
    "stray", [Layer(104), Layer(96), Layer(108), Layer(92), Layer(100, strides=(16, 4, 1))]
)
def test_groups_whose_blocks_lie_across_each_other_are_not_lent(stray: Layer) -> None:
    with pytest.raises(UnknownLayout, match="do not overlay"):
        regions_of_groups([[Layer(100), Layer(200)], [stray]], BLOCKS)


def test_an_engine_without_layers_is_not_lent() -> None:
    with pytest.raises(UnknownLayout, match="without layers"):
        regions_of_groups([], BLOCKS)
