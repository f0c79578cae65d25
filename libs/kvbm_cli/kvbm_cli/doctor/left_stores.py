"""Stores of other names beside this host's: what a host leaves behind that gets another name."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from kvbm_cli.doctor.host import LeftStore

JOURNAL = "journal"
"""A directory with this file is a disk tier's store."""
STORES_MAX = 1_000
"""Directories that are looked at."""


def left_stores(directory: Path, host: str) -> tuple[LeftStore, ...]:
    """Return the stores of other hosts' names in a directory that no process uses now."""
    try:
        names = sorted(name for name in os.listdir(directory) if name.startswith("kvbm-"))
    except OSError:
        return ()
    others = [name for name in names if not name.startswith(f"kvbm-{host}-")][:STORES_MAX]
    paths = (directory / name for name in others)
    return tuple(LeftStore(path, _bytes(path)) for path in paths if _is_left(path))


def _is_left(path: Path) -> bool:
    """Tell whether a path is a store that no process has locked; False where we may not look."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.stat(JOURNAL, dir_fd=fd, follow_symlinks=False)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)  # It ends the lock, too.
    return True


def _bytes(path: Path) -> int:
    taken = 0
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                taken += entry.stat(follow_symlinks=False).st_blocks * 512
    return taken
