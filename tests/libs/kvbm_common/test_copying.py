"""Copying: the compiled library and its plain stand-in do the same, and see every flipped bit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common import copying
from kvbm_common.copying import (
    LANES_MAX,
    Lanes,
    NativeCopier,
    Places,
    PlainCopier,
    best_copier,
    clear,
    copy_threads,
    thread_count,
)

from tests.libs.native import build, library

SIZE = 1 << 16
DEADLINE_S = 10.0
EDGES = [1, 15, 63, 64, 65, 127, 240, 241, 255, 256, 257, 2047, 2048, 2049, 4095, 4096, 6145]
"""Where XXH3 changes its way, a cache line ends, or a step of the library does."""
lengths = st.sampled_from(EDGES) | st.integers(1, 9_000)
stripes = (st.sampled_from([1, 3, 4, 5, 15, 16, 17, 32, 33]) | st.integers(1, 140)).map(
    lambda count: 64 * count
)
"""Lengths that the library moves from registers, on targets of even addresses."""
ENTRY = "kvbm_move_lanes"
Copier = NativeCopier | PlainCopier


@pytest.fixture(scope="module", params=[ENTRY, "kvbm_move_baseline", "plain"])
def copier(request: pytest.FixtureRequest) -> Copier:
    """Every way: each test is a part of the contract."""
    return PlainCopier() if request.param == "plain" else NativeCopier(library(), request.param)


def noise(size: int = SIZE, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def places(memory: np.ndarray, offsets: Sequence[Sequence[int]], sizes: Sequence[int]) -> Places:
    """Blocks in some memory, from the offsets of their pieces."""
    base = np.uint64(memory.ctypes.data)
    return Places(base + np.array(offsets, dtype=np.uint64), np.array(sizes, dtype=np.uint64))


def test_a_library_of_older_sources_is_not_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkout is renewed, and nothing compiled again: the same name would take other arguments,
    and read memory that is not there."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "old.c").write_text("void kvbm_move_blocks(void) {}")
    old = tmp_path / "_native.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", old, tmp_path / "old.c"], check=True)
    assert best_copier(old).name == "plain"
    assert "of another version" in caplog.text


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """The sizes of a block's pieces, and where those of each block are on both sides."""
    by_stripes = draw(st.booleans())
    sizes = draw(st.lists(stripes if by_stripes else lengths, min_size=1, max_size=3))
    count = draw(st.integers(1, 3))
    offsets = st.sampled_from([0, 16, 32, 48]) if by_stripes else st.integers(0, 63)

    def side() -> list[list[int]]:
        at = 0
        blocks: list[list[int]] = []
        for _ in range(count):
            blocks.append([])
            for size in sizes:
                at += draw(offsets)
                blocks[-1].append(at)
                at += size
        return blocks

    return sizes, side(), side()


