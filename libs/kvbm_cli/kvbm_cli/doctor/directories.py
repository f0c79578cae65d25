"""Directories as a disk tier finds them: everything is tried for real, and nothing stays behind."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from pathlib import Path
from stat import S_IWGRP, S_IWOTH

from kvbm_common.config.settings import Settings
from kvbm_common.runtime.mounts import missing_mount

from kvbm_cli.disk_stores import is_store_of
from kvbm_cli.doctor.facts import DiskFacts
from kvbm_cli.doctor.left_stores import left_stores

BLOCK_BYTES = 4096
"""What O_DIRECT is tried with: the alignment of our slots."""


def disk_facts(directory: Path, store: Path, settings: Settings) -> DiskFacts:
    """Look at a directory for a disk, below which a tier opens `store` or makes it."""
    if missing := missing_mount(store, settings.state_dir):
        return DiskFacts(path=directory, error=missing.found, advice=missing.advice)
    # A store is tried itself: its tier needs no right beside it.
    place = _nearest(store)
    where = f"{place}: " if place != directory else ""
    try:
        refused = refused_for(store) if place == store else ""
        if refused:
            return DiskFacts(path=directory, error=where + refused)
        with tempfile.TemporaryFile(dir=place, prefix="kvbm-doctor-") as file:
            allocates = _allocates(file.fileno())
    except OSError as error:
        return DiskFacts(path=directory, error=where + (error.strerror or str(error)))
    return DiskFacts(
        path=directory,
        free_bytes=free_bytes(place),
        own_bytes=own_bytes(directory, settings),
        direct=_direct_works(place),
        allocates=allocates,
        will_be_made=not directory.exists(),
        left=left_stores(directory, settings),
    )


def refused_for(store: Path) -> str:
    """Return why a disk tier would not open a store that exists; `""` if it would.

    What is above it may be a link, and may be written to by others.
    """
    if store.is_symlink():
        return "it is a link, which a disk tier does not follow"
    status = store.stat()
    if status.st_uid != os.geteuid():
        return f"it is of user {status.st_uid}, and not of user {os.geteuid()}"
    if status.st_mode & (S_IWGRP | S_IWOTH):
        return f"others may write to it: its mode is {status.st_mode & 0o7777:o} (chmod go-w)"
    return ""


def free_bytes(path: Path) -> int:
    """Return what is free on the file system of a path; 0 where it cannot be asked."""
    try:
        status = os.statvfs(path)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def own_bytes(directory: Path, settings: Settings) -> int:
    """Return the bytes of this host's disk stores in a directory: they may be taken again."""
    taken = 0
    stores = directory.glob(f"kvbm-{settings.host}-*")
    for store in (path for path in stores if is_store_of(path, settings)):
        for file in store.rglob("*"):
            with contextlib.suppress(OSError):
                taken += file.stat().st_blocks * 512
    return taken


def _nearest(path: Path) -> Path:
    """Return a path, or the nearest above it that exists: what is missing is made there."""
    return next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))


def _allocates(fd: int) -> bool:
    try:
        os.posix_fallocate(fd, 0, BLOCK_BYTES)
    except OSError:
        return False
    return True


def _direct_works(path: Path) -> bool:
    name = path / f"kvbm-doctor-{os.getpid()}"
    try:
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError:
        name.unlink(missing_ok=True)  # Some file systems make it before they refuse.
        return False
    name.unlink()
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as page:  # Aligned, as O_DIRECT wants it.
            return os.write(fd, page) == BLOCK_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)
