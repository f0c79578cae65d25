"""A followed source of events: drop the old, see a hole, let events wait, ask for a snapshot.

```
         seq 1 of a new epoch                     the next event
  (new) ─────────────────────► CURRENT ◄──────────────────────────┐
    │                             │ a hole in seq                  │ what was missing came, by
    │ any other seq               ▼                                │ event, snapshot or clear
    └──────────────────────────► BEHIND ──────────────────────────┘
                                  ▲  │ left
                  an event, or    │  ▼
                  joined again    └ GONE (holds nothing; the position stays)
```

Events count by (epoch, seq). An epoch is a life of the source: a higher one (or one that the owner
believes) begins with nothing held, and its first event has seq 1. Where a seq is missing the source
is BEHIND: its events wait (bounded), and a snapshot is asked for, with growing pauses. What was
missing comes by event, by snapshot, or by a clear of everything, which needs no history. GONE keeps
the position, so that what an old life still has in the stream is not taken for news. What the owner
holds then is less than the position says (`hollow`), and only a snapshot or a clear makes it so
again.

A stream that loses the last events leaves no hole: `lose` makes the source BEHIND. The next event
proves that none is missing. A snapshot that flew at that time does not: it may have been made
before the loss. It is taken, the source stays BEHIND, and another one is asked for. So is one that
flew when the owner heard of a life with a lower epoch, whose events were dropped. Where the
notice overtakes events (`loss_overtakes`), they prove nothing, not even a clear or a new life: the
source is `unproven` until a snapshot comes that was asked for after the loss.

The owner decides what an event does to what it holds, who asks, and where an answer goes:

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
"""How often the pause between two questions doubles at most; its own bound comes earlier."""


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
        """Return the number in that life, from 1 on without holes."""


Item = TypeVar("Item", bound=Numbered)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowLimits:
    """Bounds of a followed source."""

    waiting_max: int = 4_096
    """Events that wait for a snapshot."""
    retry_ms: int = 500
    """The first pause before a question that brought nothing is asked again; then it doubles."""
    retry_max_ms: int = 30_000

    def __post_init__(self) -> None:
        """Assert that nothing is asked for without end, and nothing waits for a bound of zero."""
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
    heard: int = 0
    """The last event of this life that `take` has seen: what was left out is missing up to here."""
    state: FollowState = field(default_factory=partial(FOLLOWED.next, None, "made"))
    waiting: dict[int, Item] = field(default_factory=dict)
    """Events of the present epoch behind a hole, by seq."""
    hollow: bool = False
    """Whether less is held than the position says: then no event may be applied on top."""
    loss_overtakes: bool = False
    """Whether `lose` may come before events that are older than the loss: they prove nothing."""
    unproven: bool = False
    """Whether events may be lost behind everything that was heard: only a snapshot can tell."""
    doubted: int = 0
    """The first event that may be lost and leave no hole; 0: none."""
    asked_at_ms: int | None = None
    """When the snapshot that flies was asked for."""
    outdated: bool = False
    """Whether the snapshot that flies may lack events that have passed us by since."""
    ask_at_ms: int = 0
    """The time before which no snapshot is asked for."""
    attempts: int = 0

    # ---- events ------------------------------------------------------------------------------

    def begin(self, epoch: int, *, believed: bool = False) -> bool:
        """Begin another life if `epoch` is one. True: what the life before held is gone.

        A lower epoch is one if it is `believed`: another registry counts from another start. A
        life that begins unproven is BEHIND, and asked at once: its events may be lost, too.
        """
        if epoch == self.epoch or (epoch < self.epoch and not believed):
            return False
        self.epoch, self.seq, self.heard = epoch, 0, 0
        self.waiting.clear()
        self.hollow, self.attempts, self.doubted = False, 0, 0
        self._move("began")
        assert self.state is FollowState.CURRENT, f"{self}: a life begins with what it says"
        if self.unproven:
            self.hollow = True
            self.fall_behind(0)
        return True

    def take(self, event: Item, now_ms: int, *, clears: bool = False) -> Verdict:
        """Take an event, after `begin`; `clears`: the source holds nothing now, whatever it held.

        A clear of a source that is GONE is applied, and does not bring it back: a life that ends
        says one, too.
        """
        assert event.epoch <= self.epoch, f"{event} comes before its epoch has begun"
        seq = event.seq
        if event.epoch < self.epoch:
            return Verdict.OLD_EPOCH
        if seq <= self.seq or seq in self.waiting:
            return Verdict.DUPLICATE
        self.heard = max(self.heard, seq)
        if clears:
            self._jump(seq - 1)
        elif self.hollow or seq != self.seq + 1:
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
        while not self.hollow and (event := self.waiting.pop(self.seq + 1, None)) is not None:
            assert event.epoch == self.epoch, f"{self}: an event of epoch {event.epoch} waited"
            yield event
            if not self.hollow:
                self.seq, self.hollow = event.seq, self.unproven
                self._catch_up()

    def refuse(self, now_ms: int) -> None:
        """Pass over what `ready` has yielded: only a snapshot repairs what it would have said."""
        self.hollow = True
        self.fall_behind(now_ms)
        assert self.state is FollowState.BEHIND, f"{self}: it needs a snapshot"

    def fall_behind(self, ask_at_ms: int) -> None:
        """Ask for a snapshot, not before a time, because something is missing."""
        if self.state is not FollowState.BEHIND:
            self._move("missed")
            self.ask_at_ms = ask_at_ms
            self.attempts = 0

    def lose(self, ask_at_ms: int) -> None:
        """Note that events may be lost, and ask for a snapshot, not before a time.

        A source that is GONE stays so.
        """
        self.outdate()
        if self.loss_overtakes:
            self.unproven = self.hollow = True
        if self.state is FollowState.GONE:
            return
        self.fall_behind(ask_at_ms)
        self.ask_at_ms = ask_at_ms if self.outdated else min(self.ask_at_ms, ask_at_ms)
        self.doubted = max(self.seq, self.heard) + 1
        assert self.state is FollowState.BEHIND, f"{self}: it believes a stream that lost events"

    def leave(self) -> None:
        """End this life: nothing is held, and nothing waits."""
        self.waiting.clear()
        self.hollow = True
        self.outdate()
        self._move("left")
        assert self.state is FollowState.GONE, f"{self}: it has left"

    # ---- snapshots ---------------------------------------------------------------------------

    def should_ask(self, now_ms: int) -> bool:
        """Tell whether it is time to ask for a snapshot."""
        due = self.state is FollowState.BEHIND and now_ms >= self.ask_at_ms
        return due and self.asked_at_ms is None

    def ask(self, now_ms: int) -> None:
        """Note that a snapshot is asked for; the answer goes through `landed`."""
        assert self.state is FollowState.BEHIND, f"{self}: it misses nothing"
        assert self.asked_at_ms is None, f"{self}: it was asked at {self.asked_at_ms} ms"
        self.asked_at_ms, self.outdated = now_ms, False

    def outdate(self) -> None:
        """Note that the snapshot that flies, if one does, may be older than what is known now."""
        self.outdated = self.asked_at_ms is not None

    def landed(self) -> bool:
        """End the question; False: none flew, and the answer is not for us."""
        flew = self.asked_at_ms is not None
        self.asked_at_ms = None
        return flew

    def accepts(self, epoch: int, seq: int) -> bool:
        """Tell whether a snapshot as of a position is as new as what is held."""
        return (epoch, seq) >= (self.epoch, self.seq)

    def restore(self, epoch: int, seq: int, now_ms: int) -> None:
        """Take a snapshot's position; `ready` has the events behind it.

        If they leave a hole, another snapshot is asked for later; after an outdated one at once.
        """
        assert self.state is FollowState.BEHIND, "a snapshot of a source that misses nothing"
        outdated, self.outdated = self.outdated, False
        self.unproven = outdated and self.loss_overtakes
        begun = self.begin(epoch)
        if outdated:
            self.fall_behind(now_ms)
        elif not begun:
            self.retry_later(now_ms)
        self.doubted = max(seq, self.heard) + 1 if outdated else 0
        self._jump(seq)
        self.hollow = self.unproven
        assert not outdated or self.state is FollowState.BEHIND, f"{self}: a snapshot of before"

    def retry_later(self, now_ms: int) -> None:
        """Ask again after a pause: the snapshot did not come, or was of no use."""
        pause_ms = self.limits.retry_ms << min(self.attempts, DOUBLINGS_MAX)
        assert pause_ms > 0, f"{self}: no pause after {self.attempts} attempts"
        self.ask_at_ms = now_ms + min(pause_ms, self.limits.retry_max_ms)
        self.attempts += 1

    # ---- inside ------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant of a followed source."""
        assert self.state is FollowState.BEHIND or not self.waiting, f"{self}: no reason to wait"
        assert len(self.waiting) <= self.limits.waiting_max
        assert all(seq > self.seq for seq in self.waiting), f"{self}: an old event waits"
        assert self.hollow or self.seq + 1 not in self.waiting, f"{self}: the next event waits"
        assert self.state is not FollowState.CURRENT or not self.hollow, f"{self}: hollow"
        assert self.hollow or not self.unproven, f"{self}: it believes a stream that lost events"
        has_all = self.seq >= max(self.heard, self.doubted)
        assert self.state is not FollowState.CURRENT or has_all, f"{self}: missed"
        assert all(event.epoch == self.epoch for event in self.waiting.values())

    def _jump(self, seq: int) -> None:
        """Stand at `seq`: what is held is the truth as of then, and older events need not wait."""
        assert seq >= self.seq, f"{self}: back to {seq}"
        self.seq, self.hollow = seq, False
        for late in [number for number in self.waiting if number <= seq]:
            del self.waiting[late]
        self._catch_up()

    def _catch_up(self) -> None:
        """Make the source current again if all is applied that was heard of it.

        It is called when the position has just moved.
        """
        has_all = self.seq >= max(self.heard, self.doubted) and not self.waiting
        if self.state is FollowState.BEHIND and has_all and not self.hollow:
            self._move("caught up")
            self.attempts = 0

    def _move(self, event: str) -> None:
        self.state = FOLLOWED.next(self.state, event, f"epoch {self.epoch}, seq {self.seq}")
