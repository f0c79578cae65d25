"""Parts: how a block is cut by layers and heads, whatever the shape of the engine that wrote it.

The stored form of a block is layer after layer, and in a layer head group after head group: a *run*
of bytes for each. Its parts are ranges of layers by groups of heads, each with a checksum of its
own. Two ranges of two layers and three head groups, and which part each run belongs to:

                 head group 0   1   2
    layer 0                 0   1   2
    layer 1                 0   1   2
    layer 2                 3   4   5
    layer 3                 3   4   5

A rank of any shape holds whole parts, its `Share`: all layers and some heads (tensor parallelism),
some layers and all heads (a pipeline stage), all of it (latent attention). So blocks of one shape
are read and verified by every other one. Where a head's bytes are scattered between tokens, parts
are what ranks hold: a grid of one layer, whose "head groups" are the ranks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]

PARTS_MAX = 64
"""Parts of a block: each is 8 bytes in host memory, and a state while a block is copied."""
RANGES_MAX = 8
LAYERS_MAX = 127
"""Ranges, and layers of each, where parts are scattered: their grid has a code of 16 bits."""
RUNS_MAX = PARTS_MAX * LAYERS_MAX
"""Runs of a block, also where they are not scattered: what reads them has a table of all runs."""
HEAD_GROUPS_MAX = 16
"""Head groups of a model with more KV heads than that."""
RANGES = (4, 2)
"""Ranges of layers that are tried: pipelines of 4 and 2 stages end on their borders."""


class Grid(msgspec.Struct, frozen=True, array_like=True):
    """The grid that cuts blocks: `ranges` of `layers` layers each, by `heads` head groups.

    All runs are of one size. Raises ValueError where there are more parts than can be verified.
    """

    ranges: Positive = 1
    layers: Positive = 1
    heads: Positive = 1

    def __post_init__(self) -> None:
        if self.count > PARTS_MAX:
            raise ValueError(f"{self.count} parts, and a block has at most {PARTS_MAX}")
        if self.is_scattered and (self.ranges > RANGES_MAX or self.layers > LAYERS_MAX):
            raise ValueError(f"{self.ranges} ranges of {self.layers} layers: more than are cut")
        if self.run_count > RUNS_MAX:
            raise ValueError(f"{self.run_count} runs, and a block has at most {RUNS_MAX}")

    @property
    def count(self) -> int:
        """The number of parts."""
        return self.ranges * self.heads

    @property
    def run_count(self) -> int:
        """The number of runs of a block."""
        return self.ranges * self.layers * self.heads

    @property
    def is_scattered(self) -> bool:
        """Tell whether a part is several runs with other parts between them."""
        return self.layers > 1 and self.heads > 1

    @property
    def code(self) -> int:
        """A number of 16 bits for the grid, as far as it matters where the bytes of parts are.

        Parts that are not scattered follow each other: then it is their number.
        """
        return _code_of(self)

    def parts_of_runs(self) -> NDArray[np.intp]:
        """Return which part each run of a block belongs to."""
        parts = np.arange(self.count).reshape(self.ranges, 1, self.heads)
        found = np.broadcast_to(parts, (self.ranges, self.layers, self.heads)).reshape(-1)
        assert len(found) == self.run_count, f"{len(found)} runs of {self}"
        return found


ONE_PART = Grid()


@lru_cache(maxsize=1024)
def _code_of(grid: Grid) -> int:
    """Return a grid's code: one object for all of a tier's blocks."""
    if not grid.is_scattered:
        return grid.count
    code = grid.heads + PARTS_MAX * (grid.ranges - 1 + RANGES_MAX * (grid.layers - 1))
    assert PARTS_MAX < code < 1 << 16, f"{grid} would have the code {code}"
    return code


@lru_cache(maxsize=1024)
def grid_of(code: int) -> Grid | None:
    """Return the grid that a code stands for, or None where no grid has it.

    >>> grid_of(Grid(ranges=2, layers=16, heads=8).code)
    Grid(ranges=2, layers=16, heads=8)
    """
    groups, heads = divmod(code - 1, PARTS_MAX)
    layers, ranges = divmod(groups, RANGES_MAX)
    try:
        grid = msgspec.convert([ranges + 1, layers + 1, heads + 1], Grid)
    except msgspec.ValidationError:
        return None
    return grid if grid.code == code else None


@lru_cache(maxsize=1024)
def is_divisible(size: int, code: int) -> bool:
    """Return whether a block of `size` bytes can be cut by the grid of this code.

    Of every block that comes in: few sizes and codes, again and again.
    """
    grid = grid_of(code)
    return grid is not None and size % grid.run_count == 0


def are_divisible(sizes: NDArray[np.integer], codes: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return the same for many blocks, which have few grids."""
    found = np.zeros(len(codes), bool)
    for code in np.unique(codes).tolist():
        grid, where = grid_of(code), codes == code
        if grid is not None:
            found[where] = sizes[where] % grid.run_count == 0
    return found


