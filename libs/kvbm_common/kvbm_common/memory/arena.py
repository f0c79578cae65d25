"""The arena: one large file in shared memory, mapped by every process that reads or fills blocks.

The owner creates it, holds an flock on it for life, and unlinks it when it closes. The kernel
drops the lock with the process, so `remove_stale` can tell a killed owner's file from a live one.

Every byte is allocated before `create` returns. A file with holes would be promised memory only: if
the file system fills, the kernel ends each process that touches a hole with SIGBUS, readers too.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvbm_common.errors import KvbmError
from kvbm_common.memory.huge_pages import make_huge, map_shared, populate

# A slice takes 10 to 40 ms, and 600 ms where the kernel must move memory to make a huge page. This
# bounds how long `create` works on after a stop, and how long `close` waits for the thread.
ALLOCATE_SLICE_BYTES = 64 << 20
POPULATE_SLICE_BYTES = 64 << 20
POPULATE_STOP_S = 10.0
PROGRESS_S = 5.0
# Only a `remove_stale` in the same instant makes a second attempt necessary.
CREATE_ATTEMPTS_MAX = 3
OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)

log = logging.getLogger(__name__)


class ArenaNoSpace(KvbmError):
    """The shared-memory directory cannot hold the arena; the text names sizes and settings."""

    code = "arena_no_space"

    def __init__(self, path: Path, needed_bytes: int, free_bytes: int, setting: str) -> None:
        super().__init__(
            f"{path.name} of {needed_bytes} bytes does not fit into {path.parent}: {free_bytes} "
            f"bytes free. Make {path.parent} larger (mount -o remount,size=…; in containers "
            f"--shm-size or --ipc=host), point KVBM_SHM_DIR elsewhere, or lower {setting}"
        )
        self.field = setting


class ArenaStopped(KvbmError):
    """The allocation was told to stop. Nothing of the arena is left."""

    code = "arena_stopped"


class ArenaUnavailable(KvbmError):
    """The arena's file is missing, empty, taken or not permitted."""

    code = "arena_unavailable"


