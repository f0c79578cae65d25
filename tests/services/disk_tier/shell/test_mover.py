"""The disk tier's mover: a store's file and an arena, over NIXL POSIX."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_common.checksum import block_checksum
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.mover_thread import MoverThread
from kvbm_common.nixl.transfers import TransferFailed
from kvbm_common.runtime.loop import monotonic_ms
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slots import Block
from kvbm_disk_tier.core.effects import ReadSlots, WriteSlots
from kvbm_disk_tier.core.messages import ReadDone, ReadFailed, WriteFailed, Written
from kvbm_disk_tier.shell.mover import DiskMover, Put

from tests.services.disk_tier.helpers import NAMESPACE, name

SLOT_BYTES = 4096
SLOTS = 4


@pytest.fixture
def arenas() -> Iterator[list[Arena]]:
    """The arenas of two lives of a host tier."""
    made = [
        Arena.create("/dev/shm", f"kvbm-test-mover-{os.getpid()}-{life}", SLOTS * SLOT_BYTES)
        for life in range(2)
    ]
    yield made
    for arena in made:
        arena.close()


@pytest.fixture
def thread() -> MoverThread:
    """What the mover moves with, and closes."""
    return MoverThread("test", backends=("POSIX",))


@pytest.fixture
def mover(tmp_path: Path, thread: MoverThread) -> Iterator[DiskMover]:
    """A mover with a file."""
    fd = os.open(tmp_path / "slots", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, SLOTS * SLOT_BYTES)
    mover = DiskMover(mover=thread, counters=Metrics())
    mover.use_file(fd, Layout.of(SLOT_BYTES, SLOTS))
    yield mover
    mover.close()
    os.close(fd)


def fill(arena: Arena, slot: int, byte: int) -> Block:
    """Put bytes into a slot."""
    data = bytes([byte]) * SLOT_BYTES
    arena.view(slot * SLOT_BYTES, SLOT_BYTES)[:] = data
    return Block(name(byte), name(0), NAMESPACE, block_checksum(data), SLOT_BYTES)


def reading(epoch: int, target: int, block: Block, *, source: int = 0) -> ReadSlots:
    """File slot to arena slot."""
    until_ms = monotonic_ms() + 5_000
    return ReadSlots(1, epoch, (source,), (target,), (block,), SLOT_BYTES, until_ms)


async def test_there_and_back_and_a_wrong_checksum(mover: DiskMover, arenas: list[Arena]) -> None:
    """Arena to file to another slot; then the same bytes under another name."""
    mover.use_arena(str(arenas[0].path), 1)
    good = fill(arenas[0], 1, 7)
    assert await mover.write(WriteSlots(1, 1, (1,), (0,), (good,), SLOT_BYTES)) == Written(1)
    assert await mover.read(reading(1, 3, good)) == ReadDone(1, (True,))
    assert bytes(arenas[0].view(3 * SLOT_BYTES, 4)) == b"\7" * 4
    assert await mover.read(reading(1, 3, fill(arenas[0], 2, 8))) == ReadDone(1, (False,))


async def test_neighbours_move_as_one_and_strangers_beside_them(
    mover: DiskMover, arenas: list[Arena]
) -> None:
    """Each slot comes back with its own bytes, merged on its way or not, in any order."""
    mover.use_arena(str(arenas[0].path), 1)
    blocks = [fill(arenas[0], slot, 7 + slot) for slot in range(4)]
    moved = tuple(blocks[slot] for slot in (2, 0, 1, 3))
    write = WriteSlots(1, 1, (2, 0, 1, 3), (1, 3, 0, 2), moved, SLOT_BYTES)
    assert await mover.write(write) == Written(1)
    arenas[0].view(0, SLOTS * SLOT_BYTES)[:] = bytes(SLOTS * SLOT_BYTES)
    until_ms = monotonic_ms() + 5_000
    again = [blocks[slot] for slot in (1, 2, 3, 0)]
    read = ReadSlots(1, 1, (0, 1, 2, 3), (1, 2, 3, 0), tuple(again), SLOT_BYTES, until_ms)
    assert await mover.read(read) == ReadDone(1, (True,) * 4)
    assert [bytes(arenas[0].view(slot * SLOT_BYTES, 1)) for slot in range(4)] == [
        b"\7", b"\x08", b"\x09", b"\x0a"
    ]  # fmt: skip


async def test_a_decision_about_a_former_arena_touches_nothing(
    mover: DiskMover, arenas: list[Arena]
) -> None:
    """The next life's arena was mapped meanwhile: its slots are not what the core had in mind.

    It used to be read into, and written from, whichever arena was mapped.
    """
    mover.use_arena(str(arenas[0].path), 1)
    block = fill(arenas[0], 1, 7)
    write, read = WriteSlots(1, 1, (1,), (0,), (block,), SLOT_BYTES), reading(1, 2, block)
    await mover.write(write)
    mover.use_arena(str(arenas[1].path), 2)
    fill(arenas[1], 2, 9)
    assert await mover.read(read) == ReadFailed(1, "stale_arena")
    assert await mover.write(write) == WriteFailed(1, "stale_arena")
    assert bytes(arenas[1].view(2 * SLOT_BYTES, 4)) == b"\x09" * 4
    assert await mover.read(reading(2, 3, block)) == ReadDone(1, (True,))


async def test_an_arena_is_mapped_once_in_its_life(mover: DiskMover, arenas: list[Arena]) -> None:
    """Asked for again, it is the same: nothing is mapped or registered anew."""
    mover.use_arena(str(arenas[0].path), 1)
    arenas[0].path.rename(arenas[0].path.with_suffix(".away"))
    mover.use_arena(str(arenas[0].path), 1)
    arenas[0].path.with_suffix(".away").rename(arenas[0].path)
    good = fill(arenas[0], 1, 7)
    assert await mover.write(WriteSlots(1, 1, (1,), (0,), (good,), SLOT_BYTES)) == Written(1)


def test_an_arena_that_cannot_be_registered_is_not_kept_open(
    mover: DiskMover, arenas: list[Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core asks again each second: each try kept a mapping and its descriptor."""

    def refuse(*_: object) -> None:
        raise TransferFailed("no memory to register")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(MoverThread, "register_memory", refuse)
    for _ in range(3):
        with pytest.raises(TransferFailed):
            mover.use_arena(str(arenas[0].path), 1)
    assert len(os.listdir("/proc/self/fd")) == before


