"""A disk tier started again with another size, on a real NATS, with real files over NIXL."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.tier.layout import UNIT_BYTES
from kvbm_common.tier.slots import Block
from kvbm_common.wire.admin import RemoveRequest
from kvbm_disk_tier.core.journal import Operation, Record
from kvbm_disk_tier.shell import allocation
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_options import StoreError, StoreOptions

from tests.services.disk_tier.helpers import NAMESPACE, name
from tests.services.disk_tier.shell.test_service import (
    DISK_SLOTS,
    SLOT_BYTES,
    Host,
    ask,
    living,
    settings_of,
    wait_stats,
)

KEYS = ("", "11" * 32)
EXTRA_BYTES = 4096


def size_of(slots: int, keys: str) -> dict[str, Any]:
    """What gives a disk tier so many slots."""
    slot_bytes = SLOT_BYTES + (EXTRA_BYTES if keys else 0)
    return {"disk_cache_gb": slots * slot_bytes / 1e9, "disk_keys": keys}


@pytest.fixture
async def host(bus: Bus) -> AsyncIterator[Host]:
    """A living host tier."""
    async with Host.living(bus) as living_host:
        yield living_host


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("slots", [DISK_SLOTS + 1, DISK_SLOTS - 1, DISK_SLOTS // 2, 2 * DISK_SLOTS])
async def test_another_size_keeps_what_fits(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path, slots: int, keys: str
) -> None:
    """1. A full store. 2. Another size: as many blocks as fit are read and verified. 3. New ones
    come. 4. The first size again."""
    stored = [*range(1, DISK_SLOTS + 1)]
    async with living(settings_of(nats_server, tmp_path, **size_of(DISK_SLOTS, keys))):
        host.store(*stored)
        await host.wait_announced(*stored)
    host.held.clear()
    fit = stored[:slots]
    for count in (slots, DISK_SLOTS):
        async with living(settings_of(nats_server, tmp_path, **size_of(count, keys))):
            await host.wait_announced(*fit)
            assert (await wait_stats(bus, "ready", True)).slots["total"] == count
            for number in fit:
                assert (await host.fill(number))[number].ok


async def test_blocks_after_the_new_end_move_into_free_slots(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path
) -> None:
    """1. Of six blocks the first three are reset. 2. In half the slots the others are all there,
    and once more. 3. With the slots of before, they are, and new ones come."""
    async with living(settings_of(nats_server, tmp_path, **size_of(DISK_SLOTS, ""))):
        host.store(*range(1, 7))
        await host.wait_announced(*range(1, 7))
        hashes = [name(number).hex() for number in (1, 2, 3)]
        await ask(bus, "reset", msgspec.json.encode(RemoveRequest(hashes=hashes)))
        await host.wait_announced(4, 5, 6)
    host.held.clear()
    for count in (DISK_SLOTS // 2, DISK_SLOTS // 2, DISK_SLOTS):
        async with living(settings_of(nats_server, tmp_path, **size_of(count, ""))):
            await host.wait_announced(4, 5, 6)
            assert (await wait_stats(bus, "ready", True)).slots["total"] == count
            for number in (4, 5, 6):
                assert (await host.fill(number))[number].ok
    async with living(settings_of(nats_server, tmp_path, **size_of(DISK_SLOTS, ""))):
        host.store(7, 8)
        await host.wait_announced(*range(4, 9))


# --- the store alone ------------------------------------------------------------------------------


def store_of(directory: Path, slots: int, **changes: Any) -> Store:
    """A store with so many slots of 4 KiB."""
    capacity_bytes = slots * UNIT_BYTES
    return Store(StoreOptions(directory / "store", capacity_bytes, direct=False, **changes))


def recovered(directory: Path, slots: int) -> dict[int, int]:
    """Places and numbers of the blocks that a life with so many slots finds, and their bytes."""
    store = store_of(directory, slots)
    try:
        found = store.recover()
        assert found is not None
        assert found.damaged == 0
        for place, block in found.blocks.items():
            data = os.pread(store.fd, UNIT_BYTES, place * UNIT_BYTES)
            assert data == bytes([int(block.hash.hex(), 16)]) * UNIT_BYTES
        return {place: int(block.hash.hex(), 16) for place, block in found.blocks.items()}
    finally:
        store.close()


def filled(directory: Path, slots: int, *numbers: int) -> None:
    """Make a store in which block n is in slot n."""
    store = store_of(directory, slots)
    store.create(UNIT_BYTES)
    for order, number in enumerate(numbers, 1):
        os.pwrite(store.fd, bytes([number]) * UNIT_BYTES, number * UNIT_BYTES)
        one = Block(name(number), name(0), NAMESPACE, number, UNIT_BYTES)
        store.append((Record(Operation.COMMITTED, order, number, one),), commit=True)
    store.close()


@pytest.mark.parametrize(
    "fails", ["kvbm_disk_tier.shell.store.move_slots", "os.replace", "os.truncate"]
)
def test_an_end_in_the_middle_of_a_shrinking_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """1. A step fails. 2. With the size of before, or the new one, all blocks are there."""
    filled(tmp_path, 8, 1, 6, 7)

    def fail(*_arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(fails, fail)
        store = store_of(tmp_path, 4)
        with pytest.raises(StoreError, match="no smaller store in"):
            store.recover()
        store.close()
    assert set(recovered(tmp_path, 4).values()) == {1, 6, 7}
    assert (tmp_path / "store/slots").stat().st_size == 4 * UNIT_BYTES
    assert set(recovered(tmp_path, 8).values()) == {1, 6, 7}


def test_the_bytes_that_were_moved_are_told(tmp_path: Path) -> None:
    """Of three slots two move: they are written to the disk, and wear it."""
    filled(tmp_path, 8, 1, 6, 7)
    for moved_bytes in (2 * UNIT_BYTES, 0):
        store = store_of(tmp_path, 4)
        found = store.recover()
        store.close()
        assert found is not None
        assert found.moved_bytes == moved_bytes


@pytest.mark.parametrize("read_bytes", [-1, 0, 100])
def test_a_slot_that_cannot_be_read_is_left_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    read_bytes: int,
) -> None:
    """A sector of slot 6 is broken (-1: the read fails, else it ends there): the others stay."""
    filled(tmp_path, 8, 1, 5, 6, 7)
    caplog.set_level("INFO")
    pread = os.pread

    def broken(fd: int, size: int, offset: int) -> bytes:
        if offset != 6 * UNIT_BYTES:
            return pread(fd, size, offset)
        if read_bytes < 0:
            raise OSError(errno.EIO, "Input/output error")
        return pread(fd, read_bytes, offset)

    with monkeypatch.context() as patched:
        patched.setattr("os.pread", broken)
        assert set(recovered(tmp_path, 4).values()) == {1, 5, 7}
    assert caplog.text.count("cannot be read") == 1
    assert "3 blocks stay, 2 of them were moved, 1 could not be read, and 0 left" in caplog.text
    assert set(recovered(tmp_path, 4).values()) == {1, 5, 7}


@pytest.mark.parametrize("slots", [4, 12])
def test_a_header_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """And its name is, before anything else: a power cut leaves the old header or the new one."""
    filled(tmp_path, 8, 1, 7)
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(fd: int) -> None:
        calls.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    def noted_replace(old: Path, new: Path) -> None:
        calls.append(f"{old.name} to {new.name}")
        replace(old, new)

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", noted_fsync)
        patched.setattr("os.replace", noted_replace)
        assert len(recovered(tmp_path, slots)) == 2
    at = calls.index("header.new to header")
    assert calls[at - 1 : at + 2] == ["header.new", "header.new to header", "store"]


def test_what_left_with_the_last_slots_does_not_come_back_with_them(tmp_path: Path) -> None:
    """Five blocks, four slots: the oldest leaves that no other block is behind, and does not come
    back with the eight slots of before."""
    filled(tmp_path, 8, 0, 1, 2, 3, 7)
    assert recovered(tmp_path, 4) == {0: 0, 1: 7, 2: 2, 3: 3}
    assert recovered(tmp_path, 8) == {0: 0, 1: 7, 2: 2, 3: 3}


def test_a_full_store_says_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And how an operator loses less the next time."""
    filled(tmp_path, 8, *range(8))
    assert set(recovered(tmp_path, 4).values()) == {0, 5, 6, 7}
    assert (
        "4 blocks stay, 3 of them were moved, 0 could not be read, and 4 left: `kvbm resize`"
        in caplog.text
    )