@given(layouts(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_copy_is_exact_and_summed_like_xxhash(
    copier: Copier, layout: tuple[list[int], list[list[int]], list[list[int]]], data: st.DataObject
) -> None:
    """Of any sizes and alignments: the pieces of each block arrive, not a byte beside them is
    written, and a checksum is that of the pieces back to back, of a block or of one lane of it."""
    sizes, targets, sources = layout
    source, target = noise(1 << 17), np.full(1 << 17, 9, dtype=np.uint8)
    expected = target.copy()
    count = data.draw(st.integers(1, 4))
    of_piece = [data.draw(st.integers(0, count - 1)) for _ in sizes]
    lanes = Lanes(np.array(of_piece, dtype=np.uint32), count)
    sums, sums_of_lanes = [], []
    for to, origin in zip(targets, sources, strict=True):
        states = [xxhash.xxh3_64() for _ in range(count + 1)]
        for at, start, size, lane in zip(to, origin, sizes, of_piece, strict=True):
            expected[at : at + size] = source[start : start + size]
            for state in (states[lane], states[-1]):
                state.update(source[start : start + size].tobytes())
        *of_lanes, whole = (state.intdigest() for state in states)
        sums.append(whole)
        sums_of_lanes += of_lanes
    sides = places(target, targets, sizes), places(source, sources, sizes)
    assert copier.copy(*sides) == sums
    assert np.array_equal(target, expected)
    for last in (None, lanes):
        target[:] = 9
        assert copier.copy(*sides, summed=False, lanes=last) == []
        assert np.array_equal(target, expected)
    target[:] = 9
    assert copier.copy(*sides, lanes=lanes) == sums_of_lanes
    assert np.array_equal(target, expected)
    assert copier.sums(places(source, sources, sizes)) == sums
    assert copier.sums(places(source, sources, sizes), lanes=lanes) == sums_of_lanes


@pytest.mark.parametrize("run", [64, 4096, 100])
def test_as_many_lanes_as_a_block_can_have_take_turns(copier: Copier, run: int) -> None:
    """64 lanes of three runs each, as layers of so many head groups lie in memory."""
    source = noise(3 * LANES_MAX * run)
    target = np.zeros_like(source)
    offsets = [list(range(0, len(source), run))]
    lanes = Lanes(np.tile(np.arange(LANES_MAX, dtype=np.uint32), 3), LANES_MAX)
    sides = [places(side, offsets, [run] * len(offsets[0])) for side in (target, source)]
    found = copier.copy(sides[0], sides[1], lanes=lanes)
    cells = source.reshape(3, LANES_MAX, run)
    assert found == [xxhash.xxh3_64_intdigest(cells[:, lane].tobytes()) for lane in range(64)]
    assert np.array_equal(source, target)


@pytest.mark.parametrize("wrong", [([0, 1], 1), ([0] * 2, LANES_MAX + 1), ([0], 0)])
def test_lanes_that_the_library_does_not_have_are_our_mistake(wrong: tuple[list[int], int]) -> None:
    """It would write beside its states."""
    with pytest.raises(AssertionError):
        Lanes(np.array(wrong[0], dtype=np.uint32), wrong[1])


def test_a_lane_for_each_piece(copier: Copier) -> None:
    """More pieces than lanes are said: the library would read after them."""
    memory = noise(300)
    pieces = places(memory, [[0, 100]], [100, 100])
    with pytest.raises(AssertionError):
        copier.sums(pieces, lanes=Lanes(np.zeros(1, dtype=np.uint32), 1))


@given(st.data(), lengths | stripes)
@settings(max_examples=100, deadline=None)
def test_a_flipped_bit_anywhere_is_noticed(copier: Copier, data: st.DataObject, size: int) -> None:
    source, target = noise(size), np.zeros(size, dtype=np.uint8)
    whole = [[0]]
    [before] = copier.copy(places(target, whole, [size]), places(source, whole, [size]))
    source[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    [after] = copier.copy(places(target, whole, [size]), places(source, whole, [size]))
    assert after != before
    assert np.array_equal(target, source)


def test_a_copy_that_is_not_summed_has_no_checksums(copier: Copier) -> None:
    source, target = noise(5000), np.zeros(5000, dtype=np.uint8)
    sides = places(target, [[3]], [4000]), places(source, [[1]], [4000])
    assert copier.copy(*sides, summed=False) == []
    assert np.array_equal(target[3:4003], source[1:4001])


def test_what_is_summed_is_what_was_stored(copier: Copier) -> None:
    """Method: another thread writes to the source all the time. Whatever has arrived, the checksum
    is its; a second look at the source would sum up something else."""
    source, target = noise(1 << 20), np.zeros(1 << 20, dtype=np.uint8)
    sides = places(target, [[0]], [1 << 20]), places(source, [[0]], [1 << 20])
    over = False

    def write() -> int:
        rounds = 0
        while not over:
            np.add(source, 1, out=source)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(write)
        try:
            for _ in range(200):
                [found] = copier.copy(*sides)
                assert found == xxhash.xxh3_64_intdigest(target.data)
        finally:
            over = True
        assert writing.result(10) > 0


def test_threads_copy_side_by_side(copier: Copier) -> None:
    """Each its own blocks; none has to wait for another to be right."""
    source, target = noise(1 << 20), np.zeros(1 << 20, dtype=np.uint8)
    size = 1 << 14
    with ThreadPoolExecutor(4) as threads:
        futures = [
            threads.submit(
                copier.copy, places(target, [[at]], [size]), places(source, [[at]], [size])
            )
            for at in range(0, 1 << 20, size)
        ]
        sums = [future.result(10)[0] for future in futures]
    assert np.array_equal(source, target)
    assert sums == [xxhash.xxh3_64_intdigest(part.data) for part in source.reshape(-1, size)]


def test_places_know_their_bytes_and_whether_they_are_in_a_range() -> None:
    addresses = np.array([[1136, 1160], [1008, 1032]], dtype=np.uint64)
    found = Places(addresses, np.array([24, 24], dtype=np.uint64))
    assert (found.count, found.block_bytes) == (2, 48)
    assert found.inside(1008, 176)
    assert not found.inside(1009, 175)
    assert not found.inside(1008, 175)
    assert not found.inside(2000, 10)
    assert found.moved(-1000).addresses.tolist() == [[136, 160], [8, 32]]
    assert found.only([1]).addresses.tolist() == [[1008, 1032]]


def test_clear_zeroes_the_pieces_and_nothing_beside_them() -> None:
    memory = np.full(100, 7, dtype=np.uint8)
    clear(places(memory, [[0, 20], [50, 80]], [10, 5]))
    zeroed = [*range(10), *range(20, 25), *range(50, 60), *range(80, 85)]
    assert np.flatnonzero(memory == 0).tolist() == zeroed


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 2), (4, 4), (64, 4), (0, 1)])
def test_threads_are_shared_out_by_processors(cpus: int, threads: int) -> None:
    assert thread_count(cpus) == threads


def test_threads_that_cannot_all_be_started_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a container is reached: those that did start wait for none that did not."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(copying, "thread_count", lambda: 2)
    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError):
        copy_threads("test")
    started[0].join(DEADLINE_S)
    assert not started[0].is_alive()


def test_where_there_is_no_library_blocks_are_copied_all_the_same(tmp_path: Path) -> None:
    """It is missing, or it is of something else."""
    assert best_copier(tmp_path / "missing.so").name == "plain"
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    assert best_copier(broken).name == "plain"


def test_a_machine_without_a_compiler_builds_the_package_without_the_library(
    tmp_path: Path,
) -> None:
    """What was compiled before, on whatever machine, is removed: it may not run here."""
    assert not build(tmp_path, compiler="no-such-compiler").exists()


def test_nothing_is_done_where_there_is_neither_target_nor_sum() -> None:
    """A whole stripe block, whose fast path has no such case."""
    source = places(noise(), [[0]], [1024])
    move = ctypes.CDLL(str(library())).kvbm_move_lanes
    address = ctypes.c_void_p(source.addresses.ctypes.data)
    length = ctypes.c_void_p(source.lengths.ctypes.data)
    one = ctypes.c_size_t(1)
    move(None, address, length, None, one, one, one, None)


def test_places_are_arrays_as_the_library_reads_them() -> None:
    """A view with strides, or other numbers, would be read as other addresses."""
    lengths = np.array([8, 8], dtype=np.uint64)
    square = np.zeros((2, 2), dtype=np.uint64)
    wrongs: list[Any] = [square[:, ::-1], square.T, square.astype(np.int64)]
    for wrong in wrongs:
        with pytest.raises(AssertionError):
            Places(wrong, lengths)
