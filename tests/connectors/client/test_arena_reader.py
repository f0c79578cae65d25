"""Arena readers: copies out of a mapped arena, and NIXL reads from another process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.checksum import block_checksum
from kvbm_common.copying import THREADS_MAX, Copier, Lanes, NativeCopier, Places, PlainCopier
from kvbm_common.copying.rank_pieces import BlockCopy, RankPieces
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.mover_thread import (
    MoverClosed,
    MoverThread,
    PeerLost,
    TransferFailed,
    TransferTimeout,
)
from kvbm_common.tier.parts import Grid, Share
from kvbm_common.wire.local import Region
from kvbm_connectors.client import arena_reader
from kvbm_connectors.client.arena_reader import MappedReader, NixlReader, reader_of
from kvbm_connectors.client.bounce_pool import BUFFERS, BouncePool

from tests.connectors.endpoints import welcome
from tests.libs.native import library
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


class HeldCopier:
    """A copier whose copies wait while `free` is clear."""

    name = "held"

    def __init__(self, copier: Copier) -> None:
        self.copier, self.free = copier, threading.Event()
        self.free.set()

    def copy(
        self, target: Places, source: Places, *, summed: bool = True, lanes: Lanes | None = None
    ) -> list[int]:
        """Copy when it may."""
        assert self.free.wait(DEADLINE_S)
        return self.copier.copy(target, source, summed=summed, lanes=lanes)

    def sums(self, source: Places, *, lanes: Lanes | None = None) -> list[int]:
        """Sum up at once."""
        return self.copier.sums(source, lanes=lanes)


@pytest.fixture(params=["native", "plain"])
def copier(request: pytest.FixtureRequest) -> HeldCopier:
    return HeldCopier(PlainCopier() if request.param == "plain" else NativeCopier(library()))


@pytest.fixture
def mapped(arena: Arena, copier: HeldCopier) -> Iterator[MappedReader]:
    there = welcome(arena_path=str(arena.path), arena_address=THEIRS)
    reader = MappedReader(there, copier=copier)
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


def blocks(
    ours: np.ndarray,
    targets: Sequence[int],
    sources: Sequence[int],
    *,
    pieces: Sequence[int] = (0,),
    length: int = 64,
    parts: int = 1,
) -> BlockCopy:
    """Copies of blocks from some addresses to bytes of ours, whose pieces are at `pieces` from
    there."""
    regions = [
        Region(address=ours.ctypes.data + at, stride=1, piece_bytes=length // len(pieces), blocks=1)
        for at in pieces
    ]
    share = Share(Grid(heads=parts), 0, 1, 0, parts)
    return BlockCopy(RankPieces(regions, share), targets, np.array(sources, dtype=np.uint64))


def hold_all(reader: MappedReader, copier: HeldCopier) -> threading.Event:
    """Every thread of a reader is busy until the event is set."""
    copier.free.clear()
    nowhere = np.zeros((THREADS_MAX, 64), dtype=np.uint8)
    for row in nowhere:
        reader.read(blocks(row, [0], [THEIRS]), deadline_s=60, summed=False)
    return copier.free


def mappings(arena: Arena, access: str) -> int:
    """How often this process maps an arena with these rights."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.endswith(str(arena.path)) and line.split()[1] == access for line in lines)


def test_a_mapped_arena_is_copied_block_by_block_and_summed(mapped: MappedReader) -> None:
    """Blocks 3 and 1 of the arena go to blocks 0 and 2 of ours; block 1 of ours is left alone."""
    ours = np.zeros((3, 64), dtype=np.uint8)
    copy = blocks(ours, [0, 128], [THEIRS + 192, THEIRS + 64])
    brought = mapped.read(copy, deadline_s=DEADLINE_S, summed=True).result(DEADLINE_S)
    expected = content(SIZE).reshape(-1, 64)
    assert np.array_equal(ours, [expected[3], np.zeros(64), expected[1]])
    assert brought.sums == [block_checksum(expected[3]), block_checksum(expected[1])]
    assert brought.seconds > 0


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_block_of_pieces_is_filled_from_one_run(mapped: MappedReader, parts: int) -> None:
    """In the arena a block's pieces are back to back; each part has the checksum of its bytes."""
    ours = np.zeros((4, 32), dtype=np.uint8)
    copy = blocks(ours, [0], [THEIRS + 64], pieces=(96, 0), parts=parts)
    read = mapped.read(copy, deadline_s=DEADLINE_S, summed=True)
    run = content(SIZE)[64:128]
    assert read.result(DEADLINE_S).sums == [
        block_checksum(part) for part in run.reshape(parts, -1)
    ]  # fmt: skip
    assert np.array_equal(ours[[3, 0]].reshape(-1), run)
    assert not ours[[1, 2]].any()


