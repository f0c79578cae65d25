"""A directory as an object store: NFS, Lustre, a volume that several hosts have mounted.

Each object is a file, written beside its place and renamed: it is there as a whole or not at all,
and no host locks anything. Answers are used only while a mark is there, a file that identifies the
store: without a mount the directory is empty, and all blocks would seem to be gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kvbm_common.runtime.loop import monotonic_ms

from kvbm_disk_tier.objects.core.answers import (
    FolderList,
    Listed,
    Page,
    age_ms,
    file_server_now_ms,
)
from kvbm_disk_tier.objects.core.paths import path_of
from kvbm_disk_tier.objects.shell.calls import Calls
from kvbm_disk_tier.objects.shell.folders import UNFINISHED, Folders, Look
from kvbm_disk_tier.objects.shell.object_store import PAGE_MAX, BucketError, BucketRefused

MARK = "kvbm-store"
"""The name of the mark, the file that identifies the store."""
MARK_TEXT = re.compile(rb"[0-9a-f]{32}")
CALL_DEADLINE_S = 10.0
"""A file server that takes longer for a folder counts as away."""
CHECK_S = 5.0
"""The interval at which an idle store's mark is read: the next listing may be minutes away."""
TRIES = 2
CLOCK_MS = 60_000
"""The time for which the measured difference to the file server's clock is used."""
REFUSALS = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EROFS)

T = TypeVar("T")


