"""Garbage in a service: Python's collector walks what stays once, not again and again.

A table of a million blocks has columns of a million entries. A collection that walks them takes
0.1 s, in which the service serves nothing. So what stays is *frozen*: collections leave it out. An
object that is frozen still goes when its last reference goes, but a cycle of such objects does not.

    when                                            what
    the process starts, or its service is ready     all there is, is frozen
    a collection has taken LONG_S                   what it has left is frozen
    GROWN more objects are frozen than after the    all is walked, once, in a second in which the
    last walk over all, and GROWN_PART of them      service does nothing, or after BUSY_S

Both bound the memory of cycles: each of their objects counts as one more that is frozen.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Mapping

ALLOCATIONS = 50_000
"""Python's 700 made pauses of milliseconds under load; cores make no cycles of their own."""
LONG_S = 0.003
"""Processor time of a collection whose survivors are frozen."""
GROWN = 50_000
"""Frozen objects that may be garbage: 25 MB at 500 bytes each."""
GROWN_PART = 0.25
"""Part of the frozen objects likewise, as Python has it: a table that fills is walked few times."""
LOOK_S = 30.0
"""The pause between two looks at how much is frozen."""
IDLE_PART = 0.1
"""Part of a second in which an idle service uses a processor, at most."""
BUSY_S = 600.0
"""A service that is never idle is walked after so long all the same."""

_log = logging.getLogger(__name__)


class Garbage:
    """The collector of this process, from `start` to `end`."""

    def __init__(
        self,
        *,
        long_s: float = LONG_S,
        grown: int = GROWN,
        grown_part: float = GROWN_PART,
        look_s: float = LOOK_S,
    ) -> None:
        self._long_s, self._look_s = long_s, look_s
        self._grown, self._grown_part = grown, grown_part
        self._started_s = 0.0
        self._frozen = 0
        """Objects that were frozen after the last walk over all."""

    def start(self) -> None:
        """Leave out what start-up has made, and collect less often."""
        gc.set_threshold(ALLOCATIONS)
        gc.callbacks.append(self._collected)
        self.settle()

    def end(self) -> None:
        """Leave the collector to Python, with all there is."""
        gc.callbacks.remove(self._collected)
        gc.unfreeze()

    def settle(self) -> None:
        """Leave out all there is: the service is ready, and its tables are made."""
        gc.freeze()
        self._frozen = gc.get_freeze_count()

    def is_due(self) -> bool:
        """Return whether so much was frozen since the last walk that some may be garbage."""
        grown = max(self._grown, self._grown_part * self._frozen)
        return gc.get_freeze_count() > self._frozen + grown

    def walk(self) -> None:
        """Collect all garbage, also of what is frozen, and freeze the rest."""
        before, started_s = gc.get_freeze_count(), time.thread_time()
        gc.unfreeze()
        collected = gc.collect()
        self.settle()
        took_ms = (time.thread_time() - started_s) * 1e3
        _log.info(
            "%d frozen objects walked in %.0f ms: %d were garbage", before, took_ms, collected
        )

    async def run(self) -> None:
        """Walk over all when it is due, until cancelled."""
        while True:
            await asyncio.sleep(self._look_s)
            if self.is_due():
                await self._wait_idle()
                self.walk()

    async def _wait_idle(self) -> None:
        """Wait for a second without work, but not for longer than BUSY_S."""
        until_s = time.monotonic() + BUSY_S
        while time.monotonic() < until_s:
            before_s, used_s = time.monotonic(), time.process_time()
            await asyncio.sleep(1.0)
            if time.process_time() - used_s < IDLE_PART * (time.monotonic() - before_s):
                return

    def _collected(self, phase: str, _info: Mapping[str, int]) -> None:
        """Leave out what a long collection has left; Python calls this before and after each."""
        if phase == "start":
            self._started_s = time.thread_time()
        elif time.thread_time() - self._started_s >= self._long_s:
            gc.freeze()
