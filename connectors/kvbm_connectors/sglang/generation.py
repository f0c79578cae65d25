"""Generations: how `clear` makes all that was stored so far unreachable, on this host.

A generation is a few random bytes in a file of the state directory, and part of every page's
name. With another one, nothing that was stored before is found again, and eviction removes it. That
takes as long for a terabyte as for nothing, and a page that is on its way in cannot come back.

An engine usually clears because its weights changed, and then computes something else than its
namespace says. After a restart it has its first weights again, and reads the same file. So a
process that has cleared adds its own life to each name.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import Counter
from pathlib import Path

from kvbm_connectors.sglang import engine_life

log = logging.getLogger(__name__)

GENERATION_BYTES = 8
DIRECTORY = "sglang"
CLEARED: Counter[Path] = Counter()
"""Generation → times that this process has ended it. Pages stored since are found by this life
alone."""
SEEN: set[Path] = set()
"""Files that this process has read."""
IN_MEMORY = (0, 0)
"""The stamp of a generation without a file."""


def unwritable(state_dir: Path) -> str:
    """Return why no generation can be begun in this directory; `""` where one can."""
    probe = state_dir / DIRECTORY / f".probe-{secrets.token_hex(4)}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        return str(error)
    return ""


class Generation:
    """The generation of one namespace. Every engine of the host sees it change."""

    def __init__(self, state_dir: Path, namespace: bytes, life: bytes | None = None) -> None:
        """Add `life` to the names of pages stored after a `clear`; None: this process's life."""
        self._life = engine_life.LIFE if life is None else life
        self._path = state_dir / DIRECTORY / f"{namespace.hex()[:32]}.generation"
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._value = b""

    def read(self) -> bytes:
        """Return the present generation; read the file again when it is another one. Empty before
        any `clear`.

        Raises OSError when the file is there and cannot be read: what was cleared must not come
        back. A file that is lost begins another generation, for the same reason.
        """
        with self._lock:
            own = CLEARED[self._path]
            try:
                found = os.stat(self._path)
            except (FileNotFoundError, NotADirectoryError):
                if self._stamp is None and not own:
                    return b""
                if self._stamp != IN_MEMORY:
                    self._begin_again()
            else:
                self._load(found)
            return self._value + self._life + own.to_bytes(4, "big") if own else self._value

    def _load(self, found: os.stat_result) -> None:
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp != self._stamp:
            self._value, self._stamp = self._path.read_bytes(), stamp
            SEEN.add(self._path)

    def _begin_again(self) -> None:
        """Replace a file that is lost. Where none can be written, go on in memory: the life and the
        count of this process name what it stores, and random bytes if the file had been there."""
        try:
            self._begin()
            self._load(os.stat(self._path))
            log.warning("%s was lost: nothing from before is found again", self._path)
        except OSError as error:
            self._value = secrets.token_bytes(GENERATION_BYTES) if self._path in SEEN else b""
            self._stamp = IN_MEMORY
            log.warning(
                "%s cannot be written: until it is there, this process finds only pages that it "
                "stores from now on: %s", self._path, error,
            )  # fmt: skip

    def renew(self) -> None:
        """Begin another one, and name this process in it. Raises OSError: then this process finds
        nothing from before, and others do."""
        CLEARED[self._path] += 1
        self._begin()

    def _begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(f".{secrets.token_hex(4)}")
        try:
            draft.write_bytes(secrets.token_bytes(GENERATION_BYTES))
            os.replace(draft, self._path)
        finally:
            draft.unlink(missing_ok=True)
