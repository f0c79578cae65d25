"""The store: a directory with one preallocated file of slots, its journal, and a lock.

    <DYN_KVBM_DISK_CACHE_DIR>/kvbm-<host>-<instance>/
        lock       held with flock by the one process that uses the store
        header     what the file is: format, slot size and count, cipher (JSON)
        slots      slot i is at [i · stride, (i + 1) · stride); the stride is slot_bytes, or 4 KiB
                   more in a sealed store
        journal    records of kvbm_disk_tier.core.journal

Only this module touches these files, NIXL's reads and writes of `slots` excepted. `Store` blocks;
`store_thread` runs it in a thread of its own.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from kvbm_common.errors import KvbmError

from kvbm_disk_tier.core.journal import RECORD_BYTES, Record, Replay, encode_records, replay

FORMAT = 2
"""2 since a record says how many parts a block has. A store of another format is replaced."""
CIPHER = "aes-256-gcm"
EXTRA_BYTES = 4096
"""The cipher of sealed stores, and how many bytes longer their slots are; see `cipher.py`."""
ZEROFILL_BYTES = 16 * 1024 * 1024

log = logging.getLogger(__name__)


class StoreError(KvbmError):
    """The store cannot be opened, made or written. The text says what to change."""

    code = "store"


class StoreBusy(StoreError):
    """Another process has the store."""

    code = "store_busy"


class Header(msgspec.Struct, frozen=True):
    """What is in `header`."""

    format: int
    slot_bytes: Annotated[int, msgspec.Meta(ge=1)]
    slot_count: Annotated[int, msgspec.Meta(ge=1)]
    cipher: str = ""
    """How blocks are sealed; empty: they are not."""

    @property
    def stride(self) -> int:
        """Bytes from slot to slot in the file."""
        return stride_of(self.slot_bytes, self.cipher)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How the files are made, from the configuration."""

    directory: Path
    capacity_bytes: int
    slot_count: int | None = None
    """Wins over the capacity."""
    direct: bool = True
    zerofill_fallback: bool = False
    cipher: str = ""
    """As in the header."""
    sync: str = "commit"
    """`commit`: data and journal are synchronised before a block is announced."""


class Store:
    """The open store. Not thread-safe: one thread at a time."""

    def __init__(self, options: StoreOptions) -> None:
        """Take the lock; raises StoreBusy when another process has it, or StoreError."""
        self.options = options
        self.header: Header | None = None
        self.fd = -1
        self._journal_fd = -1
        self.outdated = False
        """A store of another format was found here: `create` puts an empty one in its place."""
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="sync")
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
            raise StoreBusy(
                f"{options.directory} is used by another disk tier: give this one another "
                "KVBM_INSTANCE or another DYN_KVBM_DISK_CACHE_DIR"
            ) from error

    def _path(self, name: str) -> Path:
        return self.options.directory / name

    def close(self) -> None:
        """Synchronise and let go."""
        self._close_files()
        self._beside.shutdown()
        os.close(self._lock_fd)

    def _close_files(self) -> None:
        files = [fd for fd in (self.fd, self._journal_fd) if fd >= 0]
        self.fd = self._journal_fd = -1
        self.header = None
        for fd in files:
            try:
                os.fdatasync(fd)
            except OSError as error:
                log.error("%s cannot be synchronised: %s", self.options.directory, error)
            os.close(fd)

    # --- opening ----------------------------------------------------------------------------

    def recover(self) -> Replay | None:
        """Open what a former life has left; None: there is nothing that can be used.

        What is not used is left alone until `create` puts an empty store in its place.
        """
        try:
            header = msgspec.json.decode(self._path("header").read_bytes(), type=Header)
            self.outdated = header.format != FORMAT
            refusal = self._refusal(header)
            if refusal:
                log.warning("the store in %s is not used: %s", self.options.directory, refusal)
                return None
            data = self._path("journal").read_bytes()
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("the store in %s is not used: %s", self.options.directory, error)
            return None
        found = replay(data, slot_count=header.slot_count, slot_bytes=header.slot_bytes)
        self._open_files(header)
        self._truncate_journal(len(data))
        return found

    def _refusal(self, header: Header) -> str:
        """Return why a store cannot be used as it is; empty: it can."""
        if header.format != FORMAT:
            return (
                f"it has format {header.format}, and this release has format {FORMAT}; an empty "
                "store takes its place as soon as an engine is attached"
            )
        if header.cipher != self.options.cipher:
            return f"its cipher is {header.cipher or 'none'}, not {self.options.cipher or 'none'}"
        try:
            slot_count = self._slot_count(header.slot_bytes)
        except StoreError as error:
            return str(error)
        if header.slot_count != slot_count:
            return f"it has {header.slot_count} slots, and {slot_count} are wanted"
        if self._path("slots").stat().st_size < header.stride * header.slot_count:
            return "its file of slots is too short"
        return ""

    def create(self, slot_bytes: int) -> Replay:
        """Make an empty store of slots of this size, in place of whatever was there.

        Raises StoreError, with the free space where the disk is too small.
        """
        self._close_files()
        slot_count = self._slot_count(slot_bytes)
        header = Header(FORMAT, slot_bytes, slot_count, self.options.cipher)
        try:
            for name in ("header", "journal"):
                self._path(name).unlink(missing_ok=True)
            self._preallocate(slot_count * header.stride)
            self._path("journal").touch(mode=0o600)
            self._path("header").write_bytes(msgspec.json.encode(header))
            self._open_files(header)
            self._sync_directory()
            self.outdated = False
        except OSError as error:
            raise StoreError(f"no store in {self.options.directory}: {error}") from error
        return Replay(blocks={}, next_order=1, records=0, damaged=0)

    def _slot_count(self, slot_bytes: int) -> int:
        if self.options.slot_count is not None:
            return self.options.slot_count
        count = self.options.capacity_bytes // stride_of(slot_bytes, self.options.cipher)
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
            file_system = os.statvfs(self.options.directory)
            free = file_system.f_bavail * file_system.f_frsize + os.fstat(fd).st_blocks * 512
            # Asked first: an allocation that fails has taken the whole disk for a moment.
            if size > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(fd, 0)
            self._allocate(fd, size)
        except OSError as error:
            os.ftruncate(fd, 0)
            raise StoreError(
                f"no room for {size} bytes in {self.options.directory} ({free} free): lower "
                f"DYN_KVBM_DISK_CACHE_GB or make room ({error.strerror})"
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
        """Write zeros or leave the file sparse: the file system cannot preallocate."""
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
        size = os.fstat(self._journal_fd).st_size
        try:
            _write_all(self._journal_fd, encode_records(records))
        except OSError:
            self._truncate_journal(size)
            raise
        if commit and self.options.sync == "commit":
            self._synchronise()

    def _truncate_journal(self, size: int) -> None:
        """Cut a torn record off: what is appended behind it would stay out of step."""
        os.ftruncate(self._journal_fd, size - size % RECORD_BYTES)

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
            os.fdatasync(self._journal_fd)
        finally:
            wait([data])
        data.result()

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
        # Else a power cut brings the old journal back, without what was appended to the new one.
        self._sync_directory()

    def _sync_directory(self) -> None:
        fd = os.open(self.options.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def stride_of(slot_bytes: int, cipher: str) -> int:
    """Return the bytes from slot to slot in a file for blocks of `slot_bytes` bytes."""
    return slot_bytes + (EXTRA_BYTES if cipher else 0)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
