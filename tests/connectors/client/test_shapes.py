"""Shapes: a block that engines of one shape wrote is what engines of every other shape read.

The reference is a plain array [layer, block, head, byte] and slices of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.copying import COPIER
from kvbm_common.copying.rank_pieces import BlockCopy, RankPieces, slot_starts
from kvbm_common.tier.parts import Grid, Share, grid_for, share_of
from kvbm_connectors.client.tensors import regions_of, regions_of_groups
from kvbm_connectors.vllm.stages import Stage, names_by_row, rows_of
from numpy.typing import NDArray

Memory = NDArray[np.uint8]
BLOCKS = 5
LAYOUTS = ("LBHNC", "LHBNC", "BLHNC", "BHLNC")
KERNEL_BLOCKS = 2
"""Into which a block is cut where a shape says so."""


@dataclass(frozen=True)
class Shape:
    """An engine's shape: pipeline stages of so many layers, ranks of each, and its layout."""

    stages: tuple[int, ...]
    ranks: int
    layout: str
    kernel_blocks: int = 1


@dataclass(frozen=True)
class Layer:
    """A view of a layer, as torch shows it."""

    array: Memory

    @property
    def shape(self) -> Sequence[int]:
        return self.array.shape

    def stride(self) -> Sequence[int]:
        return self.array.strides

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class Rank:
    """One rank: which layers and heads it has, its memory, and where the pieces of a block are."""

    def __init__(self, grid: Grid, model: Model, shape: Shape, number: int) -> None:
        stage, rank = divmod(number, shape.ranks)
        replicas = max(1, shape.ranks // model.heads)
        per_rank = max(1, model.heads // shape.ranks)
        first = rank // replicas * per_rank
        self.layers = (sum(shape.stages[:stage]), sum(shape.stages[: stage + 1]))
        self.heads = (first, first + per_rank)
        share = share_of(grid, layers=self.layers, heads=self.heads, head_count=model.heads,
                         replica=rank % replicas)  # fmt: skip
        assert share is not None, (grid, shape)
        self.views = views(shape, self.layers[1] - self.layers[0], per_rank, model.head_bytes)
        layers = [Layer(view) for view in self.views]
        self.pieces = RankPieces(regions_of(layers, BLOCKS, by_head=True), share)

    @property
    def share(self) -> Share:
        return self.pieces.share

    def write(self, content: Memory) -> None:
        """Compute: fill all blocks with what this rank has of them."""
        for view, layer in zip(self.views, content[slice(*self.layers)], strict=True):
            view[:] = of_kernel_blocks(layer[:, slice(*self.heads)], len(view) // BLOCKS)

    def content(self) -> Memory:
        """What is in the blocks: [layer, block, head, byte]."""
        return np.stack([of_blocks(view) for view in self.views])


@dataclass(frozen=True)
class Model:
    """What all shapes share."""

    layers: int
    heads: int
    head_bytes: int


def views(shape: Shape, layers: int, heads: int, head_bytes: int) -> list[Memory]:
    """The layers of a rank's memory, [kernel block, head, byte], in the engine's physical order."""
    sizes = {"L": layers, "B": BLOCKS * shape.kernel_blocks, "H": heads}
    order = shape.layout[:3]
    size = head_bytes // shape.kernel_blocks
    memory = np.zeros((*(sizes[axis] for axis in order), size), dtype=np.uint8)
    logical = memory.transpose(*(order.index(axis) for axis in "LBH"), 3)
    return list(logical)


def of_kernel_blocks(blocks: Memory, ratio: int) -> Memory:
    """Cut what heads have of blocks into kernel blocks: tokens lie one after the other."""
    count, heads, size = blocks.shape
    cut = blocks.reshape(count, heads, ratio, size // ratio)
    return cut.transpose(0, 2, 1, 3).reshape(count * ratio, heads, size // ratio)


def of_blocks(view: Memory) -> Memory:
    """Join kernel blocks: the other way round."""
    count, heads, size = view.shape
    ratio = count // BLOCKS
    joined = view.reshape(BLOCKS, ratio, heads, size).transpose(0, 2, 1, 3)
    return joined.reshape(BLOCKS, heads, ratio * size)


def ranks_of(grid: Grid, model: Model, shape: Shape) -> list[Rank]:
    """All ranks of an engine."""
    count = len(shape.stages) * shape.ranks
    return [Rank(grid, model, shape, number) for number in range(count)]


def starts(arena: Memory, slots: Sequence[int]) -> NDArray[np.uint64]:
    """Where slots are."""
    return slot_starts(slots, arena_address=arena.ctypes.data, slot_bytes=arena.shape[1])


def sums_of_parts(grid: Grid, content: Memory, block: int) -> list[int]:
    """The checksum of each part of a block, from slices of the reference."""
    layers, _, heads, size = content.shape
    parts = content[:, block].reshape(grid.ranges, grid.layers, grid.heads, -1, size)
    assert layers == grid.ranges * grid.layers
    assert heads == parts.shape[2] * parts.shape[3]
    return [
        xxhash.xxh3_64_intdigest(parts[at, :, head].tobytes())
        for at in range(grid.ranges)
        for head in range(grid.heads)
    ]


@st.composite
def shapes(draw: st.DrawFn, model: Model, grid: Grid) -> Shape:
    """A shape whose ranks hold whole parts."""
    cuts = sorted(draw(st.sets(st.integers(1, grid.ranges - 1)))) if grid.ranges > 1 else []
    ends = [cut * grid.layers for cut in [*cuts, grid.ranges]]
    stages = tuple(np.diff([0, *ends]).tolist())
    groups = [n for n in range(1, grid.heads + 1) if grid.heads % n == 0]
    more = [2 * model.heads, 3 * model.heads] if grid.heads == model.heads else []
    ranks = draw(st.sampled_from([*groups, *more]))
    kernel_blocks = draw(st.sampled_from([1, KERNEL_BLOCKS]))
    return Shape(stages, ranks, draw(st.sampled_from(LAYOUTS)), kernel_blocks)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Model, Grid, Shape, Shape]:
    """A model, and the shapes of a writer and of a reader."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 20]))
    layers = draw(st.integers(1, 8))
    model = Model(layers, heads, draw(st.sampled_from([2, 6, 64, 192])))
    grid = grid_for(layers, heads)
    assert grid is not None
    return model, grid, draw(shapes(model, grid)), draw(shapes(model, grid))


@pytest.mark.slow
@given(pairs(), st.permutations(range(BLOCKS)), st.permutations(range(BLOCKS)), st.data())
@settings(max_examples=150, deadline=None)
def test_what_any_shape_writes_any_other_reads(
    pair: tuple[Model, Grid, Shape, Shape],
    slots: Sequence[int],
    targets: Sequence[int],
    data: st.DataObject,
) -> None:
    """1. The writer's ranks with replica 0 are pulled: slots hold the plain form of each block, and
    every part of it has been summed once.
    2. All ranks of the reader copy from there into other blocks: bytes and checksums are right.
    """
    model, grid, writer, reader = pair
    seed = data.draw(st.integers(0, 9))
    size = (model.layers, BLOCKS, model.heads, model.head_bytes)
    content = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    block_bytes = content[:, 0].nbytes
    arena = np.zeros((BLOCKS, block_bytes + 24), dtype=np.uint8)
    sums = np.zeros((BLOCKS, grid.count), dtype=np.uint64)
    seen: list[int] = []
    for rank in ranks_of(grid, model, writer):
        rank.write(content)
        assert rank.pieces.block_bytes == block_bytes
        if rank.share.replica:
            continue
        parts = list(rank.share.parts)
        seen += parts
        copy = BlockCopy(rank.pieces, range(BLOCKS), starts(arena, slots))
        COPIER.copy(copy.arena, copy.device, summed=False)
        fine = rank.pieces.fine.in_slots(copy.slots)
        found = COPIER.sums(fine, lanes=rank.pieces.lanes)
        sums[:, parts] = np.array(found, dtype=np.uint64).reshape(BLOCKS, -1)
    assert sorted(seen) == list(range(grid.count))
    for block, slot in enumerate(slots):
        assert arena[slot, :block_bytes].tobytes() == content[:, block].tobytes()
        assert sums[block].tolist() == sums_of_parts(grid, content, block)
    assert not arena[:, block_bytes:].any()

    for rank in ranks_of(grid, model, reader):
        pieces = rank.pieces
        where = starts(arena, slots)
        found = COPIER.copy(
            pieces.fine.on_device(targets), pieces.fine.in_slots(where), lanes=pieces.lanes
        )
        theirs = sums[:, list(rank.share.parts)]
        assert found == theirs.reshape(-1).tolist()
        expected = content[slice(*rank.layers), :, slice(*rank.heads)]
        assert np.array_equal(rank.content()[:, list(targets)], expected)


@pytest.mark.slow
@given(pairs(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_flipped_byte_is_seen_by_the_ranks_that_hold_it_and_by_no_other(
    pair: tuple[Model, Grid, Shape, Shape], data: st.DataObject
) -> None:
    """In the one part that it is in."""
    model, grid, _, reader = pair
    size = (model.layers, BLOCKS, model.heads, model.head_bytes)
    content = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    arena = content.transpose(1, 0, 2, 3).reshape(BLOCKS, -1).copy()
    layer, block, head = (data.draw(st.integers(0, most - 1)) for most in size[:3])
    group = head // (model.heads // grid.heads)
    spoilt = (layer // grid.layers) * grid.heads + group
    arena.reshape(BLOCKS, model.layers, model.heads, -1)[block, layer, head, -1] ^= 1
    for rank in ranks_of(grid, model, reader):
        pieces = rank.pieces
        fine = pieces.fine.in_slots(starts(arena, range(BLOCKS)))
        found = np.array(COPIER.sums(fine, lanes=pieces.lanes), dtype=np.uint64)
        found = found.reshape(BLOCKS, -1)
        wrong = {
            (at, part)
            for at in range(BLOCKS)
            for part, ours in zip(rank.share.parts, found[at].tolist(), strict=True)
            if ours != sums_of_parts(grid, content, at)[part]
        }
        assert wrong == ({(block, spoilt)} if spoilt in rank.share.parts else set())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_needs_no_more_pieces_than_its_memory_has(layout: str) -> None:
    """For a transfer. Block-outermost it is one piece, layer by layer as many as layers."""
    model = Model(layers=4, heads=8, head_bytes=64)
    grid = Grid(ranges=2, layers=2, heads=8)
    rank = Rank(grid, model, Shape((4,), 1, layout), 0)
    expected = {"BLHNC": 1, "LBHNC": 4}
    assert len(rank.pieces.coarse.lengths) == expected.get(layout, 32)
    assert len(rank.pieces.runs.lengths) == 1
    assert rank.pieces.lanes.count == grid.count


# --- several KV groups in pipeline stages ---------------------------------------------------------


def stages_with(*counts: tuple[int, int]) -> list[Stage]:
    """Stages that have so many layers of each of two groups."""
    ends = [(0, 0), *zip(*(accumulate(of_group) for of_group in zip(*counts, strict=True)),
                         strict=True)]  # fmt: skip
    return [
        Stage(tuple(
            tuple(f"{group}.{layer}" for layer in range(first, end))
            for group, (first, end) in enumerate(zip(before, after, strict=True))
        ))
        for before, after in pairwise(ends)
    ]  # fmt: skip


class GroupsRank:
    """One rank of a stage, whose groups lie over each other: block 0 is the first group's, block 1
    the second's, and so on."""

    def __init__(self, stages: Sequence[Stage], at: int, heads: tuple[int, int]) -> None:
        rows, self.heads, self._groups = rows_of(stages), heads, stages[at].groups
        grid = grid_for(rows[-1][1], HEADS)
        assert grid is not None
        share = share_of(grid, layers=rows[at], heads=heads, head_count=HEADS, replica=0)
        assert share is not None, (grid, rows)
        self._rows = views(Shape((), 1, "LBHNC"), stages[at].rows, heads[1] - heads[0], HEAD_BYTES)
        groups = [[Layer(row) for row in self._rows[: len(names)]] for names in self._groups]
        regions = regions_of_groups([one for one in groups if one], BLOCKS, by_head=True)
        self.pieces = RankPieces(regions, share)

    def layers(self) -> Iterator[tuple[str, int, Memory]]:
        """Each layer of each block: its name, the block, and what is there of it."""
        for block in range(BLOCKS):
            for row, name in enumerate(self._groups[block % 2]):
                yield name, block, self._rows[row][block]


def by_part(sums: Sequence[int]) -> list[list[int]]:
    """The checksums of each part in all blocks."""
    return [list(sums[at :: len(sums) // BLOCKS]) for at in range(len(sums) // BLOCKS)]


HEADS, HEAD_BYTES = 2, 64
HALVES = ((0, 1), (1, 2))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (stages_with((2, 2), (2, 2)), stages_with((4, 4))),
        (stages_with((4, 4)), stages_with((1, 1), (3, 3))),
        (stages_with((2, 2), (2, 1)), stages_with((4, 3))),
        (stages_with((2, 1), (2, 2)), stages_with((2, 1), (2, 2))),
        (stages_with((2, 0), (1, 2)), stages_with((2, 0), (1, 2))),
    ],
)
@pytest.mark.parametrize("ranks", [((0, HEADS),), HALVES])
def test_stages_with_several_groups_read_each_other(
    writer: Sequence[Stage], reader: Sequence[Stage], ranks: Sequence[tuple[int, int]]
) -> None:
    """Goal: where two engines name blocks alike, each layer has its own bytes, and verified ones;
    the groups have unlike numbers of layers on a stage, and one has none.

    1. Two ranks in each of the writer's stages fill blocks, which are pulled. 2. One rank or two of
    each of the reader's copy them.
    """
    assert names_by_row(writer) == names_by_row(reader)
    drawn = np.random.default_rng(0)
    content: dict[tuple[str, int], Memory] = {}
    row_bytes = HEADS * HEAD_BYTES
    arena = np.zeros((BLOCKS, rows_of(writer)[-1][1] * row_bytes), dtype=np.uint8)
    sums: dict[int, list[int]] = {}
    for at in range(len(writer)):
        for heads in HALVES:
            rank = GroupsRank(writer, at, heads)
            for name, block, there in rank.layers():
                whole = drawn.integers(0, 256, (HEADS, HEAD_BYTES), dtype=np.uint8)
                there[:] = content.setdefault((name, block), whole)[slice(*heads)]
            copy = BlockCopy(rank.pieces, range(BLOCKS), starts(arena, range(BLOCKS)))
            COPIER.copy(copy.arena, copy.device, summed=False)
            found = COPIER.sums(rank.pieces.fine.in_slots(copy.slots), lanes=rank.pieces.lanes)
            sums |= zip(rank.pieces.share.parts, by_part(found), strict=True)
    for at in range(len(reader)):
        for heads in ranks:
            rank = GroupsRank(reader, at, heads)
            pieces = rank.pieces
            where = pieces.fine.in_slots(starts(arena, range(BLOCKS)))
            found = COPIER.copy(pieces.fine.on_device(range(BLOCKS)), where, lanes=pieces.lanes)
            theirs = [sums[part] for part in pieces.share.parts]
            assert by_part(found) == theirs
            for name, block, there in rank.layers():
                assert np.array_equal(there, content[name, block][slice(*heads)]), (name, block)
