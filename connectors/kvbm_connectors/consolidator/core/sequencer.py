"""Sequencer: one stream's batches, each once, in order, across gaps, replays and restarts.

```
          attach                      nothing more is missing
  ───────► REPLAYING ──────────────────────────────────────────► LIVE
             │    ▲    a gap · a silence · an orphan's age        │
             │    └───────────────────────────────────────────────┘
             └── failed too often, or the engine's buffer no longer reaches back:
                 what we knew is LOST, and we go on with what there is
```

While a replay is wanted or in flight, live batches wait (bounded). The first replay begins at 0,
because an engine may have lived for long before we came. A batch with an old number is a duplicate
if its time stamp is the one that we remember; otherwise the publisher has restarted (RESTARTED).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import Enum, auto

from kvbm_common.wire.engine_events import EngineBatch

from kvbm_connectors.consolidator.core.messages import ConsolidatorLimits

RECENT_MAX = 4_096
"""Sequence numbers whose time stamps are remembered."""


class Sign(Enum):
    """A sign that `Sequencer` puts between batches."""

    LOST = auto()
    """Batches before the next one will never come: forget what was built on them."""
    RESTARTED = auto()
    """The engine's publisher has begun again: everything belongs to another life."""


Ready = list[EngineBatch | Sign]


class Sequencer:
    """Puts the batches of one stream in order."""

    def __init__(
        self, limits: ConsolidatorLimits, drops: Counter[str], *, replayable: bool, now_ms: int
    ) -> None:
        assert now_ms >= 0, f"a stream begins at {now_ms} ms"
        self._limits = limits
        self._replayable = replayable
        self._drops = drops
        self.next_seq = 0
        self.replay = 0
        """The number of the replay in flight; 0 without one."""
        self._wanted = True
        """A replay is to be asked for at the next `poll`."""
        self._retry_at_ms = 0
        self._attempts = 0
        self._asked_from = 0
        """The first sequence number that the last replay was asked for."""
        self._asked_for_gap = False
        """The gap was there when the replay was asked for: the engine must have what is in it."""
        self._replay_began = False
        """The replay in flight has brought a batch."""
        self._pending: dict[int, EngineBatch] = {}
        """Sequence number → a batch that waits for one before it."""
        # Ordered: of a plain dict whose front was deleted, the first entry is not found at once.
        self._recent: OrderedDict[int, float] = OrderedDict()
        """Sequence number → time stamp of its batch. A publisher that restarts gives it another."""
        self._latest_ts = 0.0
        self._heard_ms = now_ms
        """The time at which the last live batch came, or the last probe left."""
        self._probe_ms = limits.probe_after_ms

    @property
    def pending_count(self) -> int:
        """Batches that wait after a gap."""
        return len(self._pending)

    @property
    def replaying(self) -> bool:
        """Tell whether live batches wait for a replay."""
        return self._wanted or self.replay != 0

    @property
    def is_live(self) -> bool:
        """Tell whether no batch waits for another, and no replay is asked for."""
        return not self._pending and not (self._replayable and self.replaying)

    def want_replay(self) -> bool:
        """Ask the engine at the next `poll` what we missed; False if it cannot be asked."""
        self._wanted = self._wanted or self._replayable
        return self._replayable

    def read_again(self, since_s: float) -> bool:
        """Ask the engine again, at the next `poll`, for what it has published since a time; False
        if it cannot be asked. If all that is remembered is younger, it is asked for everything."""
        if not self._replayable:
            return False
        younger = [seq for seq, ts in self._recent.items() if ts >= since_s]
        is_all = len(younger) == len(self._recent)
        self.next_seq = 0 if is_all else min([self.next_seq, *younger])
        assert self.next_seq >= 0, f"batch {self.next_seq} is asked for again"
        self._wanted, self._attempts, self._retry_at_ms = True, 0, 0
        self._replay_began = True  # One that is in flight began later: it proves no loss.
        return True

    def poll(self, now_ms: int, number: int) -> int | None:
        """Return the first sequence number to ask for, or None while it is not time to ask. With a
        number returned, replay `number` is in flight."""
        assert number > 0, "0 stands for no replay"
        if self.replay or not self._replayable:
            return None
        if not self._wanted and now_ms - self._heard_ms >= self._probe_ms:
            self._wanted, self._heard_ms = True, now_ms
            self._probe_ms = min(2 * self._probe_ms, self._limits.probe_every_max_ms)
        if not self._wanted or now_ms < self._retry_at_ms:
            return None
        self._wanted, self._asked_from = False, self.next_seq
        self._asked_for_gap = bool(self._pending)
        self.replay, self._replay_began = number, False
        return self.next_seq

    def take_live(self, seq: int, batch: EngineBatch, now_ms: int) -> Ready:
        """Take a batch that came from the PUB; returns what is in order now."""
        self._heard_ms, self._probe_ms = now_ms, self._limits.probe_after_ms
        ready: Ready = []
        if seq == self.next_seq:
            ready = self._accept(seq, batch)
            ready += self._drain() if self._pending else []
        elif self.replaying:
            self._pend(seq, batch)
        else:
            ready = self._out_of_order(seq, batch)
        return self._give_up(ready) if self._wanted and not self._replayable else ready

    def take_replayed(self, seq: int, batch: EngineBatch) -> Ready:
        """Take a batch that came from the replay in flight; returns what is in order now.

        If the first one is later than asked, the engine's buffer no longer reaches back. A hole
        after that was made on the way (a ROUTER drops what a slow reader does not take) and is
        asked for again.
        """
        assert self.replay, f"batch {seq} of a replay, and no replay is in flight"
        is_first, self._replay_began = not self._replay_began, True
        if seq < self.next_seq:
            return []
        if seq > self.next_seq and not is_first:
            self._pend(seq, batch)
            return []
        ready: Ready = [Sign.LOST] if seq > self.next_seq else []
        return ready + self._accept(seq, batch)

    def replay_done(self) -> Ready:
        """End the replay in flight, and go on with what waited.

        A replay that brought nothing proves a loss only if the batches after the gap had come
        before it was asked for: else the engine may have answered before it published them.
        """
        assert self.replay, "no replay is in flight"
        self.replay, self._attempts = 0, 0
        ready = self._drain()
        if self._asked_for_gap and self._pending and self.next_seq == self._asked_from:
            return self._give_up(ready)
        self._wanted = self._wanted or bool(self._pending)
        return ready

    def replay_failed(self, now_ms: int) -> Ready:
        """End the replay in flight, which brought nothing, or no more: retry, or do without."""
        assert self.replay, "no replay is in flight"
        self.replay = 0
        self._attempts += 1
        assert self._attempts <= self._limits.replay_attempts_max, f"attempt {self._attempts}"
        if self._attempts < self._limits.replay_attempts_max:
            self._wanted = True
            self._retry_at_ms = now_ms + self._limits.replay_retry_ms * self._attempts
            return []
        self._attempts = 0
        return self._give_up(self._drain())

    def _out_of_order(self, seq: int, batch: EngineBatch) -> Ready:
        assert not self.replaying, f"batch {seq} waits for replay {self.replay}"
        if seq > self.next_seq:
            self._pend(seq, batch)
            self._wanted = True
            return []
        if self._is_duplicate(seq, batch):
            self._drops["duplicate"] += 1
            return []
        return [Sign.RESTARTED]

    def _accept(self, seq: int, batch: EngineBatch) -> Ready:
        assert seq >= self.next_seq, f"batch {seq} is before {self.next_seq}: it was taken"
        self.next_seq = seq + 1
        self._latest_ts = max(self._latest_ts, batch.ts)
        self._recent[seq] = batch.ts
        if len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)
        assert len(self._recent) <= RECENT_MAX, f"{len(self._recent)} time stamps are remembered"
        return [batch]

    def _is_duplicate(self, seq: int, batch: EngineBatch) -> bool:
        remembered = self._recent.get(seq)
        return batch.ts <= self._latest_ts if remembered is None else batch.ts == remembered

    def _pend(self, seq: int, batch: EngineBatch) -> None:
        assert seq != self.next_seq, f"batch {seq} is the next one, and would wait"
        if len(self._pending) < self._limits.pending_batches_max:
            self._pending.setdefault(seq, batch)
        else:
            self._drops["pending_full"] += 1

    def _drain(self) -> Ready:
        """Return what waited and is in sequence now; leave out what the replay has brought too."""
        ready: Ready = []
        for seq in sorted(self._pending):
            batch = self._pending[seq]
            if seq > self.next_seq:
                break
            del self._pending[seq]
            if seq == self.next_seq:
                ready += self._accept(seq, batch)
            elif not self._is_duplicate(seq, batch):
                return [*ready, Sign.RESTARTED]
        assert self.next_seq not in self._pending, f"batch {self.next_seq} is next, and waits"
        return ready

    def _give_up(self, ready: Ready) -> Ready:
        """Give up on what is missing, which cannot be had, and go on after the gap."""
        assert not self.replay, f"replay {self.replay} may still bring {self.next_seq}"
        self._wanted = False
        if not self._pending:
            return ready
        first = min(self._pending)
        if first > self.next_seq:
            ready.append(Sign.LOST)
            self.next_seq = first
        ready += self._drain()
        self._wanted = bool(self._pending)
        return ready
