"""Copies: every layout against brute force, byte by byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.cuda.copies import (
    KERNEL_ROW_BYTES,
    Copies,
    OutsideWindows,
    Window,
    plan,
    through,
)
from kvbm_common.nixl.layout import part_bytes
from kvbm_common.wire.local import Region

from benchmarks.pieces import device_spans, slot_spans

ARENA = 1 << 40

Row = tuple[int, int, int]
rows_of_copies = st.lists(
    st.tuples(st.integers(10, 300), st.integers(1000, 1300), st.integers(1, 60)), max_size=12
)


def bytes_of(copies: Copies) -> list[tuple[int, int]]:
    """Every (target, source) pair of addresses, sorted."""
    rows = copies.rows.tolist()
    return sorted((t + i, s + i) for t, s, length in rows for i in range(length))


def copies_of(rows: Sequence[Row]) -> Copies:
    return Copies(np.array(rows, dtype=np.uint64).reshape(-1, 3))


@given(rows=rows_of_copies)
def test_joining_moves_the_same_bytes(rows: list[Row]) -> None:
    """Adjacent rows are joined, others are not touched, and no byte is lost or added."""
    joined = copies_of(rows).joined()
    assert bytes_of(joined) == bytes_of(copies_of(rows))
    pairs = itertools.pairwise(joined.rows.tolist())
    assert not any((a[0] + a[2], a[1] + a[2]) == (b[0], b[1]) for a, b in pairs)


@given(rows=rows_of_copies, side=st.integers(0, 1), base=st.integers(0, 9), step=st.integers(1, 70))
def test_no_row_crosses_a_cut(rows: list[Row], side: int, base: int, step: int) -> None:
    cut = copies_of(rows).cut_at(side, base, step)
    assert bytes_of(cut) == bytes_of(copies_of(rows))
    for row in cut.rows.tolist():
        first = row[side] - base
        assert row[2] > 0
        assert first // step == (first + row[2] - 1) // step


@given(rows=rows_of_copies, length_max=st.integers(1, 70))
def test_no_row_is_too_long(rows: list[Row], length_max: int) -> None:
    cut = copies_of(rows).cut_to(length_max)
    assert bytes_of(cut) == bytes_of(copies_of(rows))
    assert all(length <= length_max for length in cut.lengths.tolist())


@given(rows=rows_of_copies, limit=st.integers(0, 70), seed=st.integers(0, 2**16))
def test_a_plan_divides(rows: list[Row], limit: int, seed: int) -> None:
    """Short rows in pinned memory are the kernel's, all others the engine's."""
    copies = copies_of(rows)
    pinned = np.random.default_rng(seed).random(copies.count) < 0.5
    divided = plan(copies, kernel_below_bytes=limit, pinned=pinned)
    parts = (divided.engine.rows, divided.kernel.rows, divided.pageable.rows)
    assert bytes_of(Copies(np.concatenate(parts))) == bytes_of(copies)
    assert bytes_of(divided.pageable) == bytes_of(copies.where(~pinned))
    expected = [row for row, ok in zip(rows, pinned.tolist(), strict=True) if ok and row[2] < limit]
    assert bytes_of(divided.kernel) == bytes_of(copies_of(expected))


def test_a_long_row_of_the_kernel_is_shared_by_warps() -> None:
    divided = plan(Copies.of([0], [1 << 30], 3 * KERNEL_ROW_BYTES + 16), kernel_below_bytes=1 << 30)
    assert divided.engine.count == 0
    assert divided.kernel.lengths.tolist() == [KERNEL_ROW_BYTES] * 3 + [16]


# The layouts of vLLM: physical orders of [layer, block, head, token, content], and others.
LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 8


def views(order: str, *, heads: int, padding: int, dtype: str) -> Iterator[np.ndarray]:
    """Per layer the view [block, head, token, content] of one allocation in this order."""
    sizes = dict(zip("LBHNC", (LAYERS, BLOCKS, heads, TOKENS, CONTENT), strict=True))
    allocation = np.zeros(LAYERS * BLOCKS * heads * TOKENS * CONTENT + padding, dtype=dtype)
    cache = allocation[padding:].reshape([sizes[axis] for axis in order])
    whole = cache.transpose([order.index(axis) for axis in "LBHNC"])
    yield from whole


def regions_of_view(view: np.ndarray) -> list[Region]:
    """A region for every dense run of a block, by brute force."""
    base, stride = view.ctypes.data, view.strides[0]
    places = sorted(
        sum(i * s for i, s in zip(index, view.strides[1:], strict=True))
        for index in np.ndindex(*view.shape[1:])
    )
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1][1] += view.itemsize
        else:
            runs.append([place, place + view.itemsize])
    return [Region(address=base + a, stride=stride, piece_bytes=b - a, blocks=BLOCKS)
            for a, b in runs]  # fmt: skip


ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", [HEADS, 1], ids=["mha", "mla"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_layout(order: str, heads: int, ranks: int) -> None:
    """Blocks of every layout land in their slots, in the order of the pieces, and in no other byte.

    Some ranks' parts follow each other in a slot; slots are larger than blocks; the base of the
    tensors is odd on purpose.
    """
    blocks, slots = [4, 0, 3, 1], [1, 2, 6, 0]
    for rank in range(ranks):
        layers = list(views(order, heads=heads, padding=3, dtype="u2"))
        regions = [region for view in layers for region in regions_of_view(view)]
        part = part_bytes(regions)
        slot_bytes = part * ranks + 24
        source = device_spans(regions, blocks)
        target = slot_spans(regions, slots, arena_address=ARENA, slot_bytes=slot_bytes,
                            part_offset=rank * part)  # fmt: skip
        copies = Copies.of(target.rows[:, 0], source.rows[:, 0], target.rows[:, 1])
        divided = plan(copies.joined().cut_at(0, ARENA, 64), kernel_below_bytes=24)
        moved = bytes_of(Copies(np.concatenate([divided.engine.rows, divided.kernel.rows])))
        expected = sorted(
            (ARENA + slot * slot_bytes + rank * part + offset, place)
            for block, slot in zip(blocks, slots, strict=True)
            for offset, place in enumerate(
                region.address + block * region.stride + i
                for region in regions
                for i in range(region.piece_bytes)
            )
        )
        assert moved == expected


def test_blocks_that_lie_together_are_one_copy() -> None:
    """Block-outermost, consecutive blocks, consecutive slots without a gap: one row."""
    region = Region(address=1 << 30, stride=4096, piece_bytes=4096, blocks=8)
    source = device_spans([region], [2, 3, 4])
    target = slot_spans([region], [5, 6, 7], arena_address=ARENA, slot_bytes=4096)
    copies = Copies.of(target.rows[:, 0], source.rows[:, 0], target.rows[:, 1]).joined()
    assert copies.rows.tolist() == [[ARENA + 5 * 4096, (1 << 30) + 2 * 4096, 3 * 4096]]


def test_addresses_go_through_windows() -> None:
    """Two allocations of another process, opened here at other addresses."""
    windows = [Window(5000, 100, 900_000), Window(1000, 300, 70_000)]
    ours = through(
        windows, np.array([1000, 5099, 1299], np.uint64), np.array([300, 1, 1], np.uint64)
    )
    assert ours.tolist() == [70_000, 900_099, 70_299]


@pytest.mark.parametrize(("address", "length"), [(999, 1), (1299, 2), (4000, 1), (5000, 2**63)])
def test_what_is_outside_is_refused(address: int, length: int) -> None:
    windows = [Window(5000, 100, 900_000), Window(1000, 300, 70_000)]
    with pytest.raises(OutsideWindows):
        through(windows, np.array([address], np.uint64), np.array([length], np.uint64))
