"""Folders: the names of the objects below a directory, sorted, for pages of a listing.

Files without an object's name are left out and counted as *odd*: a page begins after the last name
of the page before it, which must be a name of an object. Files and folders that cannot be read are
left out as well, and counted as *unread*.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbm_disk_tier.objects.core.answers import age_ms
from kvbm_disk_tier.objects.core.paths import (
    DIGITS,
    is_folder,
    is_namespace,
    is_object,
    split_prefix,
)

UNFINISHED = ".unfinished-"
"""Names of files that are being written begin with it."""
UNFINISHED_MS = 3_600_000
"""An unfinished file that is older was left by a host that has died, and is removed."""
FOLDERS_KEPT = 16
"""Folders whose names are kept, while pages of them are asked for."""

IsWanted = Callable[[str], bool]


@dataclass(slots=True)
class Look:
    """The files and folders that one call has left out."""

    odd: int = 0
    unread: int = 0
    why: str = ""
    """The error of the first one that could not be read."""

    def failed(self, error: OSError) -> None:
        """Note a file or a folder that could not be read."""
        self.unread += 1
        self.why = self.why or str(error) or repr(error)


class Folders:
    """The folders below one directory. Several threads may use it at once."""

    def __init__(self, root: Path, now_ms: Callable[[], int]) -> None:
        """Keep the root without reading it; `now_ms` returns the file server's time."""
        self._root = root
        self._now_ms = now_ms
        self._kept: OrderedDict[str, Sequence[str]] = OrderedDict()
        """Directory → its names, for the next pages: a large directory has many pages."""

    def names_after(self, prefix: str, after: str, look: Look) -> Iterator[tuple[str, Path]]:
        """Yield the names with a prefix after one, in order, and their files."""
        folder, digits = split_prefix(prefix)
        if len(digits) < DIGITS:
            yield from self._walk(folder, prefix, after, look)
        else:  # The prefix names one folder, which has all names.
            yield from self._files(folder, digits[:DIGITS], prefix, after, look)

    def namespaces(self, folder: str, look: Look) -> list[str]:
        """Return the folders of the namespaces in a folder, in order."""
        names = self._names(self._root / folder, is_namespace, look, files=False)
        return [f"{folder}{name}/" for name in names]

    def _walk(self, folder: str, prefix: str, after: str, look: Look) -> Iterator[tuple[str, Path]]:
        is_fresh = not after.startswith(folder)
        in_namespace = is_namespace(Path(folder).name)
        is_wanted, end = (is_folder, "") if in_namespace else (is_namespace, "/")
        path = self._root / folder
        for name in self._entries(path, is_wanted, look, files=False, fresh=is_fresh):
            below = f"{folder}{name}{end}"
            if not (below.startswith(prefix) or prefix.startswith(below)):
                continue
            if after > below and not after.startswith(below):
                continue
            if in_namespace:
                yield from self._files(folder, name, prefix, after, look)
            else:
                yield from self._walk(below, prefix, after, look)

    def _files(
        self, folder: str, digits: str, prefix: str, after: str, look: Look
    ) -> Iterator[tuple[str, Path]]:
        def is_wanted(name: str) -> bool:
            return is_object(name, digits) or name.startswith(UNFINISHED)

        path = self._root / folder / digits
        is_fresh = not after.startswith(f"{folder}{digits}")
        names = self._entries(path, is_wanted, look, files=True, fresh=is_fresh)
        first = 0 if is_fresh else bisect_right(names, after.removeprefix(folder))
        for name in names[first:]:
            if self._is_unfinished(path, name):
                continue
            if f"{folder}{name}".startswith(prefix):
                yield f"{folder}{name}", path / name

    def _entries(
        self, path: Path, is_wanted: IsWanted, look: Look, *, files: bool, fresh: bool
    ) -> Sequence[str]:
        """Return the names in a directory, as they were when its first page was asked for."""
        key, unread = str(path), look.unread
        names = None if fresh else self._kept.get(key)
        if names is not None:
            return names
        names = self._names(path, is_wanted, look, files=files)
        if look.unread == unread:  # An incomplete list is not kept: the next page reads again.
            self._kept[key] = names
            with contextlib.suppress(KeyError):  # Another thread may have emptied it.
                while len(self._kept) > FOLDERS_KEPT:
                    self._kept.popitem(last=False)
        return names

    def _names(self, path: Path, is_wanted: IsWanted, look: Look, *, files: bool) -> list[str]:
        """Return the names of the wanted files in a directory, or of its folders, in order.

        Symbolic links are odd: a link to a folder above it would never end.
        """
        found: list[str] = []
        try:
            with os.scandir(path) as entries:
                for one in entries:
                    if _is_taken(one, is_wanted, look, files=files):
                        found.append(one.name)
        except FileNotFoundError:  # The directory was deleted meanwhile.
            pass
        except OSError as error:
            look.failed(error)
        return sorted(found)

    def _is_unfinished(self, path: Path, name: str) -> bool:
        """Tell whether a file is being written, and remove it if its writer has died."""
        if not name.startswith(UNFINISHED):
            return False
        with contextlib.suppress(OSError):
            stored_ms = (path / name).stat().st_mtime_ns // 1_000_000
            if age_ms(stored_ms, self._now_ms()) > UNFINISHED_MS:
                (path / name).unlink()
        return True


def _is_taken(one: os.DirEntry[str], is_wanted: IsWanted, look: Look, *, files: bool) -> bool:
    """Tell whether an entry is a wanted file (or folder), and count one that is odd or unread."""
    try:
        is_file = one.is_file(follow_symlinks=False)
        is_other = not is_file and not one.is_dir(follow_symlinks=False)
    except OSError as error:
        look.failed(error)
        return False
    if not is_other and is_file != files:
        return False
    is_odd = is_other or not is_wanted(one.name)
    look.odd += is_odd
    return not is_odd
