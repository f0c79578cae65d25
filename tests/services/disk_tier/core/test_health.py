"""The health of a disk: every order of successes, failures, ticks and probes."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvbm_common.tier.breaker import FAILURES_MAX, PAUSE_MAX_MS
from kvbm_disk_tier.core.effects import Effect, ProbeStore
from kvbm_disk_tier.core.health import PROBED, SLOW_MS, Cause, DiskHealth
from kvbm_disk_tier.core.messages import StoreProbed

CAUSES = st.sampled_from([cause for cause in Cause if cause is not Cause.SLOW])
STOPS_READS = (Cause.READ, Cause.SLOW)


class EveryOrder(RuleBasedStateMachine):
    """A disk whose parts fail and heal, and what its health makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.effects: list[Effect] = []
        self.counts: Counter[str] = Counter()
        self.health = DiskHealth(self.counts, self.effects.append)
        self.now_ms = 1_000
        self.rows: Counter[Cause] = Counter()
        """Failures in a row by cause, since the disk last worked or was spared."""
        self.probing = False

    @rule(cause=CAUSES)
    def fails(self, cause: Cause) -> None:
        before, reads = self.health.state, self.health.reads
        self.health.trouble(cause, "io", self.now_ms)
        assert self.health.reads <= reads, "a failure lets blocks be read again"
        self.rows[cause] += 1
        if self.rows[cause] >= FAILURES_MAX:
            assert not self.health.writes, f"{cause} has failed {self.rows[cause]} times"
            assert not (self.health.reads and cause in STOPS_READS)
        if self.health.state is not before:
            self.rows.clear()

    @rule(cause=CAUSES, slow=st.booleans())
    def goes_well(self, cause: Cause, slow: bool) -> None:
        """A slow one is a trouble; but only a row of them."""
        before = self.health.state
        took_ms = SLOW_MS if slow else SLOW_MS - 1
        self.now_ms += took_ms
        self.health.good(cause, self.now_ms - took_ms, self.now_ms)
        self.rows.pop(cause, None)
        self.rows[Cause.SLOW] = self.rows[Cause.SLOW] + 1 if slow else 0
        if self.health.state is not before:
            assert self.rows[Cause.SLOW] >= FAILURES_MAX, "a success spares nothing"
            self.rows.clear()

    @rule(ms=st.sampled_from([1, 1_000, PAUSE_MAX_MS]))
    def waits(self, ms: int) -> None:
        self.now_ms += ms
        self.health.tick(self.now_ms)
        assert len(self.effects) <= 1 - self.probing, "one probe at a time"
        self.probing = self.probing or bool(self.effects)
        self.effects.clear()

    @precondition(lambda self: self.probing)
    @rule(read=st.sampled_from(["", "", "io"]), write=st.sampled_from(["", "", "full"]))
    def is_probed(self, read: str, write: str) -> None:
        """A probe that began before the disk was spared once more ends no row."""
        self.probing = False
        counts = self.health.state in PROBED
        self.health.heard(StoreProbed(read, write), self.now_ms)
        if counts:
            self.rows.clear()
            assert self.health.reads == (not read)
            assert self.health.writes == (not read and not write)

    @invariant()
    def says_why(self) -> None:
        """Whoever asks gets a reason, exactly when blocks are not written."""
        self.health.check()
        assert self.health.writes <= self.health.reads
        assert bool(self.health.problem) != self.health.writes

    def teardown(self) -> None:
        """The disk is in order again: a pause, one probe, and it works."""
        if self.probing:
            self.is_probed("io", "")
        if not self.health.writes:
            self.waits(PAUSE_MAX_MS)
            assert self.probing, "a disk in order is found so"
            self.is_probed("", "")
        assert self.health.writes, self.health.problem


EveryOrder.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestEveryOrder = EveryOrder.TestCase


def test_a_probe_is_asked_for_after_the_pause_and_not_before() -> None:
    effects: list[Effect] = []
    health = DiskHealth(Counter(), effects.append)
    for _ in range(FAILURES_MAX):
        health.trouble(Cause.WRITE, "io", 0)
    health.tick(1_999)
    assert effects == []
    health.tick(2_000)
    assert effects == [ProbeStore()]
