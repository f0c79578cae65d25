"""Arena readers: copies out of a mapped arena, NIXL reads from another process, and the choice."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.arena import Arena
from kvbm_common.nixl import (
    Moved,
    MoverClosed,
    MoverThread,
    PeerLost,
    Spans,
    TransferFailed,
    TransferTimeout,
)
from kvbm_connectors import arena_reader
from kvbm_connectors.arena_reader import MappedReader, NixlReader, fastest, readers_of

from tests.connectors.endpoints import welcome
from tests.libs.nixl_owner import Owner, content

SIZE = 256 * 1024
THEIRS = 0x7000_0000_0000
"""Where the owner has mapped its arena: no address of ours."""
DEADLINE_S = 10.0


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    """An arena full of bytes that are known."""
    with Arena.create(tmp_path, "arena", SIZE) as arena:
        arena.array[:] = content(SIZE)
        yield arena


@pytest.fixture
def mapped(arena: Arena) -> Iterator[MappedReader]:
    reader = MappedReader(welcome(arena_path=str(arena.path), arena_address=THEIRS))
    yield reader
    reader.close()


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    """Another process that holds the same bytes."""
    with Owner(SIZE, os.environ) as owner:
        yield owner


@pytest.fixture(scope="module")
def mover() -> Iterator[MoverThread]:
    with MoverThread("reader") as mover:
        yield mover


def rows(base: int, *offsets: int, length: int = 64) -> Spans:
    """Spans at some distances from an address."""
    return Spans.of([base + offset for offset in offsets], length)


def test_a_mapped_arena_is_copied_row_by_row(mapped: MappedReader) -> None:
    """Rows 3 and 1 of the arena go to rows 0 and 2 of ours; row 1 of ours is left alone."""
    ours = np.zeros((3, 64), dtype=np.uint8)
    base = ours.ctypes.data
    read = mapped.read(rows(base, 0, 128), rows(THEIRS, 192, 64), deadline_s=DEADLINE_S)
    moved = read.result(DEADLINE_S)
    assert moved.bytes == 128
    assert moved.seconds > 0
    expected = content(SIZE).reshape(-1, 64)
    assert np.array_equal(ours, [expected[3], np.zeros(64), expected[1]])


def test_a_mapping_sees_what_the_owner_writes_later(mapped: MappedReader, arena: Arena) -> None:
    """It is the arena, no copy of it; and nobody can write through it."""
    arena.array[:64] = 7
    ours = np.zeros(64, dtype=np.uint8)
    mapped.read(rows(ours.ctypes.data, 0), rows(THEIRS, 0), deadline_s=1).result(DEADLINE_S)
    assert (ours == 7).all()
    assert not mapped._arena.array.flags.writeable


@pytest.mark.parametrize("address", [THEIRS - 64, THEIRS + SIZE - 63, 0, 2**64 - 64])
def test_a_slot_outside_the_arena_is_not_read(mapped: MappedReader, address: int) -> None:
    """A confused answer may name any slot."""
    ours = np.full(128, 9, dtype=np.uint8)
    target = rows(ours.ctypes.data, 0, 64)
    source = Spans(np.concatenate([rows(THEIRS, 0).rows, rows(address, 0).rows]))
    with pytest.raises(TransferFailed, match="not inside the arena"):
        mapped.read(target, source, deadline_s=1).result(DEADLINE_S)
    assert (ours == 9).all()


def test_a_copy_that_is_late_does_not_begin(mapped: MappedReader) -> None:
    """Another copy holds the thread until after the deadline."""
    ours = np.zeros(64, dtype=np.uint8)
    held = threading.Event()
    mapped._thread.submit(held.wait, DEADLINE_S)
    late = mapped.read(rows(ours.ctypes.data, 0), rows(THEIRS, 0), deadline_s=0.0)
    held.set()
    with pytest.raises(TransferTimeout):
        late.result(DEADLINE_S)
    assert not ours.any()


def test_what_was_asked_for_before_the_end_ends_first(mapped: MappedReader) -> None:
    """1. A copy waits for its turn. 2. `close` waits for it. 3. What comes later is refused."""
    ours = np.zeros(64, dtype=np.uint8)
    target, source = rows(ours.ctypes.data, 0), rows(THEIRS, 64)
    held = threading.Event()
    mapped._thread.submit(held.wait, DEADLINE_S)
    read = mapped.read(target, source, deadline_s=DEADLINE_S)
    closing = threading.Thread(target=mapped.close)
    closing.start()
    held.set()
    closing.join(DEADLINE_S)
    assert read.done()
    assert np.array_equal(ours, content(SIZE)[64:128])
    with pytest.raises(MoverClosed):
        mapped.read(target, source, deadline_s=1).result(DEADLINE_S)
    mapped.close()


def test_what_is_asked_for_while_it_closes_is_not_copied(mapped: MappedReader) -> None:
    """Method: a read arrives between the end of the mapping and that of the thread. It crashed."""
    ours = np.zeros(64, dtype=np.uint8)
    reads: list[Future[Moved]] = []
    shutdown = mapped._thread.shutdown

    def after_a_read(*, wait: bool) -> None:
        reads.append(mapped.read(rows(ours.ctypes.data, 0), rows(THEIRS, 64), deadline_s=1))
        shutdown(wait=wait)

    mapped._thread.shutdown = after_a_read  # type: ignore[assignment,method-assign]
    mapped.close()
    with pytest.raises(MoverClosed):
        reads[0].result(DEADLINE_S)
    assert not ours.any()


def test_nixl_reads_another_process(mover: MoverThread, owner: Owner) -> None:
    reader = NixlReader(mover, mover.add_peer(owner.metadata).result(DEADLINE_S))
    ours = np.zeros((2, 64), dtype=np.uint8)
    known = mover.register_memory(ours.ctypes.data, ours.nbytes).result(DEADLINE_S)
    target = rows(ours.ctypes.data, 0, 64)
    source = rows(owner.address, 640, 64)
    reader.read(target, source, deadline_s=DEADLINE_S).result(DEADLINE_S)
    expected = content(SIZE).reshape(-1, 64)
    assert np.array_equal(ours, [expected[10], expected[1]])
    outside = rows(owner.address, 0, SIZE)
    with pytest.raises(TransferFailed):
        reader.read(target, outside, deadline_s=DEADLINE_S).result(DEADLINE_S)
    reader.close()
    with pytest.raises(PeerLost):
        reader.read(target, source, deadline_s=DEADLINE_S).result(DEADLINE_S)
    mover.deregister(known).result(DEADLINE_S)


# --- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "names"), [("mapped", ["mapped"]), ("nixl", ["nixl"]), ("auto", ["mapped", "nixl"])]
)
def test_the_mapping_comes_first(
    mover: MoverThread, arena: Arena, wanted: str, names: list[str]
) -> None:
    readers = readers_of(welcome(arena_path=str(arena.path)), mover, "peer", wanted=wanted)
    assert [reader.name for reader in readers] == names
    for reader in readers:
        if isinstance(reader, MappedReader):
            reader.close()


@pytest.mark.parametrize("wanted", ["mapped", "auto"])
@pytest.mark.parametrize("kind", ["missing", "empty", "a directory"])
def test_an_arena_that_cannot_be_mapped_is_read_over_nixl(
    mover: MoverThread, tmp_path: Path, wanted: str, kind: str
) -> None:
    """It is on another host, or its owner has just died."""
    path = tmp_path / "arena"
    match kind:
        case "empty":
            path.touch()
        case "a directory":
            path.mkdir()
        case _:
            pass
    readers = readers_of(welcome(arena_path=str(path)), mover, "peer", wanted=wanted)
    assert [reader.name for reader in readers] == ["nixl"]


class Paced:
    """A reader of a known speed, or none."""

    def __init__(self, name: str, outcome: Exception | None = None) -> None:
        self.name = name
        self.reads = 0
        self._outcome = outcome

    def read(self, target: Spans, source: Spans, *, deadline_s: float) -> Future[Moved]:
        self.reads += 1
        future: Future[Moved] = Future()
        if self._outcome is None:
            future.set_result(Moved(target.bytes, 0.001))
        else:
            future.set_exception(self._outcome)
        return future

    def close(self) -> None:
        pass


def test_a_way_that_fails_is_not_chosen(mover: MoverThread) -> None:
    """Each is measured some times, on the memory of a probe that is given back."""
    broken, sound = Paced("broken", TransferFailed("no")), Paced("sound")
    assert fastest([broken, sound], mover, welcome()) is sound
    assert (broken.reads, sound.reads) == (1, arena_reader.PROBE_ROUNDS)


def test_the_memory_of_a_probe_is_kept_until_no_late_byte_can_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A timed-out read drains: freed memory would be written to, whoever owned it by then."""

    class Registry:
        """A mover that keeps account."""

        def __init__(self) -> None:
            self.known: set[int] = set()

        def register_memory(self, address: int, _length: int) -> Future[int]:
            self.known.add(address)
            future: Future[int] = Future()
            future.set_result(address)
            return future

        def deregister(self, address: int) -> None:
            self.known.remove(address)

    registry, settling = Registry(), Future[None]()
    late = Paced("late", TransferTimeout("late", settling))
    fastest([late], registry, welcome())  # type: ignore[arg-type]
    assert len(registry.known) == 1
    settling.set_result(None)
    assert not registry.known