@pytest.mark.parametrize(
    "fails", ["kvbm_disk_tier.shell.store.move_slots", "os.replace", "os.truncate"]
)
def test_an_end_in_the_middle_of_a_replacement_serves_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """1. A full store; a step fails, perhaps after blocks were written over others. 2. What is
    found afterwards has its own bytes, with the size of before, and then with the new one."""
    filled(tmp_path, 8, *range(8))
    move = allocation.move_slots

    def fail(*arguments: Any) -> None:
        if fails.endswith("move_slots"):
            move(*arguments)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(fails, fail)
        store = store_of(tmp_path, 4)
        with pytest.raises(StoreError, match="no smaller store in"):
            store.recover()
        store.close()
    assert {0, 5, 6, 7} <= set(recovered(tmp_path, 8).values())
    assert set(recovered(tmp_path, 4).values()) == {0, 5, 6, 7}


def test_a_store_of_one_size_is_resized_as_well(tmp_path: Path) -> None:
    """It becomes one of several sizes first."""
    filled(tmp_path, 8, 3, 7)
    (tmp_path / "store/header").write_text('{"format":2,"slot_bytes":4096,"slot_count":8}')
    assert recovered(tmp_path, 7) == {3: 3, 0: 7}
    assert recovered(tmp_path, 9) == {3: 3, 0: 7}


