"""A mounted file system that never answers, as a disk or an NFS server in trouble."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def hung_mount(where: Path) -> Iterator[Path]:
    """Mount a FUSE at `where` whose server takes no request; skip where that is not permitted.

    At the end whatever waits there gets an error, and the directory below is there again.
    """
    where.mkdir()
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"there is no FUSE here: {error}")
    try:
        options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
        if _libc.mount(b"hung", os.fsencode(where), b"fuse", 0, options):
            pytest.skip(f"mounting needs CAP_SYS_ADMIN: {os.strerror(ctypes.get_errno())}")
    except BaseException:
        os.close(fd)
        raise
    try:
        yield where
    finally:
        os.close(fd)
        subprocess.run(["umount", "--lazy", str(where)], check=True)
