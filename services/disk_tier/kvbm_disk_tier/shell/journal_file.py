"""The file of a journal, and the space that is kept for the one that a rewrite puts in its place.

        journal    records of kvbm_disk_tier.core.journal
        spare      space, taken before the disk is full

A rewrite writes into `spare`, in parts, and renames it. What is appended between its parts goes
into both files: whichever is the journal after a crash has it. Records are written at an offset of
ours: what lies after it is torn, or zeros that keep the space on a file system that cannot
preallocate.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from dataclasses import replace
from pathlib import Path

from kvbm_common.tier.layout import Layout

from kvbm_disk_tier.core.journal import (
    RECORD_BYTES,
    Operation,
    Record,
    Replay,
    encode_records,
    replay_pieces,
)
from kvbm_disk_tier.shell.allocation import fallocate, fill, write_at
from kvbm_disk_tier.shell.own_files import open_own

JOURNAL = "journal"
SPARE = "spare"
LOOK_BYTES = 1 << 20
"""Bytes of a journal that are looked at together for zeros."""
ORDER_RENEWED_FROM = 2**63
"""A life that begins below has as many records before the order, of 64 bits, has none left."""
FORMER_SPARE = "journal.new"
"""A file that a rewrite of an older release has left, if the disk was full."""

log = logging.getLogger(__name__)


class JournalFile:
    """The journal of one directory. Not thread-safe: one thread at a time."""

    def __init__(self, directory: Path, *, zerofill_fallback: bool) -> None:
        self.directory = directory
        self._zerofill_fallback = zerofill_fallback
        self._fd = -1
        self._spare_fd = -1
        self._end = 0
        """The offset of the next record, in bytes."""
        self._next_fd = -1
        """The file of the rewrite under way."""
        self._next_end = 0
        self._next_failed: OSError | None = None
        """The error that an append has met in it: the rewrite is over."""
        self._reserved_bytes = 0
        self._renamed = False
        """A journal has taken the place of another, and a power cut may undo it."""

    @property
    def is_open(self) -> bool:
        """Tell whether records can be appended."""
        return self._fd >= 0

    def replay(self, layout: Layout) -> tuple[Replay, int]:
        """Return what the records say, and how many bytes they have; raises OSError."""
        fd = open_own(self.directory / JOURNAL, os.O_RDONLY)
        try:
            length = _length(fd)
            return replay_pieces(lambda *span: _read(fd, *span), length, layout), length
        finally:
            os.close(fd)

    def open(self, length: int, reserved_bytes: int) -> None:
        """Go on after the records of `length` bytes, with space for so many; raises OSError."""
        assert not self.is_open, "the journal is open"
        self._fd = self._open(JOURNAL)
        self._end = length - length % RECORD_BYTES
        self._reserved_bytes = reserved_bytes
        self._reserve()

    def close(self) -> None:
        """Synchronise and let go."""
        for fd in (self._fd, self._spare_fd, self._next_fd):
            if fd >= 0:
                close(fd, self.directory, synchronise=True)
        self._fd = self._spare_fd = self._next_fd = -1

    def remove(self) -> None:
        """Remove a closed journal and everything beside it; raises OSError."""
        assert not self.is_open, "the journal is open"
        for name in (JOURNAL, SPARE, FORMER_SPARE):
            (self.directory / name).unlink(missing_ok=True)

    def _open(self, name: str) -> int:
        return open_own(self.directory / name, os.O_RDWR | os.O_CREAT)

    # --- the space --------------------------------------------------------------------------

    def _reserve(self) -> None:
        """Take the space of the journal and of the next one.

        Without it the store works until the disk is full: a warning, and the next rewrite tries
        again.
        """
        try:
            (self.directory / FORMER_SPARE).unlink(missing_ok=True)
            self._take_space(self._fd, self._end)
            if self._spare_fd < 0:
                self._spare_fd = self._open(SPARE)
                os.ftruncate(self._spare_fd, 0)
            self._take_space(self._spare_fd, 0)
        except OSError as error:
            size = self._reserved_bytes
            log.warning("no %d bytes for a journal in %s: %s", size, self.directory, error)

    def _take_space(self, fd: int, used: int) -> None:
        if fallocate(fd, self._reserved_bytes, keep_size=True) or not self._zerofill_fallback:
            return
        fill(fd, self._reserved_bytes, start=max(used, os.fstat(fd).st_size))

    # --- records ----------------------------------------------------------------------------

    def append(self, records: tuple[Record, ...]) -> None:
        """Write records after the last one; raises OSError."""
        self._require_open()
        data = encode_records(records)
        try:
            write_at(self._fd, data, self._end)
        except OSError:
            self._blank(len(data))
            raise
        self._end += len(data)
        if self._next_fd >= 0:
            try:
                self._write_next(data)
            except OSError as error:
                self._next_failed = error
                self._give_up_rewrite()

    def _blank(self, length: int) -> None:
        """Write zeros over what a failed append has left: the next one may be shorter.

        Cut off, it would take the space after it along.
        """
        with contextlib.suppress(OSError):
            end = min(self._end + length, os.fstat(self._fd).st_size)
            write_at(self._fd, bytes(max(0, end - self._end)), self._end)

    def synchronise(self) -> None:
        """Make durable what was appended; raises OSError."""
        self._require_open()
        os.fdatasync(self._fd)
        if self._renamed:
            self._sync_directory()

    def append_now(self, records: tuple[Record, ...]) -> None:
        """Write records, and make them durable before anything else; raises OSError."""
        if records:
            self.append(records)
            self.synchronise()

    def probe(self) -> None:
        """Write and synchronise where the next record goes; zeros are none. Raises OSError."""
        self._require_open()
        write_at(self._fd, bytes(RECORD_BYTES), self._end)
        os.fdatasync(self._fd)

    # --- the rewrite ------------------------------------------------------------------------

    def begin_rewrite(self) -> None:
        """Begin the journal that is to take this one's place; raises OSError."""
        self._require_open()
        if self._next_fd >= 0:
            self._give_up_rewrite()
        fd, self._spare_fd = self._spare_fd, -1
        self._next_fd = self._open(SPARE) if fd < 0 else fd
        self._next_end, self._next_failed = 0, None

    def rewrite(self, records: tuple[Record, ...]) -> None:
        """Write these records into the journal to come, or give it up; raises OSError."""
        self._require_rewrite()
        try:
            self._write_next(encode_records(records))
        except OSError:
            self._give_up_rewrite()
            raise

    def end_rewrite(self) -> None:
        """Put the new journal in place of the old one, or leave that; raises OSError."""
        self._require_rewrite()
        fd = self._next_fd
        try:
            os.fdatasync(fd)
            os.replace(self.directory / SPARE, self.directory / JOURNAL)
        except OSError:
            if not self._is_in_place(fd):
                self._give_up_rewrite()
                raise
        close(self._fd, self.directory)
        self._fd, self._end, self._renamed = fd, self._next_end, True
        self._next_fd = -1
        self._reserve()
        # Else a power cut brings the old journal back, without what was appended to the new one.
        self._sync_directory()

    def _write_next(self, data: bytes) -> None:
        write_at(self._next_fd, data, self._next_end)
        self._next_end += len(data)

    def _require_rewrite(self) -> None:
        self._require_open()
        if self._next_fd < 0:
            raise self._next_failed or OSError(errno.EBADF, "the journal to come is not open")

    def _give_up_rewrite(self) -> None:
        fd, self._next_fd = self._next_fd, -1
        self._drop(fd)
        self._reserve()

    def renumbered(self, found: Replay) -> Replay:
        """Begin the order of records again at 1, where its 64 bits could be used up in this life.

        A disk that fails leaves it to the next life.
        """
        if found.next_order <= ORDER_RENEWED_FROM:
            return found
        live = enumerate(found.blocks.items(), 1)
        records = tuple(Record(Operation.COMMITTED, order, *entry) for order, entry in live)
        try:
            self.begin_rewrite()
            self.rewrite(records)
            self.end_rewrite()
        except OSError as error:
            log.warning("the order of the journal in %s stays: %s", self.directory, error)
            return found
        return replace(found, next_order=len(records) + 1, records=len(records))

    def _is_in_place(self, fd: int) -> bool:
        """Tell whether a file has become the journal: a rename may be done, and fail."""
        try:
            return os.path.samestat(os.fstat(fd), (self.directory / JOURNAL).stat())
        except OSError:
            return False

    def _drop(self, fd: int) -> None:
        if fd >= 0:
            close(fd, self.directory)
        with contextlib.suppress(OSError):
            (self.directory / SPARE).unlink(missing_ok=True)

    def _sync_directory(self) -> None:
        sync_directory(self.directory)
        self._renamed = False

    def _require_open(self) -> None:
        if not self.is_open:
            raise OSError(errno.EBADF, "the store is not open")


