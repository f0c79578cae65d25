"""Generations: how `clear` makes all that was stored so far unreachable, on this host.

A generation is a few random bytes in a file of the state directory, and part of every page's
name. Another one, and nothing that was stored before is found again; eviction takes it. That is as
fast for a terabyte as for nothing, and a page that is on its way in cannot come back.

Who clears may have updated its weights, and is then no longer what its namespace says. Its next
life, with the weights of its start, reads the same file. So the names of a process that has cleared
hold that process as well.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from collections import Counter
from pathlib import Path

log = logging.getLogger(__name__)

GENERATION_BYTES = 8
DIRECTORY = "sglang"
LIFE = secrets.token_bytes(8)
"""The life of this rank's process."""
CLEARED: Counter[Path] = Counter()
"""How often this process has ended each generation: what it stores since is found by its life
alone."""
SEEN: set[Path] = set()
"""Files that this process has read."""
RUN = "SGLANG_RUN_ID"
"""A variable that SGLang draws for each engine before it starts the ranks' processes."""
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


def life_of_engine() -> bytes:
    """Return the same bytes in all ranks' processes of an engine, and in no other engine.

    SGLang draws a number for each run of an engine. Without one, its first process began them: not
    so with Ray, whose processes begin several engines. Where that process cannot be seen, the life
    of this process: no page of another is found then.
    """
    if run := os.environ.get(RUN):
        return hashlib.blake2b(run.encode(), digest_size=8).digest()
    parent = os.getppid()
    try:
        began = Path(f"/proc/{parent}/stat").read_bytes().rpartition(b")")[2].split()[19]
    except OSError:  # It is in another PID namespace, or hidden.
        return LIFE
    return hashlib.blake2b(b"%d %b" % (parent, began), digest_size=8).digest()


class Generation:
    """The generation of one namespace. Every engine of the host sees it change."""

    def __init__(self, state_dir: Path, namespace: bytes, life: bytes | None = None) -> None:
        """Name what is stored after a `clear` of this process by `life` as well; None: its own."""
        self._life = LIFE if life is None else life
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