def test_a_mapping_sees_what_the_owner_writes_later(mapped: MappedReader, arena: Arena) -> None:
    """It is the arena, no copy of it; and nobody can write through it."""
    arena.array[:64] = 7
    ours = np.zeros(64, dtype=np.uint8)
    read = mapped.read(blocks(ours, [0], [THEIRS]), deadline_s=1, summed=False)
    assert read.result(DEADLINE_S).sums == []
    assert (ours == 7).all()
    assert (mappings(arena, "r--s"), mappings(arena, "rw-s")) == (1, 1)


@pytest.mark.parametrize("address", [THEIRS - 64, THEIRS + SIZE - 63, 0, 2**64 - 64])
def test_a_slot_outside_the_arena_is_not_read(mapped: MappedReader, address: int) -> None:
    """A confused answer may name any slot."""
    ours = np.full(128, 9, dtype=np.uint8)
    copy = blocks(ours, [0, 64], [THEIRS, address])
    with pytest.raises(TransferFailed, match="not inside the arena"):
        mapped.read(copy, deadline_s=1, summed=True).result(DEADLINE_S)
    assert (ours == 9).all()


def test_a_copy_that_is_late_does_not_begin(mapped: MappedReader, copier: HeldCopier) -> None:
    """Other copies hold the threads until after the deadline."""
    ours = np.zeros(64, dtype=np.uint8)
    held = hold_all(mapped, copier)
    late = mapped.read(blocks(ours, [0], [THEIRS]), deadline_s=0.0, summed=True)
    held.set()
    with pytest.raises(TransferTimeout):
        late.result(DEADLINE_S)
    assert not ours.any()


def test_what_was_asked_for_before_the_end_ends_first(
    mapped: MappedReader, copier: HeldCopier
) -> None:
    """1. A copy waits for its turn. 2. `close` waits for it. 3. What comes later is refused."""
    ours = np.zeros(64, dtype=np.uint8)
    copy = blocks(ours, [0], [THEIRS + 64])
    held = hold_all(mapped, copier)
    read = mapped.read(copy, deadline_s=DEADLINE_S, summed=True)
    closing = threading.Thread(target=mapped.close)
    closing.start()
    held.set()
    closing.join(DEADLINE_S)
    assert read.done()
    assert np.array_equal(ours, content(SIZE)[64:128])
    with pytest.raises(MoverClosed):
        mapped.read(copy, deadline_s=1, summed=True).result(DEADLINE_S)
    mapped.close()


def test_nothing_is_unmapped_under_a_copy(
    mapped: MappedReader, copier: HeldCopier, arena: Arena
) -> None:
    """Method: a copy that was asked for is still waiting when `close` unmaps: it would crash."""
    ours = np.zeros(64, dtype=np.uint8)
    held = hold_all(mapped, copier)
    read = mapped.read(blocks(ours, [0], [THEIRS + 64]), deadline_s=DEADLINE_S, summed=True)
    closing = threading.Thread(target=mapped.close)
    closing.start()
    closing.join(0.05)
    assert mappings(arena, "r--s") == 1
    held.set()
    closing.join(DEADLINE_S)
    assert read.result(DEADLINE_S).sums == [block_checksum(content(SIZE)[64:128])]
    assert mappings(arena, "r--s") == 0


# --- over NIXL ----------------------------------------------------------------------------------


@pytest.fixture
def pool(mover: MoverThread) -> BouncePool:
    return BouncePool(mover, block_bytes=64)


