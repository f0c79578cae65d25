"""A source as the index knows it: a position that never goes back, and events that wait.

```
         seq 1 of a new epoch                     the next event
  (new) ─────────────────────► CURRENT ◄──────────────────────────┐
    │                             │ a hole in seq                  │ what was missing came, by
    │ any other seq               ▼                                │ event, snapshot or clear
    └──────────────────────────► BEHIND ──────────────────────────┘
                                  ▲  │ registry: gone
                  an event, or    │  ▼
                  registry: seen  └ GONE (holds nothing; the position stays)
```

While a source is BEHIND its events wait (bounded), and a snapshot is asked for again and again with
growing pauses. GONE keeps the position, so that what an old life still has in the stream is not
taken for news; but then what we hold is not what the position says (`hollow`), and only a snapshot
or a clear makes it so again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvbm_index.messages import AnyEvent, Limits, SourceKey


class State(Enum):
    """What the index may believe of a source."""

    CURRENT = auto()
    BEHIND = auto()
    GONE = auto()


@dataclass(slots=True)
class Source:
    """Position, state and waiting events of one source."""

    key: SourceKey
    epoch: int = 0
    seq: int = 0
    state: State = State.CURRENT
    waiting: dict[int, AnyEvent] = field(default_factory=dict)
    """Events of the present epoch behind a hole, by seq."""
    hollow: bool = False
    """What we hold is less than the position says: no event may be applied on top."""
    asked_at_ms: int | None = None
    """When the snapshot that flies was asked for."""
    ask_at_ms: int = 0
    """Not before this is a snapshot asked for."""
    attempts: int = 0
    registered: bool = False
    unregistered_since_ms: int = 0

    def fall_behind(self, ask_at_ms: int) -> None:
        """Something is missing: ask for a snapshot, not before a time."""
        if self.state is not State.BEHIND:
            self.state = State.BEHIND
            self.ask_at_ms = ask_at_ms
            self.attempts = 0

    def catch_up(self) -> None:
        """Nothing is missing."""
        assert not self.waiting, "events wait although nothing is missing"
        assert not self.hollow, "something is missing"
        self.state = State.CURRENT
        self.attempts = 0

    def retry_later(self, now_ms: int, limits: Limits) -> None:
        """The snapshot did not come, or was of no use."""
        self.asked_at_ms = None
        self.ask_at_ms = now_ms + min(
            limits.retry_ms << min(self.attempts, 16), limits.retry_max_ms
        )
        self.attempts += 1

    def begin(self, epoch: int) -> None:
        """Another life: its first event will have seq 1."""
        assert epoch > self.epoch, (self.key, self.epoch, epoch)
        self.epoch, self.seq = epoch, 0
        self.waiting.clear()
        self.state, self.hollow = State.CURRENT, False
        self.attempts = 0

    def jump(self, seq: int) -> None:
        """What is held is now the truth as of `seq`; older events need not wait any more."""
        assert seq >= self.seq, (self.key, self.seq, seq)
        self.seq, self.hollow = seq, False
        if self.waiting:
            for late in [number for number in self.waiting if number <= seq]:
                del self.waiting[late]

    def leave(self) -> None:
        """The registry says that this life is over."""
        self.waiting.clear()
        self.state, self.hollow = State.GONE, True

    def should_ask(self, now_ms: int) -> bool:
        """Whether it is time to ask for a snapshot."""
        due = self.state is State.BEHIND and now_ms >= self.ask_at_ms
        return due and self.asked_at_ms is None

    def check(self, limits: Limits) -> None:
        """Every invariant."""
        assert self.state is State.BEHIND or not self.waiting, f"{self.key}: nothing to wait for"
        assert len(self.waiting) <= limits.buffer_events_max
        assert all(seq > self.seq for seq in self.waiting), f"{self.key}: nothing waits in vain"
        assert self.state is not State.CURRENT or not self.hollow, f"{self.key}: hollow"
        assert all(event.epoch == self.epoch for event in self.waiting.values())
