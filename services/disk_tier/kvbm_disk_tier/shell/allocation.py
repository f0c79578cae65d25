"""Disk space that is taken before it is needed, by fallocate(2) or zeros; and slots that move.

glibc's posix_fallocate is of no use here. Where a file system cannot preallocate (ext2, ext3, NFS
before 4.2) it never says so, and writes one byte into each block of the file instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

from kvbm_common.runtime.loop import monotonic_ms
from kvbm_common.tier.layout import UNIT_BYTES

from kvbm_disk_tier.core.resizing import Move
from kvbm_disk_tier.shell.own_files import open_own

KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE: the space lies after the end of the file, which stays where it is."""
PROBE_BYTES = 4096
ZEROS = bytes(16 * 1024 * 1024)
FLUSH_BYTES = 256 * 1024 * 1024
"""After so many zeros the disk is waited for: dirty pages would push other programs' out."""
SAID_EVERY_MS = 10_000
CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of a file system that cannot preallocate."""

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


def preallocate(fd: int, size: int, *, kept: int, room: int, zerofill: bool) -> None:
    """Take the space of a file of `size` bytes, if there is `room` for them; raises OSError.

    The first `kept` bytes stay as they are, also where it fails. On a file system that cannot
    preallocate, `zerofill` writes zeros; without it the file is left sparse.
    """
    assert 0 <= kept <= size, f"{kept} of {size} bytes are kept"
    try:
        # Asked first: an allocation that fails has taken the whole disk for a moment.
        if size > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, kept)
        if fallocate(fd, size):
            return
        if zerofill:
            fill(fd, size, start=kept)
        else:
            os.ftruncate(fd, size)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, kept)
        raise


def fallocate(fd: int, size: int, *, keep_size: bool = False) -> bool:
    """Allocate the first `size` bytes of a file; False: the file system cannot. Raises OSError."""
    call = getattr(_libc, "fallocate", None)
    if call is None:
        return False
    mode = ctypes.c_int(KEEP_SIZE if keep_size else 0)
    while call(ctypes.c_int(fd), mode, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code in CANNOT:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def fill(fd: int, size: int, *, start: int = 0) -> None:
    """Write zeros from `start` to `size`, as fast as the disk takes them; raises OSError."""
    assert start >= 0, start
    flushed, said_ms, started_s = start, monotonic_ms(), time.monotonic()
    at = start
    while at < size:
        at += write_at(fd, memoryview(ZEROS)[: size - at], at)
        if at - flushed >= FLUSH_BYTES or at == size:
            os.fdatasync(fd)
            os.posix_fadvise(fd, flushed, at - flushed, os.POSIX_FADV_DONTNEED)
            flushed = at
        if monotonic_ms() - said_ms >= SAID_EVERY_MS:
            said_ms = monotonic_ms()
            rate = (at - start) / (time.monotonic() - started_s) / 1e6
            log.info("%d of %d bytes are filled with zeros, %.0f MB/s", at, size, rate)


def move_slots(path: Path, moves: Sequence[Move]) -> list[Move]:
    """Copy slots of a file to where others are free, and make them durable; raises OSError.

    Returns those that cannot be read: a sector may be broken.
    """
    if not moves:
        return []
    unread: list[Move] = []
    fd = open_own(path, os.O_RDWR)
    try:
        for move in moves:
            try:
                data = _read_at(fd, move.units * UNIT_BYTES, move.source * UNIT_BYTES)
            except OSError as error:
                if not unread:
                    log.warning("slots of %s cannot be read: %s", path, error)
                unread.append(move)
            else:
                write_at(fd, data, move.target * UNIT_BYTES)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return unread


def _read_at(fd: int, size: int, offset: int) -> bytes:
    """Read so many bytes; raises OSError, also where fewer come: a broken sector ends a read."""
    data = os.pread(fd, size, offset)
    if len(data) < size:
        raise OSError(errno.EIO, f"{len(data)} of {size} bytes at {offset} were read")
    return data


def write_at(fd: int, data: bytes | memoryview, offset: int) -> int:
    """Write all of `data` at an offset, however the system cuts it; returns its length."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        if written <= 0:
            raise OSError(errno.EIO, "the file takes no bytes")
        view, offset = view[written:], offset + written
    return len(data)


def cut_off(path: Path, size: int) -> None:
    """Give back the space after the last slot; raises OSError."""
    assert size > 0, f"{path} is cut off at {size}"
    if path.stat().st_size > size:
        os.truncate(path, size)


def probe_read(fd: int) -> None:
    """Read a little of the file of slots; raises OSError."""
    if os.preadv(fd, [mmap.mmap(-1, PROBE_BYTES)], 0) < PROBE_BYTES:
        raise OSError(errno.EIO, "the file of slots is shorter than it was")