@pytest.mark.slow
def test_nixl_reads_another_process_through_a_buffer(
    mover: MoverThread, owner: Owner, pool: BouncePool
) -> None:
    """The memory that is filled is not registered: NIXL knows our buffers only."""
    reader = NixlReader(mover, mover.add_peer(owner.metadata).result(DEADLINE_S), pool)
    ours = np.zeros((4, 32), dtype=np.uint8)
    copy = blocks(ours, [0, 32], [owner.address + 640, owner.address + 64], pieces=(0, 64), parts=4)
    brought = reader.read(copy, deadline_s=DEADLINE_S, summed=True).result(DEADLINE_S)
    expected = content(SIZE).reshape(-1, 64)[[10, 1]]
    assert brought.sums == [block_checksum(part) for part in expected.reshape(8, 16)]
    assert np.array_equal(ours[[0, 2, 1, 3]].reshape(2, 64), expected)
    outside = blocks(ours, [0], [owner.address + SIZE - 64], length=128)
    with pytest.raises(TransferFailed):
        reader.read(outside, deadline_s=DEADLINE_S, summed=True).result(DEADLINE_S)
    too_much = blocks(ours, [0], [owner.address], length=pool.buffer_bytes + 1)
    with pytest.raises(TransferFailed, match="more than a buffer"):
        reader.read(too_much, deadline_s=1, summed=True).result(DEADLINE_S)
    reader.close()
    with pytest.raises((PeerLost, MoverClosed)):
        reader.read(copy, deadline_s=DEADLINE_S, summed=True).result(DEADLINE_S)
    assert pool.lost == 0
    assert all(pool.borrow(time.monotonic() + DEADLINE_S).done() for _ in range(BUFFERS))


def test_an_arena_without_threads_to_copy_it_is_not_kept_mapped(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again and again."""

    def refuse(name: str) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(arena_reader, "copy_threads", refuse)
    with pytest.raises(RuntimeError):
        MappedReader(welcome(arena_path=str(arena.path), arena_address=THEIRS))
    opened = [descriptor.resolve() for descriptor in Path("/proc/self/fd").iterdir()]
    assert opened.count(arena.path.resolve()) == 1


def test_a_buffer_that_a_gpu_copies_from_late_is_lost_until_then(
    mover: MoverThread, owner: Owner, pool: BouncePool
) -> None:
    """The read has failed, and says until when its bytes may come."""
    settling: Future[None] = Future()

    def deliver(target: Places, source: Places) -> None:
        raise TransferTimeout("the engine's stream stands still", settling)

    peer = mover.add_peer(owner.metadata).result(DEADLINE_S)
    reader = NixlReader(mover, peer, pool, deliver=deliver)
    ours = np.zeros((1, 64), dtype=np.uint8)
    read = reader.read(blocks(ours, [0], [owner.address]), deadline_s=DEADLINE_S, summed=False)
    with pytest.raises(TransferTimeout) as raised:
        read.result(DEADLINE_S)
    assert (raised.value.settling, pool.lost) == (settling, 1)
    settling.set_result(None)
    assert pool.lost == 0


# --- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "name"), [("mapped", "mapped"), ("nixl", "nixl"), ("auto", "mapped")]
)
def test_what_can_be_mapped_is_mapped_unless_an_operator_wants_nixl(
    mover: MoverThread, arena: Arena, owner: Owner, pool: BouncePool, wanted: str, name: str
) -> None:
    """The choice does not depend on a measurement, which may be of a cache, or of a bad moment."""
    there = welcome(arena_path=str(arena.path), agent=owner.metadata)
    reader = reader_of(there, mover, pool, wanted=wanted)
    assert reader.name == name
    reader.close()


@pytest.mark.parametrize("wanted", ["mapped", "auto"])
@pytest.mark.parametrize("kind", ["missing", "empty", "a directory"])
def test_an_arena_that_cannot_be_mapped_is_read_over_nixl(
    mover: MoverThread, tmp_path: Path, owner: Owner, pool: BouncePool, wanted: str, kind: str
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
    there = welcome(arena_path=str(path), agent=owner.metadata)
    reader = reader_of(there, mover, pool, wanted=wanted)
    assert reader.name == "nixl"
    reader.close()
