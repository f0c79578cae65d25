"""Directories of private stacks: each is locked by its process, and goes with it.

A process that is killed cannot remove its own. The next private stack of the same user removes what
no process holds any more: the directory, and the shared memory of that stack's host. A directory
gets its name when it is locked already, so one whose lock is free has no process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from kvbm_common.runtime.processes import LockTaken, take_lock

PREFIX = "kvbm-private-"
UNNAMED = "kvbm-unnamed-"
"""Begins the name of a directory that is not locked yet."""
LOCK = "owner.lock"
FRESH_S = 60.0
"""An unnamed directory that is younger may still get its lock."""

_log = logging.getLogger(__name__)


class PrivateDirectory:
    """A directory for one stack: `run`, `state`, `disk` and `logs` in it, mode 0700."""

    def __init__(self) -> None:
        place, name = Path(tempfile.gettempdir()), secrets.token_hex(4)
        unnamed = place / f"{UNNAMED}{name}"
        unnamed.mkdir(mode=0o700)
        self._lock = take_lock(unnamed / LOCK)
        self.path = unnamed.rename(place / f"{PREFIX}{name}")
        for name in ("run", "state", "disk", "logs"):
            (self.path / name).mkdir(mode=0o700)

    @property
    def host(self) -> str:
        """Return the name of the stack's host: what is swept is found by it."""
        return _host_of(self.path)

    def keep_logs(self) -> Path:
        """Move the logs to where they outlive the stack, and return where they are."""
        kept = self.path.with_name(self.path.name.replace(PREFIX, "kvbm-logs-"))
        return (self.path / "logs").rename(kept)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep(shm_dir: Path) -> list[Path]:
    """Remove the directories whose processes are gone, and return them."""
    removed: list[Path] = []
    place = Path(tempfile.gettempdir())
    for path in (*place.glob(f"{PREFIX}*"), *_stale(place.glob(f"{UNNAMED}*"))):
        lock = _lock_of_the_dead(path)
        if lock is None:
            continue
        for arena in shm_dir.glob(f"kvbm-{_host_of(path)}-*"):
            arena.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        lock.close()
        removed.append(path)
        _log.info("%s is removed: its process is gone", path)
    return removed


def _stale(paths: Iterable[Path]) -> Iterator[Path]:
    """Return directories that are too old to get a name still."""
    for path in paths:
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > FRESH_S:
                yield path


def _host_of(path: Path) -> str:
    return path.name.removeprefix("kvbm-")


def _lock_of_the_dead(path: Path) -> TextIO | None:
    """Return the lock of a directory of ours that no process holds; None: leave it alone."""
    try:
        if path.lstat().st_uid != os.geteuid():
            return None
        return take_lock(path / LOCK)
    except (OSError, LockTaken):
        return None
