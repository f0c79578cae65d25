"""A followed source of events: drop the old, see a gap, let events wait, request a snapshot.

```
  (new) ── made ──► CURRENT ── missed ───────► BEHIND
                     │  ▲  ▲                    │  │  ▲
                     │  │  └─ caught up, began ─┘  │  │
                left │  │ began               left │  │ missed
                     ▼  │                          ▼  │
                  ┌──────────────────────────────────────┐
                  │ GONE: holds nothing; position stays  │
                  └──────────────────────────────────────┘
  CURRENT ── began ──► CURRENT            GONE ── left ──► GONE
```

Events count by (epoch, seq). An epoch is a life of the source: it begins with nothing held, and its
first event has seq 1. A higher epoch is a new life. A lower one is if the registry names it: after
a change of the registry, epochs count from another start (`is_registered_epoch`).

Where a seq is missing the source is BEHIND: its events wait (bounded), and a snapshot is requested,
with growing pauses. What was missing comes by event, by snapshot, or by a clear of everything,
which needs no history. GONE keeps the position, so that late events of an old life are not taken
for news. What the owner holds then is less than the position says: the source `needs_snapshot`, or
a clear.

A stream that loses its last events leaves no gap: `stream_lost` makes the source BEHIND. The next
event proves that none is missing. A snapshot in flight at that time does not: it may have been made
before the loss. It is taken, the source stays BEHIND, and another one is requested. So is one that
was in flight when the owner learned of a life with a lower epoch, whose events were dropped. Where
the notice overtakes events (`loss_overtakes`), they prove nothing, not even a clear or a new life:
the stream is suspect until a snapshot comes that was requested after the loss.

The owner decides what an event does to what it holds, who requests, and where an answer goes:

    source.registered_epoch = epoch              # when the registry names a life
    if source.begin(event.epoch):
        ...                                      # what the life before held is gone
    verdict = source.take(event, now_ms, clears=isinstance(event, Cleared))
    for ready in source.ready():
        ...                                      # apply it, or call `refuse`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Generic, Protocol, TypeVar

from kvbm_common.tier.machine import Machine

DOUBLINGS_MAX = 16
"""Doublings of the pause between two requests, at most; the pause's own bound comes earlier."""


class FollowState(Enum):
    """The state of a source: whether its owner knows all that it holds."""

    CURRENT = auto()
    BEHIND = auto()
    GONE = auto()


FOLLOWED = Machine(
    "followed source",
    {
        (None, "made"): FollowState.CURRENT,
        (FollowState.CURRENT, "began"): FollowState.CURRENT,
        (FollowState.CURRENT, "missed"): FollowState.BEHIND,
        (FollowState.CURRENT, "left"): FollowState.GONE,
        (FollowState.BEHIND, "caught up"): FollowState.CURRENT,
        (FollowState.BEHIND, "began"): FollowState.CURRENT,
        (FollowState.BEHIND, "left"): FollowState.GONE,
        (FollowState.GONE, "missed"): FollowState.BEHIND,
        (FollowState.GONE, "began"): FollowState.CURRENT,
        (FollowState.GONE, "left"): FollowState.GONE,
    },
)


class Verdict(Enum):
    """The result of `take` for an event."""

    NEXT = auto()
    """`ready` has it, and perhaps others that waited for it."""
    WAITS = auto()
    FULL = auto()
    """The event would wait, and there is no room: it is missing until a snapshot has it."""
    DUPLICATE = auto()
    OLD_EPOCH = auto()


class Numbered(Protocol):
    """An event with its place in its source's stream."""

    @property
    def epoch(self) -> int:
        """Return the life of the source."""

    @property
    def seq(self) -> int:
        """Return the number in that life, from 1 on without gaps."""


Item = TypeVar("Item", bound=Numbered)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowLimits:
    """Bounds of a followed source."""

    waiting_max: int = 4_096
    """Events that wait for a snapshot."""
    retry_ms: int = 500
    """The first pause after a request that brought nothing; each next one is twice as long."""
    retry_max_ms: int = 30_000

    def __post_init__(self) -> None:
        """Assert that requests have pauses, and that an event may wait."""
        assert self.waiting_max > 0, self
        assert 0 < self.retry_ms <= self.retry_max_ms, self


