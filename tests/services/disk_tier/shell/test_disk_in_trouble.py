"""A disk tier on a disk that is read-only, full, or answers with errors: it says so, and heals."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_disk_tier.core.journal import RECORD_BYTES
from kvbm_disk_tier.shell import own_files
from kvbm_disk_tier.shell.allocation import write_at
from kvbm_disk_tier.shell.own_files import read_own
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_options import StoreOptions

from tests.services.disk_tier.core.test_journal import committed, removed, slots
from tests.services.disk_tier.shell.test_service import (
    SLOT_BYTES,
    Host,
    can_fill,
    counted,
    host,
    living,
    remount,
    settings_of,
    small_disk,
    stats,
    until,
    wait_stats,
)
from tests.small_tmpfs import small_tmpfs

__all__ = ["host"]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried again at once."""
    monkeypatch.setattr("kvbm_disk_tier.core.store_status.STORE_RETRY_MS", 50)
    monkeypatch.setattr("kvbm_disk_tier.core.health.PAUSE_MS", 50)
    monkeypatch.setattr("kvbm_disk_tier.shell.tier_shell.TICK_MS", 50)
    monkeypatch.setattr("kvbm_disk_tier.shell.file_medium.SYNCHRONISE_S", 0.02)


class Broken:
    """A function of `os` that fails while it is told to."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, code: int) -> None:
        self.on = False
        self.failed = 0
        self._call: Callable[..., Any] = getattr(os, name)
        self._code = code
        patch.setattr(f"os.{name}", self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.on:
            self.failed += 1
            raise OSError(self._code, os.strerror(self._code))
        return self._call(*arguments, **named)


async def reason_of(bus: Bus) -> str:
    """Wait until it is not ready; why."""
    return (await wait_stats(bus, "ready", False)).reasons[0]


async def test_a_read_only_directory_is_reported_and_used_once_it_can_be(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path
) -> None:
    """1. Blocks are stored. 2. The next life finds the file system read-only: alive, not ready,
    and it says why. 3. It is writable again: the blocks are back, and new ones are stored.
    """
    with small_disk(tmp_path / "disk", "1m") as directory:
        settings = settings_of(nats_server, directory, runtime_dir=tmp_path / "run")
        async with living(settings):
            host.store(1, 2, 3)
            await host.wait_announced(1, 2, 3)
        remount(directory, "ro")
        async with living(settings):
            reason = await reason_of(bus)
            assert reason.startswith(f"DYN_KVBM_DISK_CACHE_DIR {directory} cannot be used")
            assert "Read-only file system" in reason
            remount(directory, "rw")
            await wait_stats(bus, "ready", True)
            await host.wait_announced(1, 2, 3)
            await until(lambda: can_fill(host))
            host.store(4)
            await host.wait_announced(1, 2, 3, 4)


async def test_a_disk_that_becomes_read_only_is_read_from(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record can be written while blocks can: what is there is served, nothing else begins."""
    broken = Broken(monkeypatch, "pwrite", errno.EROFS)
    async with living(settings_of(nats_server, tmp_path)):
        host.store(1, 2, 3)
        await host.wait_announced(1, 2, 3)
        broken.on = True
        for number in range(5, 14, 2):  # None is the parent of another.
            if (told := await stats(bus)) is None or not told.ready:
                break
            host.store(number)
            failures = broken.failed
            await until(lambda before=failures: _failed(broken, before))  # type: ignore[misc]
        reason = await reason_of(bus)
        assert "the disk takes no blocks: the journal cannot be written" in reason
        assert "Read-only file system" in reason
        assert await can_fill(host)
        assert (await counted(bus, "kvbm_disk_bypassed")) == {"": 1.0}
        broken.on = False
        await wait_stats(bus, "ready", True)
        host.store(14)
        await until(lambda: _holds(host, 14))


async def _failed(broken: Broken, before: int) -> bool:
    return broken.failed > before


async def _holds(host: Host, number: int) -> bool:
    return number in host.announced


