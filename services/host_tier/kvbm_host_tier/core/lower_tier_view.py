"""The disk view: which blocks the disk tiers (or object tiers) of this host have announced.

It is a hint. A block that is wrongly in it costs a failed fill, one that is missing a recompute.
Each instance is followed by the rule of `kvbm_common/tier/follow.py`, with one difference: an event
behind a gap is applied at once, and once more when it is next. A block whose fill failed is
forgotten when the disk tier does not have it, and left alone for a while otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import assert_never

from kvbm_common.errors import KvbmError
from kvbm_common.identity import SequenceHash, hashes_from_hex
from kvbm_common.tier.departures import Departures
from kvbm_common.tier.follow import Followed, FollowLimits, FollowState, Verdict
from kvbm_common.wire.events import Cleared, Event, Removed, Stored, Tier
from kvbm_common.wire.verbs import SnapshotReply

from kvbm_host_tier.core.messages import AskDiskSnapshot

LIMITS = FollowLimits(waiting_max=4_096, retry_ms=500, retry_max_ms=30_000)
AVOID_MS = 30_000
"""A disk in trouble is not asked for the same block by every request, and is asked again later."""
STARTING_MS = 500
"""It had not mapped our arena yet, and asks for it once a second: no fault of the block's."""
AVOID_MAX = 65_536
AWAY_MAX = 1_048_576
"""Names of blocks; they were in the view before, so this is no memory that was not taken."""


