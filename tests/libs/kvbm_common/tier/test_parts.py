"""Parts: grids have codes, usual shapes hold whole parts of them, and shares make up a block."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.tier import parts
from kvbm_common.tier.parts import (
    PARTS_MAX,
    Grid,
    Share,
    are_divisible,
    grid_for,
    grid_of,
    is_divisible,
    share_of,
    share_of_rank,
)

POSSIBLE = [
    (ranges, layers, heads)
    for ranges in range(1, PARTS_MAX + 1)
    for layers in (1, 2, 7, 127)
    for heads in range(1, PARTS_MAX // ranges + 1)
    if ranges <= 8 or layers == 1 or heads == 1
]
grids: st.SearchStrategy[Grid] = st.sampled_from(POSSIBLE).map(lambda cut: Grid(*cut))


def test_the_examples_are_right() -> None:
    assert doctest.testmod(parts).failed == 0


def test_every_grid_has_a_code_that_stands_for_it_alone() -> None:
    """Of 16 bits. Parts that follow each other are one grid, however layers and heads come to so
    many of them."""
    found: dict[int, tuple[object, ...]] = {}
    for cut in POSSIBLE:
        grid = Grid(*cut)
        same = grid_of(grid.code)
        assert same is not None
        assert 1 <= grid.code < 2**16
        where = (grid.count, *(cut if grid.is_scattered else ()))
        assert found.setdefault(grid.code, where) == where
        assert (same.code, same.count) == (grid.code, grid.count)
        assert same == grid if grid.is_scattered else same == Grid(heads=grid.count)


@pytest.mark.parametrize("code", [0, -1, 65, 511, 513, 65_535, 2**16, 2**40])
def test_what_stands_for_no_grid_is_none(code: int) -> None:
    """More parts than are verified, scattered parts of one layer or one head."""
    assert grid_of(code) is None
    assert not is_divisible(2**20, code)


@pytest.mark.parametrize(
    "cut",
    [
        (1, 1, 65),
        (65, 1, 1),
        (8, 2, 9),
        (9, 2, 2),
        (1, 128, 2),
        (0, 1, 1),
        (1, 1, 0),
        (1, 8_129, 1),
        (1, 10**9, 1),
        (64, 128, 1),
        (1, 1, 10**9),
    ],
)
def test_grids_that_are_too_fine_are_refused(cut: tuple[int, int, int]) -> None:
    """On the wire, too: what comes in is a typed error."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(cut, Grid)


@given(grids)
def test_runs_belong_to_parts_as_layers_and_heads_say(grid: Grid) -> None:
    """Method: count through ranges, layers and heads, one by one."""
    expected = [
        at * grid.heads + head
        for at in range(grid.ranges)
        for _ in range(grid.layers)
        for head in range(grid.heads)
    ]
    assert grid.parts_of_runs().tolist() == expected
    assert (grid.count, grid.run_count) == (max(expected) + 1, len(expected))


def test_many_blocks_are_looked_at_at_once() -> None:
    """As one by one."""
    codes = np.array([1, 2, 3, 0, 65, Grid(2, 3, 4).code, Grid(2, 3, 4).code], dtype=np.uint16)
    sizes = np.array([7, 64, 64, 64, 65, 48, 47], dtype=np.uint32)
    expected = [is_divisible(int(size), int(code)) for size, code in zip(sizes, codes, strict=True)]
    assert are_divisible(sizes, codes).tolist() == expected
    assert expected == [True, True, False, False, False, True, False]


# --- the shapes of models -------------------------------------------------------------------------

