"""A file system in memory that is small enough to fill."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE_BYTES = 4096


@contextmanager
def small_tmpfs(where: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a tmpfs of this size at `where`; skip the test where that is not permitted."""
    where.mkdir()
    options = f"size={size_bytes},mode=0700"
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(where)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mount.returncode:
        pytest.skip(f"mounting a tmpfs needs CAP_SYS_ADMIN: {mount.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def free_bytes(directory: Path) -> int:
    """Return how much can still be allocated there."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def fill(directory: Path) -> Path:
    """Allocate all that is free, page by page at the end; returns the file that holds it."""
    path, taken, step = directory / "filler", 0, 1 << 20
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while step >= PAGE_BYTES:
            try:
                os.posix_fallocate(fd, taken, step)
                taken += step
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                step //= 2
    finally:
        os.close(fd)
    assert free_bytes(directory) == 0
    return path
