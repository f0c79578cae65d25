"""Whether a disk tier could use a directory: it makes what is missing, and trusts its own."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_IWGRP, S_IWOTH


def place_of(path: Path) -> Path:
    """Return a directory, or the nearest above it that exists, if this user may make it there."""
    place = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    return place if os.access(place, os.W_OK | os.X_OK) else path


def refused_for(path: Path) -> str:
    """Return why a disk tier would not open a directory that exists; `""` if it would."""
    if path.is_symlink():
        return "it is a link, which a disk tier does not follow"
    status = path.stat()
    if status.st_uid != os.geteuid():
        return f"it is of user {status.st_uid}, and not of user {os.geteuid()}"
    if status.st_mode & (S_IWGRP | S_IWOTH):
        return f"others may write to it: its mode is {status.st_mode & 0o7777:o} (chmod go-w)"
    return ""