MODELS = {
    "Llama 3 8B": (32, 8), "Llama 3 70B": (80, 8), "Llama 3 405B": (126, 8), "Qwen3 8B": (36, 8),
    "Qwen2.5 7B": (28, 4), "Qwen3 235B": (94, 4), "Llama 2 13B": (40, 40), "Phi 4": (40, 10),
    "Mixtral": (32, 8), "DeepSeek V3": (61, 1), "one layer": (1, 2), "three layers": (3, 2),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_usual_shapes_hold_whole_parts(model: str) -> None:
    """Of tensor parallelism every number of ranks that divides the heads or is a multiple of them;
    of more than 16 heads the powers of two. Of pipelines two stages, and four where layers divide
    by four."""
    layers, heads = MODELS[model]
    grid = grid_for(layers, heads)
    assert grid is not None
    assert grid.count <= PARTS_MAX
    assert grid.ranges * grid.layers == layers
    pipelines = [n for n in (1, 2, 4) if layers % n == 0]
    for stages in pipelines:
        for ranks in (1, 2, 4, 5, 8, 10, 16):
            if (heads % ranks and ranks % heads) or (heads > 16 and ranks in (5, 10)):
                continue
            shares = [
                share_of_stage(grid, layers, heads, stage=stage, stages=stages, rank=rank,
                               ranks=ranks)
                for stage in range(stages)
                for rank in range(ranks)
            ]  # fmt: skip
            held = [part for one in shares if one.replica == 0 for part in one.parts]
            assert sorted(held) == list(range(grid.count)), (stages, ranks)


def share_of_stage(
    grid: Grid, layers: int, heads: int, *, stage: int, stages: int, rank: int, ranks: int
) -> Share:
    """What a rank holds, as engines give heads and layers out."""
    replicas, per_rank = max(1, ranks // heads), max(1, heads // ranks)
    first = rank // replicas * per_rank
    share = share_of(
        grid,
        layers=(stage * layers // stages, (stage + 1) * layers // stages),
        heads=(first, first + per_rank),
        head_count=heads,
        replica=rank % replicas,
    )
    assert share is not None, (stage, rank)
    return share


def test_a_shape_across_the_grid_holds_no_whole_parts() -> None:
    """Half a range of layers; half a head group."""
    grid = Grid(ranges=2, layers=4, heads=4)
    assert share_of(grid, layers=(0, 2), heads=(0, 8), head_count=8, replica=0) is None
    assert share_of(grid, layers=(0, 4), heads=(0, 1), head_count=8, replica=0) is None
    assert share_of(grid, layers=(0, 4), heads=(2, 4), head_count=8, replica=3) == Share(
        grid, 0, 1, 1, 2, 3
    )


@pytest.mark.parametrize("layers", [1, 61, 600])
@pytest.mark.parametrize("heads", [1, 8, 96])
def test_some_models_cannot_be_cut(layers: int, heads: int) -> None:
    """Too many layers in a range of several heads."""
    grid = grid_for(layers, heads)
    assert (grid is None) == (layers == 600 and heads > 1)


# --- shares ---------------------------------------------------------------------------------------


@st.composite
def shares(draw: st.DrawFn) -> Share:
    """Any rectangle of any grid."""
    grid = draw(grids)

    def span(count: int) -> tuple[int, int]:
        first = draw(st.integers(0, count - 1))
        return first, draw(st.integers(first + 1, count))

    return Share(grid, *span(grid.ranges), *span(grid.heads))


@given(shares())
def test_a_share_is_the_runs_of_its_parts(share: Share) -> None:
    """In the order in which they lie in a block."""
    grid = share.grid
    runs = share.runs()
    assert (np.diff(runs) > 0).all()
    owned = np.isin(grid.parts_of_runs(), share.parts)
    assert runs.tolist() == np.flatnonzero(owned).tolist()
    assert share.block_bytes(len(runs) * 24) == grid.run_count * 24
    assert (share.block_bytes(len(runs) * 24 + 1) == 0) == (len(runs) > 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields | {"end_range": 3},
        lambda fields: fields | {"end_head": 5},
        lambda fields: fields | {"first_range": 1, "end_range": 1},
        lambda fields: fields | {"first_head": 2, "end_head": 1},
        lambda fields: fields | {"replica": -1},
    ],
)
def test_shares_outside_of_their_grid_are_refused(
    change: Callable[[dict[str, int]], dict[str, int]],
) -> None:
    """On the wire, too."""
    fields = {"first_range": 0, "end_range": 2, "first_head": 0, "end_head": 4, "replica": 0}
    assert msgspec.convert([[2, 3, 4], *fields.values()], Share)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([[2, 3, 4], *change(fields).values()], Share)


def test_ranks_without_a_share_hold_one_part_each() -> None:
    """One after the other."""
    assert [share_of_rank(rank, 3).parts for rank in range(3)] == [(0,), (1,), (2,)]
    assert share_of_rank(1, 3).runs().tolist() == [1]
