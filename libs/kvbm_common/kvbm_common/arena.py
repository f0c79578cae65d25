"""The arena: one file in a memory file system, mapped by its owner and by whoever moves its bytes.

The owner holds an flock on the file as long as it lives, so that `remove_stale` can tell what a
killed owner has left behind, and remove that and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvbm_common.errors import KvbmError

POPULATE_SLICE_BYTES = 64 * 1024 * 1024
"""Pages are made in slices: the arena is usable, and can be closed, in between."""
MADV_POPULATE_WRITE = 23
"""From Linux 5.14 on; <asm-generic/mman-common.h>. Python has no name for it."""


class ArenaError(KvbmError):
    """Shared memory cannot be had. The text says what to change."""

    code = "arena"


class Arena:
    """A mapping of shared memory. Use `create` or `attach`, in `with` or with `close`."""

    def __init__(self, path: Path, fd: int, length: int, *, owner: bool) -> None:
        self.path = path
        self.bytes = length
        self._fd = fd
        self._owner = owner
        self._closing = threading.Event()
        self._populating: threading.Thread | None = None
        self._map = mmap.mmap(fd, length)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.address = self.array.ctypes.data

    @classmethod
    def create(cls, directory: Path, name: str, length: int) -> Arena:
        """Make an arena of `length` bytes. Raises ArenaError when there is no room for it."""
        path = directory / name
        try:
            free = os.statvfs(directory)
        except OSError as error:
            raise ArenaError(f"KVBM_SHM_DIR {directory} cannot be used: {error}") from error
        free_bytes = free.f_bavail * free.f_frsize
        if not 0 < length <= free_bytes:
            raise ArenaError(
                f"an arena of {length} bytes does not fit {directory}, which has {free_bytes} "
                "bytes free: change DYN_KVBM_CPU_CACHE_GB or the size of that file system"
            )
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, length)
        return cls(path, fd, length, owner=True)

    @classmethod
    def attach(cls, path: str | Path) -> Arena:
        """Map somebody's arena. Raises ArenaError when it is not there."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"the arena {path} cannot be mapped: {error}") from error
        return cls(Path(path), fd, os.fstat(fd).st_size, owner=False)

    def populate(self) -> None:
        """Make the pages ahead of their first use, in a background thread."""
        self._populating = threading.Thread(target=self._populate, name="populate", daemon=True)
        self._populating.start()

    def _populate(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for offset in range(0, self.bytes, POPULATE_SLICE_BYTES):
            if self._closing.is_set():
                return
            length = min(POPULATE_SLICE_BYTES, self.bytes - offset)
            start = ctypes.c_void_p(self.address + offset)
            if libc.madvise(start, ctypes.c_size_t(length), MADV_POPULATE_WRITE) != 0:
                return  # An older kernel: pages come with their first use.

    def close(self) -> None:
        """Unmap, and remove the file if it is ours. Views that are still held stay valid."""
        self._closing.set()
        if self._populating is not None:
            self._populating.join()
        if self._owner:
            self.path.unlink(missing_ok=True)
        self.array = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):  # A view is held somewhere: it unmaps with it.
            self._map.close()
        os.close(self._fd)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_stale(directory: Path, prefix: str) -> list[Path]:
    """Remove the arenas of this prefix whose owners are dead; returns them."""
    removed: list[Path] = []
    for path in directory.glob(f"{prefix}*-arena"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
            finally:
                os.close(fd)
    return removed