class LowerTierView:
    """Block → the instance of the disk tier that has it. One view for each medium."""

    def __init__(self, tier: Tier = "disk") -> None:
        self._tier: Tier = tier
        self._instance: dict[SequenceHash, str] = {}
        self._sources: dict[str, Followed[Event]] = {}
        """By instance, in the order in which they joined."""
        self._avoid: OrderedDict[SequenceHash, int] = OrderedDict()
        """Block whose fill failed → when it may be asked for again."""
        self._away: set[SequenceHash] = set()
        """What instances had that are away now: to explain misses, nothing else."""
        self.fates = Departures()
        """What became of the blocks that have left, as far as events have told."""

    def __contains__(self, name: SequenceHash) -> bool:
        return name in self._instance

    def missing(self, names: Iterable[SequenceHash]) -> list[SequenceHash]:
        """Return those names that no disk tier has."""
        known = self._instance
        return [name for name in names if name not in known]

    def __len__(self) -> int:
        return len(self._instance)

    @property
    def is_followed(self) -> bool:
        """Some instance has said something, or is being asked."""
        return bool(self._sources)

    @property
    def instances(self) -> list[str]:
        """Those that are there, whether they have told what they hold or not."""
        return list(self._sources)

    def has_never_had(self, names: Collection[SequenceHash]) -> bool:
        """Return whether nothing is known of any of these names."""
        known = (self._instance.keys(), self._away)
        return self.fates.knows_none_of(names) and all(one.isdisjoint(names) for one in known)

    def is_away(self, name: SequenceHash) -> bool:
        """Return whether an instance had this block that is away."""
        return name in self._away

    def epoch(self, instance: str) -> int:
        """Return the life of a disk tier that we know of, or 0."""
        source = self._sources.get(instance)
        return source.epoch if source is not None else 0

    def usable(self, name: SequenceHash, now_ms: int) -> bool:
        """Return whether it is worth while to ask for this block now."""
        return self.source(name, now_ms) is not None

    def source(self, name: SequenceHash, now_ms: int) -> str | None:
        """Return the instance to ask for this block now; None: it is not worth while."""
        instance = self._instance.get(name)
        avoided = instance is not None and self._avoid and now_ms < self._avoid.get(name, now_ms)
        return None if avoided else instance

    def forget(self, name: SequenceHash) -> None:
        """Forget a block that the disk tier does not have, until it is announced again."""
        self._instance.pop(name, None)

    def avoid(self, name: SequenceHash, now_ms: int, *, for_ms: int = AVOID_MS) -> None:
        """Leave a block alone for a while: a fill of it has failed, but it may be there."""
        self._avoid.pop(name, None)
        self._avoid[name] = now_ms + for_ms
        while len(self._avoid) > AVOID_MAX:
            self._avoid.popitem(last=False)

    def joined(self, instance: str, now_ms: int = 0) -> list[AskDiskSnapshot]:
        """Note a disk tier that has joined, and ask what it holds."""
        source = self._source_of(instance)
        source.fall_behind(now_ms)
        source.ask_at_ms = min(source.ask_at_ms, now_ms)
        return self._ask(instance, now_ms)

    def left(self, instance: str) -> None:
        """Drop what a disk tier held, and remember it as away: the tier has left."""
        self._remember_away(instance)
        self._clear(instance)
        self._sources.pop(instance, None)

    def apply(
        self, instance: str, event: Event, now_ms: int = 0
    ) -> tuple[int, list[AskDiskSnapshot]]:
        """Take an event; returns how many blocks are new, and what to ask for after a gap."""
        source = self._source_of(instance)
        clears = isinstance(event, Cleared)
        if source.begin(event.epoch) and not clears:
            self._clear(instance)
        verdict = source.take(event, now_ms, clears=clears)
        if verdict in (Verdict.OLD_EPOCH, Verdict.DUPLICATE):
            return 0, []
        new = 0
        try:
            new = self._hear(instance, event, now_ms)
        except KvbmError:
            # Valid JSON, and no hashes in it: whatever it said, a snapshot says it as well.
            source.refuse(now_ms)
        if verdict is Verdict.FULL:
            source.refuse(now_ms)  # What is held is beyond what the position says.
        self._hold_ready(instance, source, now_ms, heard=event)
        return new, self._ask(instance, now_ms)

    def snapshot(self, instance: str, reply: SnapshotReply | None, now_ms: int = 0) -> None:
        """Apply the answer to AskDiskSnapshot; None: there was none.

        Events that have overtaken it have waited, and are applied once more on top.
        """
        source = self._sources.get(instance)
        if source is None or not source.landed() or source.state is not FollowState.BEHIND:
            return
        if reply is None or not source.accepts(reply.epoch, reply.seq):
            source.retry_later(now_ms)
            return
        try:
            runs = [run for part in reply.parts for run in part.runs]
            names = [name for run in runs for name in hashes_from_hex(run.hashes)]
        except KvbmError:
            source.retry_later(now_ms)
            return
        source.restore(reply.epoch, reply.seq, now_ms)
        self._clear(instance)
        self._store(instance, names)
        self._hold_ready(instance, source, now_ms)
        for _, event in sorted(source.waiting.items()):
            with suppress(KvbmError):  # A malformed one has been refused already.
                self._hold(instance, event)

    def tick(self, now_ms: int) -> list[AskDiskSnapshot]:
        """Return the questions that are due again: a quiet instance sends no event that asks."""
        return [question for instance in self._sources for question in self._ask(instance, now_ms)]

    def check(self) -> None:
        """Assert every invariant, in O(instances)."""
        for source in self._sources.values():
            source.check()

    # ---- inside ------------------------------------------------------------------------------

    def _source_of(self, instance: str) -> Followed[Event]:
        source = self._sources.get(instance)
        if source is None:
            source = self._sources[instance] = Followed(limits=LIMITS)
        return source

    def _ask(self, instance: str, now_ms: int) -> list[AskDiskSnapshot]:
        source = self._sources[instance]
        if not source.should_ask(now_ms):
            return []
        source.ask(now_ms)
        return [AskDiskSnapshot(instance, self._tier)]

    def _hear(self, instance: str, event: Event, now_ms: int) -> int:
        """Take an event for the first time; returns how many blocks are new."""
        before = len(self._instance)
        if isinstance(event, Cleared) and event.reason == "stop":
            self._remember_away(instance)
        names = self._hold(instance, event)
        if isinstance(event, Removed):
            self.fates.note(names, event.reason, now_ms)
        elif isinstance(event, Stored):
            for name in names:
                self._avoid.pop(name, None)
            return len(self._instance) - before
        return 0

    def _hold(self, instance: str, event: Event) -> list[SequenceHash]:
        """Do what an event says to the view; returns its blocks."""
        match event:
            case Stored(runs=runs):
                names = [name for run in runs for name in hashes_from_hex(run.hashes)]
                self._store(instance, names)
            case Removed(hashes=hashes):
                names = hashes_from_hex(hashes)
                for name in names:
                    if self._instance.get(name) == instance:
                        del self._instance[name]
            case Cleared():
                names = []
                self._clear(instance)
            case _:
                assert_never(event)
        return names

    def _hold_ready(
        self, instance: str, source: Followed[Event], now_ms: int, heard: Event | None = None
    ) -> None:
        """Apply what has waited, in order; `heard` has just been applied."""
        for event in source.ready():
            try:
                if event is not heard:
                    self._hold(instance, event)
            except KvbmError:
                source.refuse(now_ms)

    def _store(self, instance: str, names: list[SequenceHash]) -> None:
        self._instance.update(dict.fromkeys(names, instance))
        self._away.difference_update(names)

    def _remember_away(self, instance: str) -> None:
        gone = (name for name, owner in self._instance.items() if owner == instance)
        self._away.update(gone)
        while len(self._away) > AWAY_MAX:
            self._away.pop()

    def _clear(self, instance: str) -> None:
        kept = {name: owner for name, owner in self._instance.items() if owner != instance}
        self._instance = kept
