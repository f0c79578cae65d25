"""Leftovers: shared memory of killed processes, whatever the name of their host or instance.

A file is left when it has a name that KVBM gives, belongs to this user, and its lock is free: its
owner holds that for life. A lock proves this where one kernel keeps the files, which is so for a
file system in memory. Elsewhere another machine may hold it, and nothing is found.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from kvbm_common.memory.arena import remove_if_stale

NAMES = re.compile(r"kvbm-.+-\d+-arena(-roster|-names-\d+)?|kvbm-promises-.+")
"""An arena, what lies beside it, and the promised blocks of an engine."""
IN_MEMORY = frozenset({"tmpfs", "hugetlbfs", "ramfs"})
"""The file systems that one kernel keeps alone."""
MOUNTS = Path("/proc/self/mounts")


@dataclass(frozen=True, slots=True)
class LeftMemory:
    """A file in shared memory whose owner was killed."""

    path: Path
    bytes: int


def left_memory(shm_dir: Path) -> tuple[LeftMemory, ...]:
    """Return what killed processes have left in a directory of shared memory."""
    if file_system_of(shm_dir) not in IN_MEMORY:
        return ()
    try:
        names = sorted(name for name in os.listdir(shm_dir) if NAMES.fullmatch(name))
    except OSError:
        return ()
    found = ((shm_dir / name, _bytes_left(shm_dir / name)) for name in names)
    return tuple(LeftMemory(path, count) for path, count in found if count is not None)


def remove_left(shm_dir: Path) -> list[LeftMemory]:
    """Unlink what killed processes have left, and return it; processes that map it may go on."""
    return [one for one in left_memory(shm_dir) if remove_if_stale(one.path)]


def file_system_of(directory: Path) -> str:
    """Return the type of the file system of a directory, by the longest mount point above it."""
    best, kind = "", "missing"
    if not directory.is_dir():
        return kind
    place = directory.resolve()
    with contextlib.suppress(OSError):
        for line in MOUNTS.read_text().splitlines():
            _, where, fs, *_ = line.split()
            if place.is_relative_to(where) and len(where) >= len(best):
                best, kind = where, fs
    return kind


def _bytes_left(path: Path) -> int | None:
    """Return the bytes of a file that no process has locked; None for one to leave alone."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except OSError:  # It is gone, a link, or of another user.
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return None
    finally:
        os.close(fd)  # The lock ends with it.
    return status.st_blocks * 512
