"""Garbage in a service: Python's collector walks what stays once, not again and again.

A table of a million blocks has columns of a million entries. A collection that walks them takes
0.1 s, in which the service serves nothing. So what stays is *frozen*: collections leave it out. An
object that is frozen still goes when its last reference goes, but a cycle of such objects does not.

    when                                            what
    the process starts, or its service is ready     all there is, is frozen
    `look_s` passed                                 the young are collected, and all is frozen
    a collection took LONG_S                        all there is, is frozen: that takes no time
    GROWN more objects are frozen than after the    all is walked, once, in a second in which the
    last walk or at a count since, and GROWN_PART   service does nothing, or after `busy_s`
    memory has grown likewise, by GROWN_BYTES       the same

To freeze often keeps collections short. Python counts what is made, less what is freed. A table
that turns over makes as much as it frees, so no collection comes until a burst, and then walks all.

A walk takes 0.1 s for 200,000 objects, and up to 0.5 s for an index of 1.6 million blocks in runs
of four. A count of what is frozen takes 2 to 3 ms for 100,000 objects. The service serves nothing
meanwhile, so both wait for an idle second. Services of a host have different seconds. Work makes
almost no cycles: a lookup or an event none, a connection of HTTP 7 objects, one of NATS 118.

A look takes 1 to 3 ms for 49,000 young objects, and next to nothing for the few of a usual second.

Cycles are GROWN objects at most, or GROWN_PART of what is frozen where that is more. What they hold
is GROWN_BYTES, or GROWN_PART of the memory. Those of the time until the walk come on top. Frozen
objects that have left since the last count make room for others.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

from kvbm_common.runtime.pauses import has_turn, pause_s
from kvbm_common.service.footprint import MIB, memory_bytes

ALLOCATIONS = 50_000
"""Python's 700 made pauses of milliseconds under load; cores make no cycles of their own."""
LONG_S = 0.003
"""Processor time of a collection whose survivors are frozen."""
GROWN = 50_000
"""Frozen objects that may be garbage, at least: 25 MB at 500 bytes each."""
GROWN_PART = 0.25
"""Part of the frozen objects likewise, as Python has it: a table that fills is walked few times.
Of a million objects, 250,000 may be garbage."""
GROWN_BYTES = 64 * MIB
"""Anonymous memory that few objects may hold, at least: a cycle may have large locals."""


class Pace(NamedTuple):
    """Times between the parts of the collector's work."""

    look_s: float = 1.0
    """The pause between two times that all is frozen: the most that a young collection walks."""
    count_s: float = 60.0
    """The pause between two counts of what is frozen, which waits for an idle second then."""
    idle_part: float = 0.015
    """Part of a second in which an idle service uses a processor, at most."""
    busy_s: float = 3600.0
    """A service that is never idle is counted, and perhaps walked, after so long all the same."""


PACE = Pace()
_log = logging.getLogger(__name__)


class Garbage:
    """The collector of this process, from `start` to `end`."""

    def __init__(
        self,
        *,
        name: str = "",
        place: int = 0,
        long_s: float = LONG_S,
        grown: int = GROWN,
        grown_part: float = GROWN_PART,
        grown_bytes: int = GROWN_BYTES,
        pace: Pace = PACE,
    ) -> None:
        """Have turns by the name of an instance, and by the place of its kind among services."""
        self._name, self._place, self._long_s, self._pace = name, place, long_s, pace
        self._grown, self._grown_part, self._grown_bytes = grown, grown_part, grown_bytes
        self._bytes = 0
        """The memory after the last walk over all; 0: it cannot be read. A count does not lower it:
        memory that comes and goes is no reason to walk again and again."""
        self._started_s = 0.0
        self._frozen = 0
        """The least number of frozen objects that was counted since the last walk over all."""

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
        self._frozen, self._bytes = gc.get_freeze_count(), memory_bytes()

    def is_due(self) -> bool:
        """Count what is frozen, and return whether so much has come that some may be garbage."""
        count, used = gc.get_freeze_count(), memory_bytes()
        self._frozen = min(self._frozen, count)
        objects = max(self._grown, self._grown_part * self._frozen)
        size = max(self._grown_bytes, self._grown_part * self._bytes)
        has_grown = self._bytes > 0 and used > self._bytes + size
        return has_grown or count > self._frozen + objects

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
        """Keep all frozen, and walk over all when it is due, until cancelled."""
        while True:
            await self._wait_idle()
            if self.is_due():
                self.walk()

    async def _wait_idle(self) -> None:
        """Wait for the time of a count and for an idle look; collect the young and freeze all at
        each look."""
        pace, count_at_s = self._pace, time.monotonic() + self._pace.count_s
        while True:
            before_s, used_s = time.monotonic(), time.process_time()
            await asyncio.sleep(pause_s(pace.look_s))
            gc.collect(0)  # What failed since then is often in a cycle with its traceback.
            gc.freeze()
            now_s = time.monotonic()
            is_idle = time.process_time() - used_s < pace.idle_part * (now_s - before_s)
            may_count = is_idle and has_turn(pace.look_s, of=self._name, place=self._place)
            if now_s >= count_at_s and (may_count or now_s >= count_at_s + pace.busy_s):
                return

    def _collected(self, phase: str, _info: Mapping[str, int]) -> None:
        """Leave out what a long collection has left; Python calls this before and after each."""
        if phase == "start":
            self._started_s = time.thread_time()
        elif time.thread_time() - self._started_s >= self._long_s:
            gc.freeze()
