"""The disk medium: a directory with its file of slots and its journal, and NIXL POSIX."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from typing import Any

from kvbm_common.nixl.transfers import TransferError
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.core.effects import AppendJournal, Effect, ReadSlots, RewriteJournal, WriteSlots
from kvbm_disk_tier.core.journal import Replay
from kvbm_disk_tier.core.messages import (
    Journaled,
    JournalFailed,
    ReadDone,
    ReadFailed,
    ReadLanded,
    StoreFailed,
    StoreOpened,
    WriteFailed,
    Written,
)
from kvbm_disk_tier.shell.mover import DiskMover
from kvbm_disk_tier.shell.queue_depth import Tuning
from kvbm_disk_tier.shell.store import Store, StoreError
from kvbm_disk_tier.shell.store_thread import StoreThread

SYNCHRONISE_S = 1.0
"""`KVBM_DISK_SYNC` = interval."""

log = logging.getLogger(__name__)


class FileMedium:
    """An open store and its mover; it closes both."""

    def __init__(self, store: Store, mover: DiskMover, tuning: Tuning | None = None) -> None:
        self.where = str(store.options.directory)
        self._store = store
        self._mover = mover
        self._tuning = tuning or Tuning()
        self._thread = StoreThread(store)
        self._log = OncePerKind(log)

    def close(self) -> None:
        """Finish what the store's thread was asked for, and let go."""
        self._thread.close()
        self._mover.close()
        self._store.close()

    async def recover(self) -> StoreOpened | StoreFailed | None:
        """Recover what the journal of an earlier process records."""
        try:
            return await asyncio.wrap_future(self._thread.call(self._recover))
        except StoreError as error:
            self._log.warning(error.code, str(error))
            return StoreFailed(str(error))

    def _recover(self) -> StoreOpened | None:
        found = self._store.recover()
        return None if found is None else self._opened(found)

    def _opened(self, found: Replay) -> StoreOpened:
        header = self._store.header
        assert header is not None
        self._mover.use_file(self._store.fd, header.slot_count, header.stride)
        depth = self._mover.depth(self._tuning, header.slot_count, header.stride, found.blocks)
        return StoreOpened(header.slot_count, header.slot_bytes, found, depth)

    async def open(self, slot_bytes: int) -> StoreOpened | StoreFailed:
        """Create an empty store in place of the one that was there, if any."""

        def create() -> StoreOpened:
            self._mover.drop_file()
            outdated = self._store.outdated
            opened = self._opened(self._store.create(slot_bytes))
            return dataclasses.replace(opened, replaced_format=outdated)

        try:
            opened = await asyncio.wrap_future(self._thread.call(create))
        except (StoreError, TransferError) as error:
            self._log.warning(error.code, str(error))
            return StoreFailed(str(error))
        log.info("a new store of %d-byte slots in %s", slot_bytes, self.where)
        return opened

    def use_arena(self, arena: ArenaReply) -> None:
        """Map it; raises KvbmError or OSError."""
        self._mover.use_arena(arena.path, arena.epoch, arena.instance)

    def drop_arena(self, instance: str) -> None:
        """Unmap it, when nothing flies."""
        self._mover.drop_arena(instance)

    async def write(self, effect: WriteSlots) -> Written | WriteFailed:
        """Write blocks from arena to file."""
        return await self._mover.write(effect)

    async def read(self, effect: ReadSlots) -> ReadDone | ReadFailed:
        """Read blocks from file to arena."""
        return await self._mover.read(effect)

    async def append(self, effect: AppendJournal) -> Journaled | JournalFailed | None:
        """Append records to the journal."""
        appended = self._thread.append(effect.records, write=effect.write)
        try:
            writes = await asyncio.wrap_future(appended)
        except OSError as error:
            self._log.warning("journal", f"the journal cannot be written: {error}")
            return None if effect.write is None else JournalFailed(effect.write, "journal")
        return Journaled(writes) if writes else None

    async def rewrite(self, effect: RewriteJournal) -> None:
        """Replace the journal by a shorter one."""
        rewrite = functools.partial(self._store.rewrite, effect.records)
        try:
            await asyncio.wrap_future(self._thread.call(rewrite))
        except OSError as error:
            self._log.warning("journal", f"the journal cannot be rewritten: {error}")

    async def run(self, loop: CoreLoop[Any, Effect]) -> None:
        """Say what has landed; synchronise every second, if that was asked for."""
        self._mover.on_landed = lambda read: loop.complete(ReadLanded(read))
        while self._store.options.sync == "interval":
            await asyncio.sleep(SYNCHRONISE_S)
            await asyncio.wrap_future(self._thread.call(self._store.synchronise))
