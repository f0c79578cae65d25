"""The arena: one large file in shared memory, mapped by every process that reads or fills blocks.

The owner creates it, holds an flock on it for life, and unlinks it when it closes. The kernel
drops the lock with the process, so `remove_stale` can tell a killed owner's file from a live one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvbm_common.errors import KvbmError
from kvbm_common.mapping import make_huge, map_shared, populate

# A slice takes about 20 ms to populate, which bounds how long `close` waits for the thread.
POPULATE_SLICE_BYTES = 64 << 20
POPULATE_STOP_S = 10.0
# Only a `remove_stale` in the same instant makes a second attempt necessary.
CREATE_ATTEMPTS_MAX = 3


class ArenaNoSpace(KvbmError):
    """The shared-memory directory cannot hold the arena; the text names both sizes."""

    code = "arena_no_space"

    def __init__(self, shm_dir: Path, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"an arena of {needed_bytes} bytes does not fit into {shm_dir}: {free_bytes} bytes free"
        )
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class ArenaUnavailable(KvbmError):
    """The arena's file is missing, empty, taken or not permitted."""

    code = "arena_unavailable"


class Arena:
    """A shared mapping of one file. `path` is what another process attaches.

    Views and arrays stay valid after `close`: the memory goes when the last of them does.
    """

    def __init__(self, path: Path, fd: int, *, owner: bool, writable: bool = True) -> None:
        """Takes over `fd`. Use `create` or `attach`."""
        self.path = path
        self.bytes = os.fstat(fd).st_size
        self._fd = fd
        self._owner = owner
        self._writable = writable
        self._memory: NDArray[np.uint8] | None = map_shared(fd, self.bytes, writable=writable)
        self.address: int = self._memory.ctypes.data
        self._stop = threading.Event()
        self._populating: threading.Thread | None = None

    @classmethod
    def create(cls, shm_dir: str | Path, name: str, size_bytes: int) -> Self:
        """Make the file and own it. Raises `ArenaNoSpace`, `ArenaUnavailable`.

        The space is promised, not taken: `populate` takes it.
        """
        path = Path(shm_dir) / name
        _check_space(path.parent, size_bytes)
        fd = _create_locked(path)
        try:
            os.ftruncate(fd, size_bytes)
            return cls(path, fd, owner=True)
        except BaseException:
            path.unlink()
            os.close(fd)
            raise

    @classmethod
    def attach(cls, path: str | Path, *, writable: bool = True) -> Self:
        """Map an arena that another process owns. Raises `ArenaUnavailable`."""
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaUnavailable(f"cannot attach {path}: {error.strerror}") from error
        if os.fstat(fd).st_size == 0:
            os.close(fd)
            raise ArenaUnavailable(f"cannot attach {path}: it is empty")
        try:
            return cls(Path(path), fd, owner=False, writable=writable)
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
        """A view of `length` bytes at `offset`, writable where the mapping is."""
        assert offset >= 0, offset
        assert offset + length <= self.bytes, (offset, length, self.bytes)
        return self.array.data[offset : offset + length]

    def populate(self) -> Future[None]:
        """Take the memory now, in the background, so that no transfer pays for page faults.

        Each process pays for its own mapping. The arena is usable meanwhile. Fails with
        `ArenaNoSpace`; `close` cancels it.
        """
        assert self._populating is None, "populate once"
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        self._populating = threading.Thread(
            target=self._populate, args=(done,), name="arena-populate", daemon=True
        )
        self._populating.start()
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

    def _populate(self, done: Future[None]) -> None:
        for offset in range(0, self.bytes, POPULATE_SLICE_BYTES):
            if self._stop.is_set():
                done.set_exception(ArenaUnavailable(f"{self.path} was closed"))
                return
            try:
                self._populate_slice(offset, min(POPULATE_SLICE_BYTES, self.bytes - offset))
            except OSError:
                free = _free_bytes(self.path.parent)
                done.set_exception(ArenaNoSpace(self.path.parent, self.bytes - offset, free))
                return
        done.set_result(None)

    def _populate_slice(self, offset: int, length: int) -> None:
        if self._writable:
            make_huge(self.address + offset, length)
        try:
            populate(self.address + offset, length, writable=self._writable)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if self._writable:
                # An older kernel. Touching pages could undo what a transfer writes at the same
                # moment; allocating them in the file cannot, and leaves only cheap faults.
                os.posix_fallocate(self._fd, offset, length)


def remove_stale(shm_dir: str | Path, prefix: str) -> list[Path]:
    """Unlink the arenas named `prefix…` whose owner is gone, and return their paths."""
    return [path for path in sorted(Path(shm_dir).glob(f"{prefix}*")) if _remove_if_stale(path)]


def _remove_if_stale(path: Path) -> bool:
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
    raise ArenaUnavailable(f"cannot create {path}: somebody keeps removing it")


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _check_space(shm_dir: Path, size_bytes: int) -> None:
    assert size_bytes > 0, size_bytes
    try:
        free = _free_bytes(shm_dir)
    except OSError as error:
        raise ArenaUnavailable(f"cannot use {shm_dir}: {error.strerror}") from error
    if size_bytes > free:
        raise ArenaNoSpace(shm_dir, size_bytes, free)


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
