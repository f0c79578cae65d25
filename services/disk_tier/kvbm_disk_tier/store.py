"""The store: a directory with one preallocated file of slots, its journal, and a lock.

    <DYN_KVBM_DISK_CACHE_DIR>/kvbm-<host>-<instance>/
        lock       held with flock by the one process that uses the store
        header     what the file is: format, slot size and count (JSON)
        slots      slot i is at [i · slot_bytes, (i + 1) · slot_bytes)
        journal    records of kvbm_disk_tier.journal

Only this module touches these files, NIXL's reads and writes of `slots` excepted. Everything here
may block: the shell calls it in a thread of its own.
"""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from kvbm_common.errors import KvbmError

from kvbm_disk_tier.journal import RECORD_BYTES, Record, Replay, encode_records, replay

FORMAT = 1
ZEROFILL_BYTES = 16 * 1024 * 1024


class StoreError(KvbmError):
    """The store cannot be opened, made or written. The text says what to change."""

    code = "store"


class Header(msgspec.Struct, frozen=True):
    """What is in `header`."""

    format: int
    slot_bytes: Annotated[int, msgspec.Meta(ge=1)]
    slot_count: Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How the files are made, from the configuration."""

    directory: Path
    capacity_bytes: int
    slot_count_max: int | None = None
    direct: bool = True
    zerofill_fallback: bool = False
    sync: str = "commit"
    """`commit`: data and journal are synchronised before a block is announced."""


class Store:
    """The open store. Not thread-safe: one thread at a time."""

    def __init__(self, options: StoreOptions) -> None:
        """Take the lock; raises StoreError when another process has it."""
        self.options = options
        self.header: Header | None = None
        self.fd = -1
        self._journal_fd = -1
        try:
            options.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(
                self._path("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise StoreError(
                f"DYN_KVBM_DISK_CACHE_DIR {options.directory.parent} cannot be used: {error}"
            ) from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_fd)
            raise StoreError(
                f"{options.directory} is used by another disk tier: give this one another "
                "KVBM_INSTANCE or another DYN_KVBM_DISK_CACHE_DIR"
            ) from error

    def _path(self, name: str) -> Path:
        return self.options.directory / name

    def close(self) -> None:
        """Synchronise and let go."""
        self._close_files()
        os.close(self._lock_fd)

    def _close_files(self) -> None:
        for fd in (self.fd, self._journal_fd):
            if fd >= 0:
                os.fdatasync(fd)
                os.close(fd)
        self.fd = self._journal_fd = -1

    # --- opening ----------------------------------------------------------------------------

    def recover(self) -> Replay | None:
        """Open what a former life has left; None: there is nothing that can be used."""
        try:
            header = msgspec.json.decode(self._path("header").read_bytes(), type=Header)
            size = self._path("slots").stat().st_size
            data = self._path("journal").read_bytes()
            fits = header.slot_count == self._slot_count(header.slot_bytes)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, StoreError):
            return None
        if header.format != FORMAT or not fits or size < header.slot_bytes * header.slot_count:
            return None
        found = replay(data, slot_count=header.slot_count, slot_bytes=header.slot_bytes)
        self._open_files(header)
        self._truncate_journal(len(data))
        return found

    def create(self, slot_bytes: int) -> Replay:
        """Make an empty store of slots of this size, in place of whatever was there.

        Raises StoreError, with the free space where the disk is too small.
        """
        self._close_files()
        slot_count = self._slot_count(slot_bytes)
        header = Header(FORMAT, slot_bytes, slot_count)
        for name in ("header", "journal"):
            self._path(name).unlink(missing_ok=True)
        self._preallocate(slot_count * slot_bytes)
        self._path("journal").touch(mode=0o600)
        self._path("header").write_bytes(msgspec.json.encode(header))
        self._open_files(header)
        return Replay(blocks={}, next_order=1, records=0, damaged=0)

    def _slot_count(self, slot_bytes: int) -> int:
        count = self.options.capacity_bytes // slot_bytes
        if self.options.slot_count_max is not None:
            count = min(count, self.options.slot_count_max)
        if count < 1:
            raise StoreError(
                f"DYN_KVBM_DISK_CACHE_GB is {self.options.capacity_bytes / 1e9:g}: "
                f"not one block of {slot_bytes} bytes fits"
            )
        return count

    def _preallocate(self, size: int) -> None:
        path = self._path("slots")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, 0)
            self._allocate(fd, size)
        except OSError as error:
            os.ftruncate(fd, 0)
            free = os.statvfs(self.options.directory)
            raise StoreError(
                f"no room for {size} bytes in {self.options.directory} "
                f"({free.f_bavail * free.f_frsize} free): lower DYN_KVBM_DISK_CACHE_GB ({error})"
            ) from error
        finally:
            os.close(fd)

    def _allocate(self, fd: int, size: int) -> None:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            self._fill(fd, size)

    def _fill(self, fd: int, size: int) -> None:
        """The file system cannot preallocate: write zeros, or leave the file sparse."""
        if not self.options.zerofill_fallback:
            os.ftruncate(fd, size)
            return
        zeros = bytes(ZEROFILL_BYTES)
        for offset in range(0, size, ZEROFILL_BYTES):
            _write_all(fd, zeros[: size - offset])

    def _open_files(self, header: Header) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC
        if self.options.direct:
            flags |= os.O_DIRECT
        try:
            self.fd = os.open(self._path("slots"), flags)
        except OSError as error:
            raise StoreError(
                f"{self._path('slots')} cannot be opened with O_DIRECT: set "
                f"DYN_KVBM_DISK_DISABLE_O_DIRECT=true ({error})"
            ) from error
        journal_flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._journal_fd = os.open(self._path("journal"), journal_flags, 0o600)
        self.header = header

    # --- the journal ------------------------------------------------------------------------

    def append(self, records: tuple[Record, ...], *, commit: bool) -> None:
        """Write records; with `commit`, they and the data are as durable as was asked for."""
        if commit and self.options.sync == "commit":
            os.fdatasync(self.fd)
        size = os.fstat(self._journal_fd).st_size
        try:
            _write_all(self._journal_fd, encode_records(records))
        except OSError:
            self._truncate_journal(size)
            raise
        if commit and self.options.sync == "commit":
            os.fdatasync(self._journal_fd)

    def _truncate_journal(self, size: int) -> None:
        """Cut a torn record off: what is appended behind it would be out of step for ever."""
        os.ftruncate(self._journal_fd, size - size % RECORD_BYTES)

    def synchronise(self) -> None:
        """`sync` = interval: called every second."""
        if self.fd >= 0:
            os.fdatasync(self.fd)
            os.fdatasync(self._journal_fd)

    def rewrite(self, records: tuple[Record, ...]) -> None:
        """Put a journal of these records in place of the old one, at once or not at all."""
        path = self._path("journal.new")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, encode_records(records))
            os.fdatasync(fd)
            os.replace(path, self._path("journal"))
        except OSError:
            os.close(fd)
            raise
        os.close(self._journal_fd)
        self._journal_fd = fd


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