def test_a_header_names_the_host(tmp_path: Path) -> None:
    """A store of an earlier release gets the name, and keeps its blocks and its slabs."""
    filled(tmp_path, 8, 3, 7)
    before = json.loads((tmp_path / "store/header").read_text())
    assert before["host"] == ""
    store = store_of(tmp_path, 8, host="h")
    found = store.recover()
    store.close()
    assert found is not None
    assert list(found.blocks) == [3, 7]
    assert json.loads((tmp_path / "store/header").read_text()) == before | {"host": "h"}


def test_without_room_to_grow_it_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A petabyte: its blocks are served, and the log says why there are no more slots."""
    filled(tmp_path, 8192, 3, 7)
    assert recovered(tmp_path, 10**15 // UNIT_BYTES) == {3: 3, 7: 7}
    assert (tmp_path / "store/slots").stat().st_size == 8192 * UNIT_BYTES
    assert "keeps 8192 slots: no room for" in caplog.text


def test_a_tiny_store_that_becomes_large_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight slabs of a slot: 128 slots may have such, of 256 a new store's has 32 slots."""
    filled(tmp_path, 8, 3, 7)
    assert recovered(tmp_path, 128) == {3: 3, 7: 7}
    filled(tmp_path, 8, 3, 7)
    store = store_of(tmp_path, 256)
    assert store.recover() is None
    assert "its slabs are too short for 256 slots" in caplog.text
    store.create(UNIT_BYTES)
    assert store.header is not None
    assert store.header.layout.slab_slots == 32
    store.close()


def test_zeros_go_after_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that cannot preallocate: the blocks are not overwritten."""
    filled(tmp_path, 8, 3, 7)
    monkeypatch.setattr("kvbm_disk_tier.shell.allocation.fallocate", lambda *_arguments: False)
    store = store_of(tmp_path, 9, zerofill_fallback=True)
    assert store.recover() is not None
    store.close()
    assert recovered(tmp_path, 9) == {3: 3, 7: 7}
