"""Shared memory in huge pages, without a setting of the machine.

A disk request lists memory page by page. In pages of 4 KiB a block of 1 MiB takes 256 entries of
its queue, and a virtual disk without indirect descriptors has 256 of them: one block was in flight
at a time. In huge pages it is one entry; the kernel pins and sums up faster, too. The usual ways to
them need a mount option or a sysctl. `MADV_COLLAPSE` (Linux 6.1) needs neither, but a mapping that
begins where a huge page can, which Python's mmap does not: hence ctypes. See madvise(2).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

# Python's mmap module does not name these, and its madvise() would hold the GIL.
PROT_NONE = 0
MAP_FIXED = 0x10
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25
HUGE_PAGE_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.mmap.restype = ctypes.c_void_p
_MAP_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, size_bytes: int, *, writable: bool = True) -> NDArray[np.uint8]:
    """Map a file, or with -1 memory of no file, where huge pages can be. Raises OSError.

    It is mapped as long as the array, or a view of it, lives.
    """
    room = size_bytes + HUGE_PAGE_BYTES
    begin = _mapped(None, room, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | MAP_FIXED | (mmap.MAP_ANONYMOUS if fd < 0 else 0)
    try:
        _mapped(address, size_bytes, protection, flags, fd)
    except OSError:
        _libc.munmap(begin, room)
        raise
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    # The rest of the room costs nothing but addresses. At exit there may still be readers.
    weakref.finalize(memory, _libc.munmap, begin, room).atexit = False
    array = np.ctypeslib.as_array(memory)
    array.flags.writeable = writable
    return array


def make_huge(address: int, length: int) -> None:
    """Take memory that can be written in huge pages, where the kernel has them to give.

    One small page of each is taken first: of nothing, nothing huge is made; of a whole one that is
    there already, it is made by copying.
    """
    for start in range(address, address + length - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
        _libc.madvise(start, mmap.PAGESIZE, MADV_POPULATE_WRITE)
    _libc.madvise(address, length, MADV_COLLAPSE)


def populate(address: int, length: int, *, writable: bool) -> None:
    """Take all of it, in pages of any size. Raises OSError, EINVAL before Linux 5.14."""
    if _libc.madvise(address, length, MADV_POPULATE_WRITE if writable else MADV_POPULATE_READ):
        raise _error()


def _mapped(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, length, protection, flags, fd, 0)
    if found == _MAP_FAILED:
        raise _error()
    return int(found)


def _error() -> OSError:
    reason = ctypes.get_errno()
    return OSError(reason, os.strerror(reason))
