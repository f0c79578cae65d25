"""On which file system a store was in its last life: a disk that is not mounted leaves a directory
that looks empty, and what is written there fills another disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvbm_common.checksum import block_checksum

DIRECTORY = "mounts"
"""Below the state directory: a file for each store, with the mount point of its last life.

Its directory has one, too: the next store there may have another name.
"""


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
    """The path at which the store's disk was mounted."""
    now: Path
    """The path at which the disk is mounted that would be filled instead."""

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
        last = _last_mount(store, state_dir)
        now = mount_point(store)
    except (OSError, ValueError):
        return None
    is_missing = now != last and last.is_relative_to(now)
    return MissingMount(store, last, now) if is_missing else None


def last_noted(stores: Iterable[Path], state_dir: Path | None) -> Path | None:
    """Return the store whose mount was noted last; None: none was. No disk of theirs is asked."""
    if state_dir is None:
        return None
    noted: dict[int, Path] = {}
    for store in stores:
        with contextlib.suppress(OSError):
            noted[_record_of(store, state_dir).stat().st_mtime_ns] = store
    return noted[max(noted)] if noted else None


def note_mount(store: Path, state_dir: Path | None) -> None:
    """Note where the disk of a store is mounted; nothing holds the root, so it is not noted.

    Without a place to write, the next life knows of none.
    """
    if state_dir is None:
        return
    with contextlib.suppress(OSError):
        for path in (store.parent, store):
            _note(_record_of(path, state_dir), mount_point(path))


def _note(record: Path, mounted_at: Path) -> None:
    if mounted_at == mounted_at.parent:
        record.unlink(missing_ok=True)
        return
    record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = record.with_suffix(f".{os.getpid()}")
    new.write_text(str(mounted_at))
    new.replace(record)


def _last_mount(store: Path, state_dir: Path) -> Path:
    """Return where the disk of a store was mounted, or that of its directory. Raises OSError."""
    try:
        return Path(_record_of(store, state_dir).read_text())
    except FileNotFoundError:
        return Path(_record_of(store.parent, state_dir).read_text())


def _record_of(path: Path, state_dir: Path) -> Path:
    name = f"{block_checksum(os.fsencode(path.absolute())):016x}"
    return state_dir / DIRECTORY / name