async def test_synchronising_every_second_survives_a_failing_disk(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVBM_DISK_SYNC=interval: fdatasync fails for a while."""
    broken = Broken(monkeypatch, "fdatasync", errno.EIO)
    async with living(settings_of(nats_server, tmp_path, disk_sync="interval")):
        host.store(1, 2, 3)
        await host.wait_announced(1, 2, 3)
        broken.on = True
        reason = await reason_of(bus)
        assert "what was written cannot be synchronised" in reason
        assert "Input/output error" in reason
        broken.on = False
        await wait_stats(bus, "ready", True)
        assert await can_fill(host)


async def test_a_store_that_cannot_be_read_at_the_start_is_not_replaced(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header answers EIO while an engine is attached: no empty store takes its place."""
    settings = settings_of(nats_server, tmp_path)
    async with living(settings):
        host.store(1, 2, 3)
        await host.wait_announced(1, 2, 3)
    fails = asyncio.Event()
    fails.set()

    def failing(path: Path) -> bytes:
        if path.name == "header" and fails.is_set():
            raise OSError(errno.EIO, "Input/output error")
        return read_own(path)

    monkeypatch.setattr("kvbm_disk_tier.shell.store.read_own", failing)
    async with living(settings):
        reason = await reason_of(bus)
        assert "cannot be read" in reason
        assert "Input/output error" in reason

        async def has_tried_again() -> bool:
            tries = await counted(bus, "kvbm_store_failures_total")
            return tries.get("", 0) >= 3

        await until(has_tried_again)
        fails.clear()
        await host.wait_announced(1, 2, 3)
        await wait_stats(bus, "ready", True)
        await until(lambda: can_fill(host))


@pytest.mark.parametrize("cure", ["mount", "mkdir"])
async def test_a_disk_that_is_not_mounted_is_waited_for(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path, cure: str
) -> None:
    """1. A disk has a store. 2. It is not mounted at the next start: nothing is made on the disk
    below, and the reason says what to do. 3. Either cure is seen without a restart."""
    disk = tmp_path / "disk"
    settings = settings_of(nats_server, disk, state_dir=tmp_path / "state", runtime_dir=tmp_path)
    with small_tmpfs(disk, 64 << 20):
        async with living(settings):
            host.store(1)
            await host.wait_announced(1)
    async with living(settings):
        reason = await reason_of(bus)
        assert f"{disk} was on the disk mounted at {disk}" in reason
        assert f"mkdir -p -m 700 {disk}/kvbm-h-0" in reason
        assert list(disk.iterdir()) == []
        with contextlib.ExitStack() as cured:
            if cure == "mount":
                disk.rmdir()
                cured.enter_context(small_tmpfs(disk, 64 << 20))
            else:
                (disk / "kvbm-h-0").mkdir(mode=0o700)
            await wait_stats(bus, "ready", True)
            await host.wait_announced(1)


@pytest.mark.parametrize("call", ["lock_directory", "read_own"])
async def test_a_disk_that_hangs_at_the_start_is_waited_for(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, call: str,
) -> None:  # fmt: skip
    """1. A disk has a store. 2. At the next start it does not answer: the tier is there and says
    so, and an engine is attached. 3. It answers: the blocks are found, and no store was made."""
    settings = settings_of(nats_server, tmp_path)
    async with living(settings):
        host.store(1, 2, 3)
        await host.wait_announced(1, 2, 3)
    answers, called = threading.Event(), getattr(own_files, call)

    def hanging(path: Path) -> Any:
        answers.wait()
        return called(path)

    monkeypatch.setattr(f"kvbm_disk_tier.shell.store.{call}", hanging)
    monkeypatch.setattr("kvbm_disk_tier.shell.service.LOCK_DEADLINE_S", 0.1)
    monkeypatch.setattr("kvbm_disk_tier.shell.file_medium.RECOVER_S", 0.1)
    try:
        async with living(settings):
            reason = await reason_of(bus)
            assert f"{tmp_path}/kvbm-h-0 does not answer" in reason
            answers.set()
            await host.wait_announced(1, 2, 3)
            await wait_stats(bus, "ready", True)
            await until(lambda: can_fill(host))
            assert (await counted(bus, "kvbm_store_failures_total")) == {"": 1}
    finally:
        answers.set()


# --- the journal's space ------------------------------------------------------------------------


def store_on(directory: Path, **changes: Any) -> Store:
    """A store of eight slots, of which the page cache knows."""
    values: dict[str, Any] = {"capacity_bytes": 0, "slot_count": 64, "direct": False}
    return Store(StoreOptions(directory=directory / "store", **values | changes))


def fill_up(directory: Path) -> int:
    """Take every byte that is left."""
    took = 0
    with (directory / "others").open("wb", buffering=0) as file:
        for size in (4096, 512, 1):
            with contextlib.suppress(OSError):
                while True:
                    took += file.write(b"x" * size)
    return took


def test_the_journal_has_its_space_when_the_disk_is_full(tmp_path: Path) -> None:
    """1. Another program takes what is left. 2. As many records fit as the core lets come, and a
    rewrite, and as many again."""
    with small_disk(tmp_path / "disk", "4m") as directory:
        store = store_on(directory)
        store.create(SLOT_BYTES)
        assert fill_up(directory) > 0
        order = 0
        for _ in range(2):
            for slot in range(4 * 64):
                order += 1
                store.append((committed(order, slot % 64, order),), commit=True)
            order += 1
            store.rewrite(tuple(committed(order, slot, order - slot) for slot in range(64)))
        store.close()
        again = store_on(directory)
        found = again.recover()
        assert found is not None
        assert len(found.blocks) == 64
        again.close()


def test_a_rewrite_that_finds_no_room_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal stays in use, and the spare is only space, also after a restart."""
    store = store_on(tmp_path)
    store.create(SLOT_BYTES)
    store.append((committed(1, 0, 1), committed(2, 1, 2)), commit=True)
    (tmp_path / "store/journal.new").write_bytes(b"of an older release")
    broken = Broken(monkeypatch, "pwrite", errno.ENOSPC)
    broken.on = True
    with pytest.raises(OSError, match="No space"):
        store.rewrite((committed(3, 1, 2),))
    broken.on = False
    assert (tmp_path / "store/spare").stat().st_size == 0
    assert not (tmp_path / "store/journal.new").exists()
    store.append((committed(4, 2, 3),), commit=True)
    store.close()
    again = store_on(tmp_path)
    found = again.recover()
    assert found is not None
    assert slots(found) == {0: 1, 1: 2, 2: 3}
    again.rewrite((committed(5, 2, 3),))
    assert (tmp_path / "store/journal").stat().st_size == RECORD_BYTES
    again.close()


def test_what_is_appended_between_the_parts_of_a_rewrite_is_in_both_journals(
    tmp_path: Path,
) -> None:
    """1. A part is written, and a block comes. 2. A crash finds the long journal. 3. Once more, to
    the end: the short one has both, and the spare is only space."""
    store = store_on(tmp_path)
    store.create(SLOT_BYTES)
    store.append((committed(1, 0, 1), removed(2, 0, 1), committed(3, 0, 2)), commit=True)
    store.rewrite((committed(3, 0, 2),), is_last=False)
    store.append((committed(4, 1, 3),), commit=True)
    store.close()
    again = store_on(tmp_path)
    found = again.recover()
    assert found is not None
    assert (slots(found), found.records) == ({0: 2, 1: 3}, 4)
    again.rewrite((committed(3, 0, 2),), is_last=False)
    again.append((committed(5, 2, 4),), commit=True)
    again.rewrite((committed(4, 1, 3),), is_first=False)
    again.append((committed(6, 3, 5),), commit=True)
    again.close()
    last = store_on(tmp_path)
    found = last.recover()
    assert found is not None
    assert (slots(found), found.records) == ({0: 2, 1: 3, 2: 4, 3: 5}, 4)
    last.close()
    assert (tmp_path / "store/spare").stat().st_size == 0


def test_an_append_that_finds_no_room_in_the_journal_to_come_ends_the_rewrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block is in the journal all the same; the next part says why, and a rewrite may begin."""
    store = store_on(tmp_path)
    store.create(SLOT_BYTES)
    store.rewrite((), is_last=False)
    spare = (tmp_path / "store/spare").stat().st_ino

    def full(fd: int, data: bytes, offset: int) -> int:
        if os.fstat(fd).st_ino == spare:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_at(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr("kvbm_disk_tier.shell.journal_file.write_at", full)
        store.append((committed(1, 0, 1),), commit=True)
    with pytest.raises(OSError, match="No space"):
        store.rewrite((committed(1, 0, 1),), is_first=False)
    store.rewrite((committed(1, 0, 1),))
    store.append((committed(2, 1, 2),), commit=True)
    store.close()
    again = store_on(tmp_path)
    found = again.recover()
    assert found is not None
    assert (slots(found), found.records) == ({0: 1, 1: 2}, 2)
    again.close()


def test_a_rename_that_fails_after_it_was_done_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS may answer so: what is appended later must not go to the file that is gone."""
    store = store_on(tmp_path)
    store.create(SLOT_BYTES)
    store.append((committed(1, 0, 1),), commit=True)
    replace = os.replace

    def done_and_failed(source: Path, target: Path) -> None:
        replace(source, target)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", done_and_failed)
        store.rewrite((committed(2, 0, 1),))
    store.append((committed(3, 1, 2),), commit=True)
    store.close()
    again = store_on(tmp_path)
    found = again.recover()
    assert found is not None
    assert slots(found) == {0: 1, 1: 2}
    again.close()


def test_a_file_that_takes_no_bytes_is_an_error_not_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_on(tmp_path)
    store.create(SLOT_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", lambda *_: 0)
        with pytest.raises(OSError, match="takes no bytes"):
            store.append((committed(1, 0, 1),), commit=True)
    store.close()
