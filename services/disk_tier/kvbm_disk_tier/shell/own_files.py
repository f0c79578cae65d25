"""Files of a store: no other user can put one in their place.

The directory is the service's own and closed to other writers, and no link is followed. So what a
neighbour has prepared at a path that can be guessed is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

FORMER_LOCK = "lock"
"""The file that earlier releases locked: one may still be running."""
FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
OTHERS_WRITE = 0o022


def open_own_directory(path: Path) -> int:
    """Open a directory, made if it is missing; raises OSError, PermissionError for a foreign one.

    Its parent may be a link, for an operator's layout of disks.
    """
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        os.close(fd)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
    status = os.fstat(fd)
    if status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE:
        return fd
    os.close(fd)
    mode = f"{status.st_mode & 0o7777:o}"
    raise PermissionError(
        f"{path} is of user {status.st_uid} and has mode {mode}; it must be of user "
        f"{os.geteuid()}, and writable to no other (chown, chmod go-w)"
    )


def lock_directory(path: Path) -> tuple[int, ...]:
    """Lock a directory of ours; returns the open files that hold the lock.

    Raises BlockingIOError where another process has it, and other OSErrors.
    """
    held = [open_own_directory(path)]
    try:
        fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            held.append(open_own(path / FORMER_LOCK, os.O_RDWR))
            fcntl.flock(held[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        for fd in held:
            os.close(fd)
        raise
    return tuple(held)


def open_own(path: Path, flags: int) -> int:
    """Open a file of a store, without following a link; raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


def read_own(path: Path) -> bytes:
    """Read a file of a store; raises OSError."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()
