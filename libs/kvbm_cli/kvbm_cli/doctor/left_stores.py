"""Stores that no disk tier of the settings uses: left behind when the host's name, its directories
or their order change."""

from __future__ import annotations

import contextlib
import fcntl
import os
from functools import partial
from pathlib import Path

from kvbm_common.config.settings import Settings

from kvbm_cli.disk_stores import JOURNAL, LOOK_S, is_store_of
from kvbm_cli.doctor.facts import LeftStore
from kvbm_cli.looks import look_at_once
from kvbm_cli.stack_processes import processes_of

STORES_MAX = 1_000
"""Directories that are looked at."""


def left_stores(directory: Path, settings: Settings) -> tuple[LeftStore, ...]:
    """Return the stores in a directory that neither these settings nor a process now use."""
    try:
        names = sorted(name for name in os.listdir(directory) if name.startswith("kvbm-"))
    except OSError:
        return ()
    used = _used(directory, settings)
    others = [name for name in names if name not in used][:STORES_MAX]
    paths = (directory / name for name in others)
    return tuple(
        LeftStore(path, _bytes(path), is_store_of(path, settings))
        for path in paths
        if _is_left(path)
    )


def unused_stores(settings: Settings) -> list[str]:
    """Return a line for each store that the disk tiers of this host do not use.

    Those of another host's name have one line in each directory; one that hangs has a line, too.
    """
    directories = settings.disk_cache_dirs
    looks = [partial(left_stores, directory, settings) for directory in directories]
    found = look_at_once(looks, within_s=LOOK_S)
    lines: list[str] = []
    for place, directory in enumerate(directories):
        if place in found:
            lines += _unused_lines(found[place], settings)
        else:
            lines.append(f"{directory} does not answer within {LOOK_S:.0f} s")
    return lines


def _unused_lines(stores: tuple[LeftStore, ...], settings: Settings) -> list[str]:
    why = "DYN_KVBM_DISK_CACHE_GB is 0"
    if settings.disk_cache_gb or settings.disk_cache_override_num_blocks:
        why = "its directory has another disk tier; kvbm doctor says what to do"
    lines = [f"{store.path} is not used: {why}" for store in stores if store.is_own]
    if others := [store.path for store in stores if not store.is_own]:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        lines.append(
            f"{others[0]}{more} is not used: it is of another host's name; kvbm doctor says what "
            "to do"
        )
    return lines


def _used(directory: Path, settings: Settings) -> set[str]:
    """Return the names of the stores that disk tiers of these settings have in a directory."""
    if not settings.disk_cache_gb and not settings.disk_cache_override_num_blocks:
        return set()
    place = str(directory)
    return {
        settings.store_name(own.get("KVBM_INSTANCE", settings.instance))
        for own in processes_of("disk-tier", settings).values()
        if own.get("DYN_KVBM_DISK_CACHE_DIR", place) == place
    }


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