class Arena:
    """A shared mapping of one file. `path` is what another process attaches.

    Views and arrays stay valid after `close`: the memory goes when the last of them does.
    """

    def __init__(
        self, path: Path, fd: int, size_bytes: int, *, owner: bool, writable: bool = True
    ) -> None:
        """Take over `fd`. Use `create` or `attach` instead."""
        self.path = path
        self.bytes = size_bytes
        self._fd = fd
        self._owner = owner
        self._writable = writable
        self._memory: NDArray[np.uint8] | None = map_shared(fd, self.bytes, writable=writable)
        self.address: int = self._memory.ctypes.data
        self._allocated = not owner
        self._stop = threading.Event()
        self._populating: threading.Thread | None = None

    @classmethod
    def create(
        cls, shm_dir: str | Path, name: str, size_bytes: int, *,
        setting: str = "DYN_KVBM_CPU_CACHE_GB", huge: bool = True,
        stop: threading.Event | None = None,
    ) -> Self:  # fmt: skip
        """Make the file, allocate all of it, and own it; a failure leaves nothing behind.

        Raises `ArenaNoSpace`, which names `setting`, `ArenaUnavailable`, and `ArenaStopped` soon
        after `stop` is set. `huge` asks for huge pages. 10 GB take 2 to 40 s: use a thread.
        """
        path = Path(shm_dir) / name
        _check_space(path, size_bytes, setting)
        fd = _create_locked(path)
        try:
            arena = cls(path, fd, size_bytes, owner=True)
        except OSError as error:
            path.unlink()
            os.close(fd)
            raise ArenaUnavailable(f"cannot map {path}: {error.strerror}") from error
        try:
            arena._allocate(huge, stop or threading.Event())
        except OSError as error:
            if error.errno not in OUT_OF_SPACE:
                raise ArenaUnavailable(f"cannot allocate {path}: {error.strerror}") from error
            free = shutil.disk_usage(path.parent).free + os.fstat(fd).st_blocks * 512
            raise ArenaNoSpace(path, size_bytes, free, setting) from error
        finally:
            if not arena._allocated:
                arena.close()  # Here, since the traceback keeps the arena, and that its memory.
        return arena

    @classmethod
    def attach(cls, path: str | Path, *, writable: bool = True) -> Self:
        """Map an arena that another process owns. Raises `ArenaUnavailable`."""
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaUnavailable(f"cannot attach {path}: {error.strerror}") from error
        except ValueError as error:  # For a path with a NUL.
            raise ArenaUnavailable(f"cannot attach {str(path)!r}: {error}") from error
        size_bytes = os.fstat(fd).st_size
        if size_bytes == 0:
            os.close(fd)
            raise ArenaUnavailable(f"cannot attach {path}: it is empty")
        try:
            return cls(Path(path), fd, size_bytes, owner=False, writable=writable)
        except OSError as error:
            os.close(fd)
            raise ArenaUnavailable(f"cannot map {path}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def array(self) -> NDArray[np.uint8]:
        """The whole arena as bytes; it shares the memory."""
        assert self._memory is not None, f"{self.path} is closed"
        return self._memory

    def view(self, offset: int, length: int) -> memoryview:
        """Return a view of `length` bytes at `offset`, writable where the mapping is."""
        assert offset >= 0, offset
        assert offset + length <= self.bytes, (offset, length, self.bytes)
        return self.array.data[offset : offset + length]

    def check_successor(self, size_bytes: int, setting: str) -> None:
        """Check the space for another arena in the place of this one. Raises `ArenaNoSpace`."""
        _check_space(self.path, size_bytes, setting, self.bytes)

    def populate(self) -> Future[None]:
        """Map every page now, in the background, so that no transfer pays for page faults.

        Each process pays for its own mapping. The arena is usable meanwhile. Fails with
        `ArenaUnavailable`; `close` cancels it.
        """
        assert self._populating is None, "populate once"
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        self._populating = threading.Thread(
            target=self._populate, args=(done,), name="arena-populate", daemon=True
        )
        try:
            self._populating.start()
        except RuntimeError as error:  # The process may have no more threads.
            self._populating = None
            done.set_exception(ArenaUnavailable(f"cannot map all of {self.path}: {error}"))
        return done

    def close(self) -> None:
        """Unlink (the owner), release the lock and unmap; without effect the second time."""
        if self._memory is None:
            return
        self._stop.set()
        if self._populating is not None:
            self._populating.join(POPULATE_STOP_S)
        if self._owner:
            self.path.unlink(missing_ok=True)
        self._memory = None
        os.close(self._fd)

    def _allocate(self, huge: bool, stop: threading.Event) -> None:
        """Allocate slice by slice, so that a stop takes effect and progress can be logged."""
        started = told = time.monotonic()
        for offset in range(0, self.bytes, ALLOCATE_SLICE_BYTES):
            if stop.is_set():
                raise ArenaStopped(f"{self.path} was not made: it was stopped")
            self._allocate_slice(offset, min(ALLOCATE_SLICE_BYTES, self.bytes - offset), huge)
            if time.monotonic() - told >= PROGRESS_S:
                told = time.monotonic()
                text = "allocating %s: %d of %d MB after %.0f s"
                done = min(offset + ALLOCATE_SLICE_BYTES, self.bytes)
                log.info(text, self.path, done // 10**6, self.bytes // 10**6, told - started)
        self._allocated = True
        log.debug("allocated %s in %.2f s", self.path, time.monotonic() - started)

    def _allocate_slice(self, offset: int, length: int, huge: bool) -> None:
        """Take the slice from the file system, in huge pages first.

        The order matters: making a huge page of small ones that are there costs ten times as much.
        Nothing here touches the mapping, so that a full file system is an error and no signal.
        """
        if huge:
            os.ftruncate(self._fd, offset + length)
            make_huge(self.address + offset, length)
        os.posix_fallocate(self._fd, offset, length)

    def _populate(self, done: Future[None]) -> None:
        for offset in range(0, self.bytes, POPULATE_SLICE_BYTES):
            if self._stop.is_set():
                done.set_exception(ArenaUnavailable(f"{self.path} was closed"))
                return
            try:
                self._populate_slice(offset, min(POPULATE_SLICE_BYTES, self.bytes - offset))
            except OSError as error:
                text = f"cannot map all of {self.path}: {error.strerror}"
                done.set_exception(ArenaUnavailable(text))
                return
        done.set_result(None)

    def _populate_slice(self, offset: int, length: int) -> None:
        if self._writable and not self._owner:
            make_huge(self.address + offset, length)  # The owner has tried when it was allocated.
        try:
            populate(self.address + offset, length, writable=self._writable)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # An older kernel. Touching pages could undo what a transfer writes at the same moment,
            # so the first transfers pay for their faults.


def remove_stale(shm_dir: str | Path, prefix: str) -> list[Path]:
    """Unlink the arenas named `prefix…` whose owner is gone, and return their paths."""
    return [path for path in sorted(Path(shm_dir).glob(f"{prefix}*")) if remove_if_stale(path)]


def remove_if_stale(path: Path) -> bool:
    """Unlink an arena if its owner is gone, and return whether it was so."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # Gone meanwhile, or another user's.
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stale = _is_at(fd, path)
        if stale:
            path.unlink()
        return stale
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _create_locked(path: Path) -> int:
    """Create and lock. Between the two a `remove_stale` may take the file, so look again."""
    for _ in range(CREATE_ATTEMPTS_MAX):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ArenaUnavailable(f"cannot create {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, path):
                return fd
        except BlockingIOError:
            pass  # A `remove_stale` holds it, and is about to unlink it.
        os.close(fd)
        path.unlink(missing_ok=True)
    raise ArenaUnavailable(f"cannot create {path}: another process keeps removing it")


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _check_space(path: Path, size_bytes: int, setting: str, freed_bytes: int = 0) -> None:
    """Refuse what cannot fit before anything is taken, or `freed_bytes` are given back for it."""
    assert size_bytes > 0, size_bytes
    try:
        free = shutil.disk_usage(path.parent).free + freed_bytes
    except OSError as error:
        raise ArenaUnavailable(f"cannot use {path.parent}: {error.strerror}") from error
    if size_bytes > free:
        raise ArenaNoSpace(path, size_bytes, free, setting)
