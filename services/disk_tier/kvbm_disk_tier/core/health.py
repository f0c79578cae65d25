"""The health of a disk: whether blocks are read from it and written to it, by what has come back.

    WORKING     blocks are read and written
    READ_ONLY   writes or the journal fail: blocks are read, none is written
    BYPASSED    reads fail, or the disk takes seconds: nothing goes there
    …_PROBED    the pause is over, and the medium tries what had failed

Troubles are counted by their cause, and only a success of the same cause ends a row: where every
block can be written and no record of it, each write that ends well would hide the journal. The
pause doubles, up to PAUSE_MAX_MS, until a block has gone well again.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import assert_never

from kvbm_common.tier.breaker import FAILURES_MAX, PAUSE_MAX_MS, PAUSE_MS
from kvbm_common.tier.machine import Machine

from kvbm_disk_tier.core.effects import Emit, ProbeStore
from kvbm_disk_tier.core.messages import (
    HealthInput,
    JournalRewritten,
    StoreProbed,
    Synchronised,
)

SLOW_MS = 5_000
"""A batch of sixteen blocks that takes a disk so long is slower than recomputing them."""
STALLED_MS = 2 * SLOW_MS
"""The time from which on a missing answer counts as a trouble with every tick."""


class HealthState(Enum):
    """The operations that may go to the disk."""

    WORKING = "working"
    READ_ONLY = "read only"
    READ_ONLY_PROBED = "read only, probed"
    BYPASSED = "bypassed"
    BYPASSED_PROBED = "bypassed, probed"


HEALTH = Machine(
    "disk health",
    {
        (None, "made"): HealthState.WORKING,
        (HealthState.WORKING, "writes fail"): HealthState.READ_ONLY,
        (HealthState.WORKING, "reads fail"): HealthState.BYPASSED,
        (HealthState.READ_ONLY, "reads fail"): HealthState.BYPASSED,
        (HealthState.READ_ONLY, "paused"): HealthState.READ_ONLY_PROBED,
        (HealthState.READ_ONLY_PROBED, "probe succeeded"): HealthState.WORKING,
        (HealthState.READ_ONLY_PROBED, "writes fail"): HealthState.READ_ONLY,
        (HealthState.READ_ONLY_PROBED, "reads fail"): HealthState.BYPASSED,
        (HealthState.READ_ONLY_PROBED, "probe has read"): HealthState.READ_ONLY,
        (HealthState.BYPASSED, "paused"): HealthState.BYPASSED_PROBED,
        (HealthState.BYPASSED_PROBED, "probe succeeded"): HealthState.WORKING,
        (HealthState.BYPASSED_PROBED, "probe has read"): HealthState.READ_ONLY,
        (HealthState.BYPASSED_PROBED, "reads fail"): HealthState.BYPASSED,
    },
)
PROBED = (HealthState.READ_ONLY_PROBED, HealthState.BYPASSED_PROBED)
READABLE = (HealthState.WORKING, HealthState.READ_ONLY, HealthState.READ_ONLY_PROBED)


class Cause(Enum):
    """The cause of a trouble; its value is the text for an operator."""

    READ = "blocks cannot be read"
    WRITE = "blocks cannot be written"
    JOURNAL = "the journal cannot be written"
    REWRITE = "the journal cannot be shortened"
    SYNC = "what was written cannot be synchronised"
    SLOW = "it is too slow"

    __hash__ = object.__hash__

    @property
    def event(self) -> str:
        """Return what a row of such troubles is for the machine."""
        return "reads fail" if self in (Cause.READ, Cause.SLOW) else "writes fail"


class DiskHealth:
    """The state of one disk. Pure: time comes in with every call."""

    def __init__(self, counts: Counter[str], emit: Emit, *, called: str = "disk") -> None:
        """Start with a disk that works; `problem` calls it what it is `called`."""
        assert called, "a disk is called something"
        self._called = called
        self.state = HEALTH.next(None, "made")
        self.reads = self.writes = True
        """Blocks may be read, and written."""
        self.problem = ""
        """The reason why blocks are not written, or not even read, for /readyz; empty: the disk
        works."""
        self._counts, self._emit = counts, emit
        self._rows: Counter[Cause] = Counter()
        self._pause_ms = PAUSE_MS
        self._probe_from_ms = 0
        self._probe_in_flight = False
        self._broken_by: Cause | None = None
        """The cause that must go well before pauses are short again; None: they are short."""

    # --- what comes back --------------------------------------------------------------------

    def good(self, cause: Cause, started_ms: int, now_ms: int) -> None:
        """Judge an operation that has gone well: it may have taken too long."""
        assert started_ms <= now_ms, f"started at {started_ms} ms, ended at {now_ms} ms"
        self._rows.pop(cause, None)
        if now_ms - started_ms >= SLOW_MS:
            self.trouble(Cause.SLOW, f"{(now_ms - started_ms) / 1000:.0f} s for a batch", now_ms)
            return
        self._rows.pop(Cause.SLOW, None)
        if self.writes and self._broken_by in (cause, Cause.SLOW):
            self._broken_by, self._pause_ms = None, PAUSE_MS

    def trouble(self, cause: Cause, why: str, now_ms: int) -> None:
        """Count a failure; after FAILURES_MAX in a row of one cause the disk is spared."""
        assert why, "a trouble has a reason"
        self._counts["disk_troubles.slow" if cause is Cause.SLOW else "disk_troubles.failed"] += 1
        self._rows[cause] += 1
        if self._rows[cause] >= FAILURES_MAX and HEALTH.has(self.state, cause.event):
            if self._broken_by is not None:
                self._pause_ms = min(2 * self._pause_ms, PAUSE_MAX_MS)
            self._broken_by = cause
            self._counts["disk_bypasses"] += 1
            self._spare(cause.event, f"{cause.value}: {why}", now_ms)

    def takes_no_blocks(self, why: str, now_ms: int) -> None:
        """Begin no write to a store that was opened and cannot be written to: it is read from."""
        assert why, "a trouble has a reason"
        if HEALTH.has(self.state, "writes fail"):
            self._broken_by = Cause.WRITE
            self._counts["disk_bypasses"] += 1
            self._spare("writes fail", f"{Cause.WRITE.value}: {why}", now_ms)

    def stalled(self, started_ms: int, now_ms: int) -> None:
        """Count a trouble for what started then, and has not come back."""
        assert started_ms <= now_ms, f"started at {started_ms} ms, and it is {now_ms} ms"
        if now_ms - started_ms >= STALLED_MS:
            waited = f"{(now_ms - started_ms) // 1000} s without an answer"
            self.trouble(Cause.SLOW, waited, now_ms)

    def heard(self, event: HealthInput, now_ms: int) -> None:
        """Judge what is neither a read nor a write."""
        match event:
            case StoreProbed():
                self._probed(event, now_ms)
            case JournalRewritten(failure):
                self._judge(Cause.REWRITE, failure, now_ms)
            case Synchronised(failure):
                self._judge(Cause.SYNC, failure, now_ms)
            case _:
                assert_never(event)

    def _judge(self, cause: Cause, failure: str, now_ms: int) -> None:
        if failure:
            self.trouble(cause, failure, now_ms)
        else:
            self.good(cause, now_ms, now_ms)

    # --- probes -----------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Have the medium try again, once the pause is over."""
        spared = HEALTH.has(self.state, "paused") and now_ms >= self._probe_from_ms
        if spared and not self._probe_in_flight:
            self._move("paused")
            self._probe_in_flight = True
            self._emit(ProbeStore())

    def _probed(self, event: StoreProbed, now_ms: int) -> None:
        """Take what a probe has found; one that began before the last failure says nothing."""
        assert self._probe_in_flight, "nothing was probed"
        self._probe_in_flight = False
        if self.state not in PROBED:
            return
        if event.read_failure or event.write_failure:
            self._pause_ms = min(2 * self._pause_ms, PAUSE_MAX_MS)
            if event.read_failure:
                self._spare("reads fail", f"{Cause.READ.value}: {event.read_failure}", now_ms)
            else:
                self._spare("probe has read", f"{Cause.WRITE.value}: {event.write_failure}", now_ms)
            return
        self._move("probe succeeded")
        self.problem = ""
        self._rows.clear()

    def _spare(self, event: str, problem: str, now_ms: int) -> None:
        self._move(event)
        assert not self.writes, f"the disk takes blocks after {event!r}: {problem}"
        spared = "is bypassed" if not self.reads else "takes no blocks"
        self.problem = f"the {self._called} {spared}: {problem}"
        self._probe_from_ms = now_ms + self._pause_ms
        self._rows.clear()

    def _move(self, event: str) -> None:
        self.state = HEALTH.next(self.state, event, self.problem)
        self.reads, self.writes = self.state in READABLE, self.state is HealthState.WORKING

    def check(self) -> None:
        """Assert every invariant of the health."""
        assert self.reads == (self.state in READABLE), self.state
        assert self.writes == (self.state is HealthState.WORKING), self.state
        assert bool(self.problem) == (not self.writes), f"{self.state}: {self.problem!r}"
        assert self._probe_in_flight or self.state not in PROBED, self.state
        assert PAUSE_MS <= self._pause_ms <= PAUSE_MAX_MS, f"a pause of {self._pause_ms} ms"
