"""The disk medium: a directory with its file of slots and its journal, and NIXL POSIX."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from kvbm_common.nixl.transfers import TransferError
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.core.effects import (
    AppendJournal,
    Effect,
    ProbeStore,
    ReadSlots,
    RewriteJournal,
    WriteSlots,
)
from kvbm_disk_tier.core.journal import Replay
from kvbm_disk_tier.core.messages import (
    Journaled,
    JournalFailed,
    JournalPartWritten,
    JournalRewritten,
    ReadDone,
    ReadFailed,
    ReadLanded,
    StoreAbsent,
    StoreFailed,
    StoreOpened,
    StoreProbed,
    Synchronised,
    WriteFailed,
    Written,
)
from kvbm_disk_tier.shell.mover import DiskMover
from kvbm_disk_tier.shell.queue_depth import Tuning
from kvbm_disk_tier.shell.store_options import StoreError
from kvbm_disk_tier.shell.store_thread import StoreThread

SYNCHRONISE_S = 1.0
"""`KVBM_DISK_SYNC` = interval."""
RECOVER_S = 20.0
"""The seconds that a start waits for the recovery: other tiers work while a disk hangs."""

log = logging.getLogger(__name__)


class FileMedium:
    """An open store and its mover; it closes both."""

    def __init__(self, thread: StoreThread, mover: DiskMover, tuning: Tuning | None = None) -> None:
        self.where = str(thread.store.options.directory)
        self._store = thread.store
        self._mover = mover
        self._tuning = tuning or Tuning()
        self._thread = thread
        self._log = OncePerKind(log)
        self._has_looked = False
        """True: the store of an earlier process was opened, or is of no use."""
        self._late: asyncio.Task[StoreOpened | StoreAbsent | StoreFailed] | None = None
        """The recovery that was not waited for."""
        self._place: os.stat_result | None = None
        """The directory with the open files; None: there are none."""

    def close(self) -> None:
        """Finish what the store's thread was asked for, and let go."""
        self._thread.close()
        self._mover.close()
        self._store.close()

    async def recover(self) -> StoreOpened | StoreFailed | None:
        """Recover what the journal of an earlier process records; `open` waits for a late one."""
        recovery = asyncio.create_task(self._in_thread(self._recover))
        await asyncio.wait({recovery}, timeout=RECOVER_S)
        if not recovery.done():
            self._late = recovery
            return StoreFailed(f"{self.where} does not answer: not opened within {RECOVER_S:g} s")
        found = recovery.result()
        return None if isinstance(found, StoreAbsent) else found

    async def _in_thread(
        self, function: Callable[[], StoreOpened | StoreAbsent]
    ) -> StoreOpened | StoreAbsent | StoreFailed:
        try:
            return await asyncio.wrap_future(self._thread.call(function))
        except (StoreError, TransferError, OSError) as error:
            self._log.warning(getattr(error, "code", "store"), str(error))
            return StoreFailed(str(error))

    def _recover(self) -> StoreOpened | StoreAbsent:
        self._drop_file()
        found = self._store.recover()
        opened = StoreAbsent() if found is None else self._opened(found)
        self._has_looked = True
        return opened

    def _drop_file(self) -> None:
        self._place = None
        self._mover.drop_file()

    def _opened(self, found: Replay) -> StoreOpened:
        header = self._store.header
        assert header is not None
        layout = header.layout
        self._place = os.stat(self._store.options.directory)
        self._mover.use_file(self._store.fd, layout)
        depth = self._mover.depth(self._tuning, layout, found.blocks)
        return StoreOpened(layout, found, depth)

    async def open(self, slot_bytes: int) -> StoreOpened | StoreAbsent | StoreFailed:
        """Create an empty store in place of the one that was there, if any.

        What could not be recovered until now is recovered instead, if it can be.
        """
        if self._late is not None:
            late = await self._late
            self._late = None
            if not isinstance(late, StoreAbsent):
                return late

        def create() -> StoreOpened | StoreAbsent:
            found = StoreAbsent() if self._has_looked else self._recover()
            if isinstance(found, StoreOpened) or not slot_bytes:
                return found
            self._drop_file()
            outdated = self._store.outdated
            opened = self._opened(self._store.create(slot_bytes))
            return dataclasses.replace(opened, replaced_format=outdated)

        opened = await self._in_thread(create)
        if isinstance(opened, StoreOpened):
            slot_bytes = opened.layout.slot_bytes
            log.info("a store that is cut for slots of %d bytes in %s", slot_bytes, self.where)
        return opened

    async def probe(self, _effect: ProbeStore) -> StoreProbed:
        """Try to read and to write a little; what was removed can be read at most."""
        read_failure, failure = await asyncio.wrap_future(self._thread.call(self._store.probe))
        lost = await asyncio.wrap_future(self._thread.call(self._lost))
        return StoreProbed(read_failure, failure or lost)

    def use_arena(self, arena: ArenaReply) -> None:
        """Map it; raises KvbmError or OSError."""
        self._mover.use_arena(arena.path, arena.epoch, arena.instance)

    def drop_arena(self, instance: str) -> None:
        """Unmap it, when nothing is in flight."""
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
            return JournalFailed(effect.write, "journal", str(error))
        return Journaled(writes) if writes else None

    async def rewrite(self, effect: RewriteJournal) -> JournalPartWritten | JournalRewritten:
        """Write a part of a shorter journal."""
        rewrite = functools.partial(
            self._store.rewrite, effect.records, is_first=effect.is_first, is_last=effect.is_last
        )
        try:
            await asyncio.wrap_future(self._thread.call(rewrite))
        except OSError as error:
            self._log.warning("rewrite", f"the journal cannot be rewritten: {error}")
            return JournalRewritten(str(error))
        return JournalRewritten() if effect.is_last else JournalPartWritten()

    async def run(self, loop: CoreLoop[Any, Effect]) -> None:
        """Say what has landed; look each second whether the store is still in its place.

        Synchronise then, too, if that was asked for.
        """
        self._mover.on_landed = lambda read: loop.complete(ReadLanded(read))
        failing = False
        while True:
            await asyncio.sleep(SYNCHRONISE_S)
            failure = await asyncio.wrap_future(self._thread.call(self._lost))
            if not failure and self._store.options.sync == "interval":
                failure = await self.synchronise()
            if failing or failure:
                loop.complete(Synchronised(failure))
            failing = bool(failure)

    def _lost(self) -> str:
        """Return why the files are no longer where they were opened; empty: they are there."""
        if self._place is None:
            return ""
        try:
            if os.path.samestat(os.stat(self._store.options.directory), self._place):
                is_linked = os.fstat(self._store.fd).st_nlink > 0
                return "" if is_linked else f"the file of slots in {self.where} was removed"
            return f"another directory is in the place of {self.where}"
        except OSError as error:
            return f"{self.where} was removed: {error.strerror}"

    async def synchronise(self) -> str:
        """Synchronise the files; returns what went wrong, if something did."""
        try:
            await asyncio.wrap_future(self._thread.call(self._store.synchronise))
        except OSError as error:
            self._log.warning("sync", f"{self.where} cannot be synchronised: {error}")
            return str(error)
        return ""
