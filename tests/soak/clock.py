"""The wall clock of a soak: an operator sets it, and every process of the stack follows at once.

A process follows a file with an offset, in `site/sitecustomize.py`. Its `time.time`, `datetime.now`
and relatives are shifted by it; monotonic clocks are not, as with a host whose clock is set. NATS
and the bucket's server keep the right time, as on other hosts.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from pathlib import Path

import time_machine

VARIABLE = "KVBM_SOAK_CLOCK"
"""The file; only soaks know it."""
POLL_S = 0.02
OFFSET = struct.Struct("<q")


class WallClock:
    """How far the clock is off, in seconds, in a file that processes share."""

    def __init__(self, path: Path) -> None:
        """Open the file; a new one has the right time."""
        with path.open("ab") as file:
            if not file.tell():
                file.write(OFFSET.pack(0))
        with path.open("r+b") as file:
            self._offset = mmap.mmap(file.fileno(), OFFSET.size)

    @property
    def offset_s(self) -> int:
        (found,) = OFFSET.unpack(self._offset[:])
        return int(found)

    def step(self, seconds: int) -> None:
        """Set the clock forwards or back."""
        self._offset[:] = OFFSET.pack(self.offset_s + seconds)


def follow() -> None:
    """Have this process's clock follow the file that the environment names."""
    clock = WallClock(Path(os.environ[VARIABLE]))
    threading.Thread(target=_follow, args=(clock,), name="soak-clock", daemon=True).start()


def _follow(clock: WallClock) -> None:
    """Shift time whenever the offset has changed."""
    now_s, traveller, offset_s = time.time, None, 0
    while True:
        if clock.offset_s != offset_s:
            if traveller is not None:
                traveller.stop()
            offset_s, traveller = clock.offset_s, None
            if offset_s:
                traveller = time_machine.travel(now_s() + offset_s, tick=True)
                traveller.start()
        time.sleep(POLL_S)
