"""The store: a locked directory with one preallocated file of slots, and its journal.

    <DYN_KVBM_DISK_CACHE_DIR>/kvbm-<host>-<instance>/
        header     what the file is: format, first size and number of slots, cipher, host (JSON)
        slots      slabs of slab_slots · stride bytes; the stride is slot_bytes, or 4 KiB more in a
                   sealed store. In a slab, slots of one size follow each other
        journal    records of kvbm_disk_tier.core.journal; `spare` beside it: see `journal_file`

The one process that uses the store holds a flock on the directory, which is its user's own and
closed to other writers. Only this module touches these files, NIXL's reads and writes of `slots`
excepted. `Store` blocks; `store_thread` runs it in a thread of its own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
from kvbm_common.runtime.mounts import missing_mount, note_mount
from kvbm_common.tier.block_columns import BlockColumns
from kvbm_common.tier.layout import UNIT_BYTES

from kvbm_disk_tier.core.journal import Operation, Record, Replay, records_of
from kvbm_disk_tier.core.resizing import resized
from kvbm_disk_tier.shell.allocation import cut_off, move_slots, preallocate, probe_read
from kvbm_disk_tier.shell.journal_file import JournalFile, close
from kvbm_disk_tier.shell.own_files import lock_directory, open_own, read_own
from kvbm_disk_tier.shell.store_header import (
    FORMAT,
    FORMAT_OF_ONE_SIZE,
    HEADER,
    Header,
    write_header,
)
from kvbm_disk_tier.shell.store_options import StoreBusy, StoreError, StoreOptions

SEALED_CURE = "set KVBM_DISK_KEYS or KVBM_DISK_KEYS_FILE, or delete the directory"
MOVED_BYTES_MAX = 16 * 1024**3
"""Bytes moved when a store is made smaller: some ten seconds, in which it serves nothing."""
LEFT = ": `kvbm resize` before a start with a smaller size lets the policy choose"

log = logging.getLogger(__name__)


class Store:
    """The open store. Not thread-safe: one thread at a time."""

    def __init__(self, options: StoreOptions) -> None:
        """Prepare a store without touching it: `recover` and `create` take the lock."""
        self.options = options
        self.header: Header | None = None
        self.fd = -1
        self.locks: tuple[int, ...] = ()
        """Open files that hold the lock; empty: it is not ours."""
        self._journal = JournalFile(options.directory, zerofill_fallback=options.zerofill_fallback)
        self.outdated = False
        """A store of another format was found here: `create` puts an empty one in its place."""
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="sync")

    def acquire(self) -> None:
        """Take the lock; raises StoreBusy when another process has it, or StoreError."""
        if self.locks:
            return
        directory = self.options.directory
        unusable = f"DYN_KVBM_DISK_CACHE_DIR {directory.parent} cannot be used"
        if missing := missing_mount(directory, self.options.state_dir):
            raise StoreError(f"{missing.found}: {missing.advice}")
        try:
            self.locks = lock_directory(directory)
        except BlockingIOError as error:
            raise StoreBusy(
                f"{directory} is used by another disk tier: give this one another "
                "KVBM_INSTANCE or another DYN_KVBM_DISK_CACHE_DIR"
            ) from error
        except OSError as error:
            raise StoreError(f"{unusable}: {error}") from error
        note_mount(directory, self.options.state_dir)

    def _path(self, name: str) -> Path:
        return self.options.directory / name

    def close(self) -> None:
        """Synchronise and let go."""
        self._close_files()
        self._beside.shutdown()
        for fd in self.locks:
            close(fd, self.options.directory)
        self.locks = ()

    def _close_files(self) -> None:
        if self.fd >= 0:
            close(self.fd, self.options.directory, synchronise=True)
        self.fd, self.header = -1, None
        self._journal.close()

    # --- opening ----------------------------------------------------------------------------

    def recover(self) -> Replay | None:
        """Open what a former life has left; None: there is nothing that can be used.

        What is not used is left alone until `create` puts an empty store in its place. Raises
        StoreError where the files cannot be read now: they may be in order.
        """
        self.acquire()
        self._close_files()
        try:
            header = msgspec.json.decode(read_own(self._path(HEADER)), type=Header)
            self.outdated = header.format not in (FORMAT, FORMAT_OF_ONE_SIZE)
            refusal = self._refusal(header)
            if refusal:
                log.warning("the store in %s is not used: %s", self.options.directory, refusal)
                return None
            found, journal_bytes = self._journal.replay(header.layout)
        except FileNotFoundError:
            return None
        except OSError as error:
            unread = f"the store in {self.options.directory} cannot be read: {error}"
            raise StoreError(unread) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("the store in %s is not used: %s", self.options.directory, error)
            return None
        if header.format != FORMAT or header.host != self.options.host:
            header = self._renew(header)
        wanted = self.options.slots_of(header.slot_bytes)
        if wanted > header.slot_count:
            header = self._grow(header, wanted)
        with contextlib.suppress(OSError):  # What a shrinking that did not end has left.
            cut_off(self._path("slots"), header.layout.total_bytes)
        self._open_files(header, journal_bytes=journal_bytes)
        if wanted < header.slot_count:
            found = self._shrink(header, wanted, found)
        return self._journal.renumbered(found)

    def _renew(self, header: Header) -> Header:
        """Make a store of one size one of several, and name its host: its blocks stay in place."""
        new = msgspec.structs.replace(header, host=self.options.host)
        if header.format != FORMAT:
            new = Header.of(header.slot_bytes, header.slot_count, header.cipher, new.host)
        try:
            write_header(self.options.directory, new)
        except OSError as error:  # The next life tries again.
            where = self.options.directory
            log.warning("the store in %s keeps its header: %s", where, error)
        return new

    def _grow(self, header: Header, wanted: int) -> Header:
        """Add slots after those that are there, or leave the store as it is: it can be used."""
        new, size = header.resized(wanted), header.layout.total_bytes
        beside = 2 * (self.options.journal_bytes(new) - self.options.journal_bytes(header))
        try:
            self._preallocate(new.layout.total_bytes, beside, kept=size)
            write_header(self.options.directory, new)
        except (StoreError, OSError) as error:
            where = self.options.directory
            log.warning("the store in %s keeps %d slots: %s", where, header.slot_count, error)
            return header
        log.info("the store in %s has %d slots, %d before", *self._sizes(new, header))
        return new

    def _shrink(self, header: Header, wanted: int, found: Replay) -> Replay:
        """Cut off the last slots, and move their most recent blocks into those of older ones.

        The journal says what is free before it is written over. It says what stays before the
        header has the new size, before the file has: the next life makes an end in between good.
        """
        new, blocks = header.resized(wanted), BlockColumns.of(found.blocks)
        plan = resized(blocks, new.layout, moved_units_max=MOVED_BYTES_MAX // UNIT_BYTES)
        order = found.next_order + len(plan.replaced)
        try:
            self._journal.append_now(records_of(Operation.REMOVED, plan.replaced, found.next_order))
            unread = move_slots(self._path("slots"), plan.moves)
            kept, moves, _ = plan.without(unread)
            records = records_of(Operation.COMMITTED, kept, order)
            self.rewrite(records)
            write_header(self.options.directory, new)
            cut_off(self._path("slots"), new.layout.total_bytes)
        except OSError as error:
            self._close_files()
            raise StoreError(f"no smaller store in {self.options.directory}: {error}") from error
        self.header = new
        log.info("the store in %s has %d slots, %d before", *self._sizes(new, header))
        left = len(blocks) - len(kept) - len(unread)
        log.log(
            logging.WARNING if left else logging.INFO,
            "%d blocks stay, %d of them were moved, %d could not be read, and %d left%s",
            len(kept), len(moves), len(unread), left, LEFT if left else "",
        )  # fmt: skip
        moved_bytes, count = sum(move.units for move in moves) * UNIT_BYTES, len(records)
        return Replay(kept, order + count, count, found.damaged, moved_bytes)

    def _sizes(self, new: Header, old: Header) -> tuple[Path, int, int]:
        return self.options.directory, new.slot_count, old.slot_count

    def _refusal(self, header: Header) -> str:
        """Return why an empty store takes this one's place; empty: it can be used.

        Raises StoreError for a sealed one without keys.
        """
        if self.outdated:
            return (
                f"it has format {header.format}, and this release has format {FORMAT}; an empty "
                "store takes its place as soon as an engine is attached"
            )
        if header.damage:
            return f"its header has {header.damage}"
        if header.cipher and not self.options.cipher:
            where = self.options.directory
            raise StoreError(f"the store in {where} is sealed, and no keys are set: {SEALED_CURE}")
        if header.cipher != self.options.cipher:
            return f"its cipher is {header.cipher or 'absent'}, not {self.options.cipher}"
        try:
            wanted = self.options.slots_of(header.slot_bytes)
        except StoreError as error:
            return str(error)
        if self._path("slots").stat().st_size < header.layout.total_bytes:
            return "its file of slots is too short"
        if wanted > header.slot_count and not header.may_grow(wanted):
            return f"its slabs are too short for {wanted} slots"
        return ""

    def create(self, slot_bytes: int) -> Replay:
        """Make an empty store that is cut for slots of this size, in place of whatever was there.

        Raises StoreError, with the free space where the disk is too small.
        """
        self.acquire()
        self._close_files()
        slots = self.options.slots_of(slot_bytes)
        header = Header.of(slot_bytes, slots, self.options.cipher, self.options.host)
        try:
            self._path(HEADER).unlink(missing_ok=True)
            self._journal.remove()
            self._preallocate(header.layout.total_bytes, 2 * self.options.journal_bytes(header))
            self._open_files(header, journal_bytes=0)
            write_header(self.options.directory, header)
            self.outdated = False
        except OSError as error:
            self._close_files()
            raise StoreError(f"no store in {self.options.directory}: {error}") from error
        return Replay(blocks={}, next_order=1, records=0, damaged=0)

    def _preallocate(self, size: int, beside: int, *, kept: int = 0) -> None:
        """Take the space of the slots, if there are so many bytes beside them as well.

        The first `kept` bytes stay as they are.
        """
        free = shutil.disk_usage(self.options.directory).free
        fd = open_own(self._path("slots"), os.O_RDWR | os.O_CREAT)
        try:
            free += os.fstat(fd).st_blocks * 512
            zerofill = self.options.zerofill_fallback
            preallocate(fd, size, kept=kept, room=free - beside, zerofill=zerofill)
        except OSError as error:
            raise StoreError(
                f"no room for {size} bytes and {beside} of journal in {self.options.directory} "
                f"({free} free): lower DYN_KVBM_DISK_CACHE_GB or make room ({error.strerror})"
            ) from error
        finally:
            os.close(fd)

    def _open_files(self, header: Header, *, journal_bytes: int) -> None:
        flags = os.O_RDWR | (os.O_DIRECT if self.options.direct else 0)
        try:
            self.fd = open_own(self._path("slots"), flags)
            self._journal.open(journal_bytes, self.options.journal_bytes(header))
        except OSError as error:
            self._close_files()
            what = f"the store in {self.options.directory} cannot be opened ({error})"
            if self.options.direct and error.errno == errno.EINVAL:  # From open(2) itself.
                what = (
                    f"{self._path('slots')} cannot be opened with O_DIRECT: set "
                    f"DYN_KVBM_DISK_DISABLE_O_DIRECT=true ({error})"
                )
            raise StoreError(what) from error
        self.header = header

    # --- the journal ------------------------------------------------------------------------

    def append(self, records: tuple[Record, ...], *, commit: bool) -> None:
        """Write records; with `commit`, they and the data are as durable as was asked for."""
        self._journal.append(records)
        if commit and self.options.sync == "commit":
            self._synchronise()

    def synchronise(self) -> None:
        """Synchronise an open store; called every second where `sync` is interval."""
        if self.fd >= 0:
            self._synchronise()

    def _synchronise(self) -> None:
        """Synchronise both files at the same time: the disk flushes once for both.

        A power cut may keep a record and lose its block, which fails its checksum when it is read;
        it was never announced.
        """
        data = self._beside.submit(os.fdatasync, self.fd)
        try:
            self._journal.synchronise()
        finally:
            wait([data])
        data.result()

    def rewrite(
        self, records: tuple[Record, ...], *, is_first: bool = True, is_last: bool = True
    ) -> None:
        """Write a part of a journal that takes the place of the old one with the last part; raises
        OSError, and the old one stays."""
        if is_first:
            self._journal.begin_rewrite()
        self._journal.rewrite(records)
        if is_last:
            self._journal.end_rewrite()

    def probe(self) -> tuple[str, str]:
        """Try to read and to write a little; returns what failed of either, or nothing."""
        failures = ["", ""]
        for number, attempt in enumerate((lambda: probe_read(self.fd), self._journal.probe)):
            try:
                attempt()
            except OSError as error:
                failures[number] = str(error)
        return failures[0], failures[1]
