"""Directories as a disk tier finds them: everything is tried for real, and nothing stays behind."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from stat import S_IWGRP, S_IWOTH

from kvbm_common.config.settings import Settings
from kvbm_common.runtime.mounts import missing_mount

from kvbm_cli.disk_stores import is_store_of
from kvbm_cli.doctor.facts import DiskFacts
from kvbm_cli.doctor.finding import Finding
from kvbm_cli.doctor.left_stores import left_stores
from kvbm_cli.looks import look_at_once

BLOCK_BYTES = 4096
"""The length with which O_DIRECT is tried, in bytes: the alignment of slots."""


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
        place=_place_of(directory, place),
    )


def _place_of(directory: Path, nearest: Path) -> tuple[int, int]:
    status = nearest.stat()
    return status.st_dev, directory.stat().st_ino if directory.exists() else 0


def without_used(facts: Sequence[DiskFacts], stores: Sequence[Path]) -> tuple[DiskFacts, ...]:
    """Leave out the stores that a disk tier uses by another path of their directory.

    `stores` are those of the tiers, in the order of the facts.
    """
    used = {(one.place, store.name) for one, store in zip(facts, stores, strict=True)}
    return tuple(
        replace(one, left=tuple(s for s in one.left if (one.place, s.path.name) not in used))
        for one in facts
    )


def silent_disk(directory: Path, waited_s: float) -> DiskFacts:
    """Return the facts of a directory at which a look has not ended."""
    return DiskFacts(
        path=directory,
        error=f"it does not answer within {waited_s:.0f} s",
        advice="Look at its disk or mount, or take it out of DYN_KVBM_DISK_CACHE_DIR.",
    )


def silent_directories(settings: Settings, *, within_s: float) -> list[Finding]:
    """Return a finding for each directory that every other look needs, and that does not answer.

    Disk tiers have directories of their own, which are looked at with what is in them.
    """
    needed = {
        "KVBM_STATE_DIR": settings.state_dir,
        "KVBM_CREDS_DIR": settings.creds_dir,
        "KVBM_RUNTIME_DIR": settings.runtime_dir,
        "KVBM_SHM_DIR": settings.shm_dir,
    }
    answered = look_at_once([partial(_ask, path) for path in needed.values()], within_s=within_s)
    return [
        Finding(
            f"directory {path}",
            "wrong",
            f"it does not answer within {within_s:.0f} s, and nothing else was looked at",
            f"Look at its disk or mount, or set {variable} to another place.",
        )
        for place, (variable, path) in enumerate(needed.items())
        if place not in answered
    ]


def _ask(directory: Path) -> None:
    with contextlib.suppress(OSError):
        os.listdir(directory)


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
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def own_bytes(directory: Path, settings: Settings) -> int:
    """Return the bytes of this host's disk stores in a directory: they may be taken again."""
    taken = 0
    stores = directory.glob(settings.store_name("*"))
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
    name = path / f"kvbm-doctor-{secrets.token_hex(8)}"  # Two settings may name one directory.
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