def _length(fd: int) -> int:
    """Return the bytes of the records in a file, without the zeros after them; raises OSError."""
    end = os.fstat(fd).st_size
    size = end
    while end:
        start = max(0, end - LOOK_BYTES)
        length = len(_read(fd, start, end).rstrip(b"\0"))
        if length:
            return min(size, -(-(start + length) // RECORD_BYTES) * RECORD_BYTES)
        end = start
    return 0


def _read(fd: int, start: int, stop: int) -> bytes:
    """Return the bytes of a file from one offset to another; raises OSError."""
    found = bytearray(stop - start)
    rest = memoryview(found)
    while rest:
        count = os.preadv(fd, [rest], stop - len(rest))
        if not count:
            raise OSError(errno.EIO, f"the file ends at byte {stop - len(rest)} now")
        rest = rest[count:]
    return bytes(found)


def sync_directory(directory: Path) -> None:
    """Make durable which files a directory has; raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        close(fd, directory)


def close(fd: int, directory: Path, *, synchronise: bool = False) -> None:
    """Close a file; a write that has failed before may say so only now, and is logged."""
    try:
        if synchronise:
            os.fdatasync(fd)
    except OSError as error:
        log.error("a file in %s cannot be synchronised: %s", directory, error)
    try:
        os.close(fd)
    except OSError as error:
        log.error("a file in %s was closed with: %s", directory, error)