def grid_for(layers: int, heads: int) -> Grid | None:
    """Return the coarsest grid by which the usual shapes of such a model can share blocks.

    None: no grid does. Both numbers are the whole model's, whatever its shape here.

    >>> grid_for(layers=32, heads=8), grid_for(layers=61, heads=1)
    (Grid(ranges=4, layers=8, heads=8), Grid(ranges=61, layers=1, heads=1))
    """
    assert layers >= 1, f"{layers} layers"
    assert heads >= 1, f"{heads} heads"
    groups = heads if heads <= HEAD_GROUPS_MAX else int(np.gcd(heads, HEAD_GROUPS_MAX))
    odd = layers if layers * groups <= PARTS_MAX else 1
    ranges = next((ranges for ranges in RANGES if layers % ranges == 0), odd)
    try:
        return Grid(ranges=ranges, layers=layers // ranges, heads=groups)
    except ValueError:
        return None


class Share(msgspec.Struct, frozen=True, array_like=True):
    """The share of one rank in every block: ranges of layers, each from a head group to another.

    Of several ranks that hold the same, `replica` 0 is read; all of them load. Raises ValueError
    where it does not lie in the grid.
    """

    grid: Grid
    first_range: Natural
    end_range: Positive
    first_head: Natural
    end_head: Positive
    replica: Natural = 0

    def __post_init__(self) -> None:
        inside = self.end_range <= self.grid.ranges and self.end_head <= self.grid.heads
        if not inside or self.first_range >= self.end_range or self.first_head >= self.end_head:
            raise ValueError("a share is at least one part of its grid")

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts that the rank holds, in their order."""
        heads = self.grid.heads
        return tuple(
            at * heads + head
            for at in range(self.first_range, self.end_range)
            for head in range(self.first_head, self.end_head)
        )

    def block_bytes(self, share_bytes: int) -> int:
        """Return the bytes of a block where the rank has `share_bytes`; 0: that cannot be."""
        runs = len(self.parts) * self.grid.layers
        return 0 if share_bytes % runs else share_bytes // runs * self.grid.run_count

    def runs(self) -> NDArray[np.intp]:
        """Return the runs of a block that the rank holds, in the order of its own bytes."""
        grid = self.grid
        runs = np.arange(grid.run_count).reshape(-1, grid.heads)
        layers = slice(self.first_range * grid.layers, self.end_range * grid.layers)
        held = runs[layers, self.first_head : self.end_head].reshape(-1)
        assert len(held) == len(self.parts) * grid.layers, f"{len(held)} runs of {self}"
        return held


def share_of_rank(rank: int, world_size: int) -> Share:
    """Return the share of a rank whose part of a block follows those of the ranks before it."""
    assert 0 <= rank < world_size <= PARTS_MAX, f"rank {rank} of {world_size}"
    return Share(Grid(heads=world_size), 0, 1, rank, rank + 1)


def share_of(
    grid: Grid, *, layers: tuple[int, int], heads: tuple[int, int], head_count: int, replica: int
) -> Share | None:
    """Return the share of a rank with these layers and KV heads (first, end) of a model.

    None: they are not whole parts.
    """
    per_group = head_count // grid.heads
    if any(layer % grid.layers for layer in layers) or any(head % per_group for head in heads):
        return None
    first_range, end_range = (layer // grid.layers for layer in layers)
    first_head, end_head = (head // per_group for head in heads)
    return Share(grid, first_range, end_range, first_head, end_head, replica)
