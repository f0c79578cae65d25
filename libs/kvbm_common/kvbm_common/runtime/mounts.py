"""On which file system a store was in its last life: a disk that is not mounted leaves a directory
that looks empty, and what is written there fills another disk."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from kvbm_common.checksum import block_checksum

DIRECTORY = "mounts"
"""Below the state directory: a file for each store, with the mount point of its last life."""


def mount_point(path: Path) -> Path:
    """Return where the file system of a path begins, or that of the nearest one that exists.

    Raises OSError.
    """
    place = path.absolute()
    while not os.path.lexists(place):
        place = place.parent
    place = place.resolve()
    while not os.path.ismount(place):
        place = place.parent
    return place


@dataclass(frozen=True, slots=True)
class MissingMount:
    """A store whose directory is on another disk than in its last life."""

    store: Path
    last: Path
    """Where its disk was mounted."""
    now: Path
    """Where the disk is mounted that would be filled instead."""

    @property
    def found(self) -> str:
        """Say what is wrong."""
        where = f"{self.store.parent} was on the disk mounted at {self.last}"
        return f"{where}, and is on that of {self.now} now"

    @property
    def advice(self) -> str:
        """Say what to do: one that is mounted, or whose directory is made, is used at once."""
        return f"mount {self.last}, or accept this disk: mkdir -p -m 700 {self.store}"


def missing_mount(store: Path, state_dir: Path | None) -> MissingMount | None:
    """Return the facts of a store whose disk is not mounted; None: nothing suggests it.

    Then the path lies on the disk that holds the mount point. A replaced disk is no such case, nor
    is a store that exists.
    """
    if state_dir is None or os.path.lexists(store):
        return None
    try:
        last = Path(_record_of(store, state_dir).read_text())
        now = mount_point(store)
    except (OSError, ValueError):
        return None
    is_missing = now != last and last.is_relative_to(now)
    return MissingMount(store, last, now) if is_missing else None


def note_mount(store: Path, state_dir: Path | None) -> None:
    """Note where the disk of a store is mounted; nothing holds the root, so it is not noted.

    Without a place to write, the next life knows of none.
    """
    if state_dir is None:
        return
    record = _record_of(store, state_dir)
    with contextlib.suppress(OSError):
        mounted_at = mount_point(store)
        if mounted_at == mounted_at.parent:
            record.unlink(missing_ok=True)
            return
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = record.with_suffix(f".{os.getpid()}")
        new.write_text(str(mounted_at))
        new.replace(record)


def _record_of(store: Path, state_dir: Path) -> Path:
    name = f"{block_checksum(os.fsencode(store.absolute())):016x}"
    return state_dir / DIRECTORY / name