@dataclass(slots=True, kw_only=True)
class Followed(Generic[Item]):
    """Position, state and waiting events of one source.

    While it is CURRENT an owner in a hurry may apply the next event by itself and move `seq` on.
    """

    limits: FollowLimits = FollowLimits()
    epoch: int = 0
    seq: int = 0
    seq_max: int = 0
    """The last event of this life that `take` has seen, whether it was applied, waits or was left
    out."""
    state: FollowState = field(default_factory=partial(FOLLOWED.next, None, "made"))
    waiting: dict[int, Item] = field(default_factory=dict)
    """Events of the present epoch that follow a gap, by seq."""
    needs_snapshot: bool = False
    """True if less is held than the position says: then no event may be applied on top."""
    loss_overtakes: bool = False
    """True if `stream_lost` may come before events that are older than the loss."""
    stream_is_suspect: bool = False
    """True if events may be lost after all that came: only a snapshot can tell."""
    suspect_from_seq: int = 0
    """The first event that may be lost and leave no gap; 0: none."""
    requested_at_ms: int | None = None
    """The time at which the snapshot in flight was requested; None: none is in flight."""
    snapshot_may_be_stale: bool = False
    """True if the snapshot in flight may lack events that were dropped or lost since."""
    is_paused: bool = False
    """True if the owner has stopped `ready` before its last event, and goes on later."""
    next_request_ms: int = 0
    """The time before which no snapshot is requested."""
    attempts: int = 0
    registered_epoch: int = 0
    """The life that the registry names; 0: none. It may have a lower epoch than a life before whose
    events are still in the stream."""

    # ---- lives -------------------------------------------------------------------------------

    def is_registered_epoch(self, epoch: int) -> bool:
        """Tell whether the registry names this life: then it may have a lower epoch."""
        assert epoch >= 0, f"{self}: epoch {epoch}"
        return 0 < epoch == self.registered_epoch

    def is_late(self, epoch: int) -> bool:
        """Tell whether events of this life were under way when the source left."""
        return self.state is FollowState.GONE and epoch <= self.epoch

    def begin(self, epoch: int) -> bool:
        """Begin another life if `epoch` is one. True: what the life before held is gone.

        If the stream is suspect, the life begins BEHIND, and a snapshot is requested at once.
        """
        if epoch <= self.epoch and not self._is_lower_life(epoch):
            return False
        self.epoch, self.seq, self.seq_max = epoch, 0, 0
        self.waiting.clear()
        self.needs_snapshot, self.is_paused = False, False
        self.attempts, self.suspect_from_seq = 0, 0
        self._move("began")
        assert self.state is FollowState.CURRENT, f"{self}: a life begins with its events"
        if self.stream_is_suspect:
            self.needs_snapshot = True
            self.fall_behind(0)
        return True

    # ---- events ------------------------------------------------------------------------------

    def take(self, event: Item, now_ms: int, *, clears: bool = False) -> Verdict:
        """Take an event, after `begin`; `clears`: the source holds nothing now, whatever it held.

        A clear of a source that is GONE is applied, and does not bring it back: a life also ends
        with a clear.
        """
        assert event.epoch <= self.epoch, f"{event} comes before its epoch has begun"
        seq = event.seq
        if event.epoch < self.epoch:
            return Verdict.OLD_EPOCH
        if seq <= self.seq or seq in self.waiting:
            return Verdict.DUPLICATE
        self.seq_max = max(self.seq_max, seq)
        if clears:
            self._jump(seq - 1)
        elif self.needs_snapshot or seq != self.seq + 1:
            self.fall_behind(now_ms)
            if len(self.waiting) >= self.limits.waiting_max:
                return Verdict.FULL
            self.waiting[seq] = event
            return Verdict.WAITS
        elif self.state is FollowState.GONE:
            self.fall_behind(now_ms)
        self.waiting[seq] = event
        return Verdict.NEXT

    def ready(self) -> Iterator[Item]:
        """Yield every event that is next; the position moves when the owner has applied it."""
        while not self.needs_snapshot and not self.is_paused:
            event = self.waiting.pop(self.seq + 1, None)
            if event is None:
                return
            assert event.epoch == self.epoch, f"{self}: an event of epoch {event.epoch} waited"
            yield event
            if not self.needs_snapshot:
                self.seq, self.needs_snapshot = event.seq, self.stream_is_suspect
                self._catch_up()

    def refuse(self, now_ms: int) -> None:
        """Pass over what `ready` has yielded: only a snapshot repairs what is missing then."""
        self.needs_snapshot = True
        self.fall_behind(now_ms)
        assert self.state is FollowState.BEHIND, f"{self}: it needs a snapshot"

    def fall_behind(self, next_request_ms: int) -> None:
        """Note that something is missing; a snapshot is requested, not before a time."""
        if self.state is not FollowState.BEHIND:
            self._move("missed")
            self.next_request_ms = next_request_ms
            self.attempts = 0

    def stream_lost(self, next_request_ms: int) -> None:
        """Note that events may be lost, and request a snapshot, not before a time.

        A source that is GONE stays so.
        """
        self.mark_snapshot_stale()
        if self.loss_overtakes:
            self.stream_is_suspect = self.needs_snapshot = True
        if self.state is FollowState.GONE:
            return
        self.fall_behind(next_request_ms)
        if self.snapshot_may_be_stale or next_request_ms < self.next_request_ms:
            self.next_request_ms = next_request_ms
        self.suspect_from_seq = max(self.seq, self.seq_max) + 1
        assert self.state is FollowState.BEHIND, f"{self}: events may be lost"

    def leave(self) -> None:
        """End this life: nothing is held, and nothing waits."""
        self.waiting.clear()
        self.needs_snapshot, self.is_paused = True, False
        self.mark_snapshot_stale()
        self._move("left")
        assert self.state is FollowState.GONE, f"{self}: it has left"

    # ---- snapshots ---------------------------------------------------------------------------

    def should_request(self, now_ms: int) -> bool:
        """Tell whether it is time to request a snapshot."""
        due = self.state is FollowState.BEHIND and now_ms >= self.next_request_ms
        return due and self.requested_at_ms is None and not self.is_paused

    def begin_request(self, now_ms: int) -> None:
        """Note that a snapshot is requested; the answer goes through `end_request`."""
        assert self.state is FollowState.BEHIND, f"{self}: it misses nothing"
        assert self.requested_at_ms is None, f"{self}: requested at {self.requested_at_ms} ms"
        self.requested_at_ms, self.snapshot_may_be_stale = now_ms, False

    def mark_snapshot_stale(self) -> None:
        """Note that a snapshot in flight, if there is one, may be older than what is known now."""
        self.snapshot_may_be_stale = self.requested_at_ms is not None

    def end_request(self) -> bool:
        """End the request in flight; False: there was none, and the answer is not for us."""
        was_in_flight = self.requested_at_ms is not None
        self.requested_at_ms = None
        return was_in_flight

    def accepts(self, epoch: int, seq: int) -> bool:
        """Tell whether a snapshot as of a position is as new as what is held."""
        return (epoch, seq) >= (self.epoch, self.seq) or self._is_lower_life(epoch)

    def restore(self, epoch: int, seq: int, now_ms: int) -> None:
        """Take a snapshot's position; `ready` has the events that follow it.

        If they leave a gap, another snapshot is requested later; after a stale one at once.
        """
        assert self.state is FollowState.BEHIND, "a snapshot of a source that misses nothing"
        is_stale, self.snapshot_may_be_stale = self.snapshot_may_be_stale, False
        self.stream_is_suspect = is_stale and self.loss_overtakes
        begun = self.begin(epoch)
        if is_stale:
            self.fall_behind(now_ms)
        elif not begun:
            self.retry_later(now_ms)
        self.suspect_from_seq = max(seq, self.seq_max) + 1 if is_stale else 0
        self._jump(seq)
        self.needs_snapshot = self.stream_is_suspect
        assert not is_stale or self.state is FollowState.BEHIND, f"{self}: a stale snapshot"

    def retry_later(self, now_ms: int) -> None:
        """Let a pause pass before the next request: the snapshot did not come, or was of no use."""
        pause_ms = self.limits.retry_ms << min(self.attempts, DOUBLINGS_MAX)
        assert pause_ms > 0, f"{self}: no pause after {self.attempts} attempts"
        self.next_request_ms = now_ms + min(pause_ms, self.limits.retry_max_ms)
        self.attempts += 1

    # ---- inside ------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant of a followed source."""
        assert self.state is FollowState.BEHIND or not self.waiting, f"{self}: no reason to wait"
        assert len(self.waiting) <= self.limits.waiting_max
        assert all(seq > self.seq for seq in self.waiting), f"{self}: an old event waits"
        is_current = self.state is FollowState.CURRENT
        if not self.needs_snapshot:
            is_next = self.seq + 1 in self.waiting
            assert self.is_paused or not is_next, f"{self}: the next event waits"
            assert not self.stream_is_suspect, f"{self}: events may be lost"
        assert not is_current or not self.needs_snapshot, f"{self}: current without a snapshot"
        has_all = self.seq >= max(self.seq_max, self.suspect_from_seq)
        assert not is_current or has_all, f"{self}: an event is missing"
        assert all(event.epoch == self.epoch for event in self.waiting.values())

    def _is_lower_life(self, epoch: int) -> bool:
        return epoch < self.epoch and self.is_registered_epoch(epoch)

    def _jump(self, seq: int) -> None:
        """Stand at `seq`: what is held is right as of then, and older events need not wait."""
        assert seq >= self.seq, f"{self}: back to {seq}"
        self.seq, self.needs_snapshot = seq, False
        for late in [number for number in self.waiting if number <= seq]:
            del self.waiting[late]
        self._catch_up()

    def _catch_up(self) -> None:
        """Make the source current again if every event that is known of is applied.

        It is called when the position has just moved.
        """
        has_all = self.seq >= max(self.seq_max, self.suspect_from_seq) and not self.waiting
        if self.state is FollowState.BEHIND and has_all and not self.needs_snapshot:
            self._move("caught up")
            self.attempts = 0

    def _move(self, event: str) -> None:
        self.state = FOLLOWED.next(self.state, event, f"epoch {self.epoch}, seq {self.seq}")