class Directory:
    """The names of one directory. Its methods belong to one event loop."""

    def __init__(
        self,
        root: Path,
        counted: Callable[[str, bool], None],
        skipped: Callable[[str, int], None],
    ) -> None:
        """Keep the root without a look at it.

        `counted(kind, ok)` is called for every later call. `skipped(kind, count)` is called for
        entries left out: `odd` (neither objects nor their folders) and `unread` (not readable).
        """
        self.where = f"directory {root}"
        self.check_s: float | None = CHECK_S
        self._root = root
        self._counted = counted
        self._skipped = skipped
        self._calls = Calls()
        self._mark = b""
        """The content of the mark when the store was opened."""
        self._mark_path = self._clock_path = root
        """Once opened: the mark, and a file that is touched to read the file server's clock."""
        self._ahead_ms = time.time_ns() // 1_000_000 - monotonic_ms()
        """The file server's clock (since 1970) less our monotonic one."""
        self._believed_until_ms = 0
        self._folders = Folders(root, self._now_ms)

    # --- the store --------------------------------------------------------------------------

    async def folders(self, prefix: str) -> FolderList:
        """Return the prefixes that go on to the next `/` below this one; raises BucketError."""

        def folders(look: Look) -> FolderList:
            found = self._folders.namespaces(prefix, look)
            return FolderList(found, look.why)

        return await self._look(folders)

    async def page(self, prefix: str, after: str) -> Page:
        """Return a page of the names with this prefix, after a given one; raises BucketError.

        Single files and folders that cannot be read are left out, and the page says so.
        """

        def page(look: Look) -> Page:
            self._set_clock()
            found: list[Listed] = []
            seen, last_name = 0, ""
            for name, path in self._folders.names_after(prefix, after, look):
                if seen == PAGE_MAX:
                    return Page(found, True, last_name, look.why)
                seen, last_name = seen + 1, name
                try:
                    status = path.stat()
                except FileNotFoundError:  # Deleted meanwhile.
                    continue
                except OSError as error:
                    look.failed(error)
                    continue
                stored_ms = status.st_mtime_ns // 1_000_000
                found.append(Listed(name, status.st_size, age_ms(stored_ms, self._now_ms())))
            return Page(found, False, last_name, look.why)

        return await self._look(page)

    async def _look(self, call: Callable[[Look], T]) -> T:
        """Make a call that looks for names, and count what it has left out."""

        def look() -> tuple[T, Look]:
            self._require_mark()
            seen = Look()
            result = call(seen)
            if seen.unread:  # The store itself may be away.
                self._require_mark()
            return result, seen

        result, seen = await self._call("list", look)
        for kind, count in (("odd", seen.odd), ("unread", seen.unread)):
            if count:
                self._skipped(kind, count)
        return result

    async def size(self, name: str) -> int | None:
        """Return the size of an object; None: no such object. Raises BucketError."""

        def size() -> int | None:
            self._require_mark()
            try:
                return (self._root / path_of(name)).stat().st_size
            except FileNotFoundError:
                return None

        return await self._call("list", size)

    async def delete(self, names: Sequence[str]) -> dict[str, str]:
        """Delete up to a page of objects; return those that are still there, and why.

        One that was not there counts as deleted. Raises BucketError if the outcome is unknown.
        """

        def delete() -> dict[str, str]:
            self._require_mark()
            left: dict[str, str] = {}
            for name in names:
                try:
                    (self._root / path_of(name)).unlink(missing_ok=True)
                except OSError as error:
                    left[name] = os.strerror(error.errno or 0)
            return left

        return await self._call("delete", delete)

    async def probe(self, prefix: str, *, write: bool) -> None:
        """Read the mark, or make the first one; with `write`, write a file as well."""

        def probe() -> None:
            if not self._root.is_dir():
                raise FileNotFoundError(errno.ENOENT, "there is no such directory")
            self._read_mark(prefix)
            if write:
                folder = self._root / prefix
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write_anew(folder / "probe")

        await self._call("put" if write else "list", probe, tries=1)

    # --- the mark ---------------------------------------------------------------------------

    def _read_mark(self, prefix: str) -> None:
        """Read the mark that identifies the store; a store without one gets one, once."""
        if self._mark:
            self._require_mark()
            return
        path = self._root / prefix.split("/", 1)[0] / MARK
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            _make_mark(path)
        self._mark, self._mark_path = self._mark_in(path), path
        self._clock_path = self._root / prefix / "clock"

    def _require_mark(self) -> None:
        if not self._mark:
            raise OSError(errno.ENOTCONN, "the store was not opened")
        try:
            found = self._mark_in(self._mark_path)
        except FileNotFoundError as error:
            text = f"{self._mark_path} is gone: is the file system mounted?"
            raise OSError(errno.ENOTCONN, text) from error
        if found != self._mark:
            raise OSError(errno.ESTALE, "this is another store than the one that was opened")

    def _mark_in(self, path: Path) -> bytes:
        """Return the content of a mark; raises OSError, or BucketError if it is no mark."""
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # So a pipe in its place does not block.
        try:
            found = os.read(fd, 64)
        finally:
            os.close(fd)
        if not MARK_TEXT.fullmatch(found):
            held = f"{found[:40]!r}" if found else "nothing"
            raise BucketError(
                f"{self._variable} cannot be used: {path} holds {held}, and should hold the 32 hex "
                "digits that say which store this is. Restore it, or remove it while no object "
                "tier uses the store: the next one to start makes a new one"
            )
        return found

    # --- the clock --------------------------------------------------------------------------

    def _set_clock(self) -> None:
        """Read the file server's clock: it stamps the files, so ages are counted by it.

        Ours may be wrong, and a block that is too old by it would be lost to every host. So would
        all blocks by a server's clock that is far ahead of ours.
        """
        own_ms = monotonic_ms()
        if own_ms < self._believed_until_ms:
            return
        path = self._clock_path
        with contextlib.suppress(OSError):  # A read-only store keeps the last difference.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch()
            stamped_ms = path.stat().st_mtime_ns // 1_000_000
            now_ms = file_server_now_ms(stamped_ms, time.time_ns() // 1_000_000)
            self._ahead_ms = now_ms - own_ms
            self._believed_until_ms = own_ms + CLOCK_MS

    def _now_ms(self) -> int:
        return monotonic_ms() + self._ahead_ms

    # --- calls ------------------------------------------------------------------------------

    async def _call(self, kind: str, call: Callable[[], T], *, tries: int = TRIES) -> T:
        for left in reversed(range(tries)):
            try:
                result = await self._try(call)
            except BucketError as error:
                self._counted(kind, False)
                if not error.retry or not left:
                    raise
            else:
                self._counted(kind, True)
                return result
        raise AssertionError("the last try returns or raises")

    @property
    def _variable(self) -> str:
        return f"KVBM_OBJECT_URL file://{self._root}"

    async def _try(self, call: Callable[[], T]) -> T:
        where = self._variable
        try:
            return await self._calls.run(call, deadline_s=CALL_DEADLINE_S)
        except TimeoutError as error:
            text = f"{where} has not answered within {CALL_DEADLINE_S:g} s"
            raise BucketError(text) from error
        except OSError as error:
            refused = error.errno in REFUSALS
            kind = BucketRefused if refused else BucketError
            raise kind(f"{where} cannot be used: {error}") from error


def _write_anew(path: Path) -> None:
    """Write a file and remove it. One that is there has its room: writing it proves nothing."""
    path.unlink(missing_ok=True)
    try:
        path.write_bytes(bytes(4096))
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _make_mark(path: Path) -> None:
    """Mark a store, unless another host was faster: it may have read its mark already."""
    text = secrets.token_hex(16)
    fresh = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
    fresh.write_text(text, encoding="ascii")
    try:
        os.link(fresh, path)
    except FileExistsError:
        pass
    except OSError:  # A file system without links.
        with contextlib.suppress(FileExistsError), path.open("x", encoding="ascii") as mark:
            mark.write(text)
    finally:
        fresh.unlink(missing_ok=True)