def writing(epoch: int, blocks: list[Block], *, first: int = 0) -> WriteSlots:
    """Arena slots from 0 on to file slots from `first` on."""
    count = len(blocks)
    targets = tuple(range(first, first + count))
    return WriteSlots(5, epoch, tuple(range(count)), targets, tuple(blocks), SLOT_BYTES)


async def test_a_large_batch_is_several_transfers(
    mover: DiskMover, thread: MoverThread, arenas: list[Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks, two to a transfer: all are there, each with its own bytes."""
    monkeypatch.setattr("kvbm_disk_tier.shell.mover.TRANSFER_BYTES", 2 * SLOT_BYTES)
    blocks = [fill(arenas[0], slot, 10 + slot) for slot in range(3)]
    mover.use_arena(str(arenas[0].path), 1)
    assert await mover.write(writing(1, blocks)) == Written(5, ())
    assert thread.statistics().transfers_done == 2
    for slot, block in enumerate(blocks):
        assert await mover.read(reading(1, 3, block, source=slot)) == ReadDone(1, (True,))


async def test_a_batch_of_which_a_transfer_fails_has_failed(
    mover: DiskMover, arenas: list[Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of its transfers goes beyond the file."""
    monkeypatch.setattr("kvbm_disk_tier.shell.mover.TRANSFER_BYTES", SLOT_BYTES)
    blocks = [fill(arenas[0], slot, slot) for slot in range(2)]
    mover.use_arena(str(arenas[0].path), 1)
    failed = await mover.write(writing(1, blocks, first=SLOTS - 1))
    assert isinstance(failed, WriteFailed)
    assert (failed.write, failed.reason) == (5, "transfer_failed")
    assert "4096 bytes" in failed.detail


async def test_what_was_lost_in_a_later_transfer_is_named_by_its_place_in_the_batch(
    mover: DiskMover, arenas: list[Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of transfers of two blocks, each has lost its second: 1 and 3."""
    monkeypatch.setattr("kvbm_disk_tier.shell.mover.TRANSFER_BYTES", 2 * SLOT_BYTES)
    put = mover._put

    async def put_and_lose(arena: Arena, effect: WriteSlots) -> Put:
        moved, _ = await put(arena, effect)
        return moved, (1,)

    monkeypatch.setattr(mover, "_put", put_and_lose)
    blocks = [fill(arenas[0], slot, slot) for slot in range(4)]
    mover.use_arena(str(arenas[0].path), 1)
    assert await mover.write(writing(1, blocks)) == Written(5, (1, 3))
