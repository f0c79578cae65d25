"""Pending blocks: they deserve the disk and wait for their write, oldest first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.departures import Departures
from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.core.host_arenas import HostArenas
from kvbm_disk_tier.core.retries import Retries

SCAN_MAX = 256
"""Blocks that are looked at for a batch: with several host tiers a batch is of one of them."""


class PendingBlocks:
    """Block → the host tier that had it."""

    def __init__(
        self, pending_max: int, *, retries: Retries, departures: Departures, counts: Counter[str]
    ) -> None:
        assert pending_max > 0
        self.waiting: OrderedDict[SequenceHash, str] = OrderedDict()
        self._pending_max = pending_max
        self._retries = retries
        self._departures = departures
        self._counts = counts

    def add(self, name: SequenceHash, instance: str, now_ms: int) -> None:
        """Let a block wait behind all others; the oldest is dropped when there are too many."""
        assert name not in self.waiting, f"{name.hex()} waits already"
        if len(self.waiting) >= self._pending_max:
            oldest, _ = self.waiting.popitem(last=False)
            self._retries.forget([oldest])
            self._counts["dropped.write_pending_full"] += 1
            reason = "too many blocks were waiting"
            self._departures.note([oldest], "not_written", now_ms, detail=reason)
        self.waiting[name] = instance

    def next_batch(
        self, arenas: HostArenas, blocks_max: Callable[[ArenaReply], int]
    ) -> tuple[ArenaReply | None, list[SequenceHash]]:
        """Return the oldest blocks of one arena. Those whose arena is not known wait behind."""
        chosen: ArenaReply | None = None
        most = 0
        names: list[SequenceHash] = []
        for name, instance in list(islice(self.waiting.items(), SCAN_MAX)):
            arena = arenas.lender(instance)
            if arena is None:
                self.waiting.move_to_end(name)
                continue
            if chosen is None:
                chosen, most = arena, blocks_max(arena)
            if arena.epoch == chosen.epoch:
                names.append(name)
                if len(names) == most:
                    break
        assert (chosen is None) == (not names)
        assert len(names) <= most, f"{len(names)} blocks in a batch of {most}"
        return chosen, names

    def take(self, names: Iterable[SequenceHash]) -> None:
        """Take blocks out: their write begins."""
        for name in names:
            del self.waiting[name]

    def found(self, names: Iterable[SequenceHash]) -> None:
        """Drop blocks that are in the store without a write of ours."""
        for name in names:
            if name in self.waiting:
                del self.waiting[name]
                self._retries.forget([name])

    def forget(self, reason: str, now_ms: int) -> None:
        """Drop all of them: nothing new is begun."""
        assert reason, "blocks are dropped for a reason"
        self._counts[f"dropped.write_{reason}"] += len(self.waiting)
        self._departures.note(self.waiting, "not_written", now_ms, detail=reason)
        self._retries.forget(self.waiting)
        self.waiting.clear()

    def check(self) -> None:
        """Assert that the queue is bounded."""
        assert len(self.waiting) <= self._pending_max
