"""The view of a lower tier: the blocks that this host's disk tiers, or object tiers, announced.

The view is a hint. A block that is wrongly in it costs a failed fill, a missing one a recompute.
Each instance is followed by the rule of `kvbm_common/tier/follow.py`, with one difference: an event
behind a gap is applied at once, and once more in its turn. A block whose fill has failed is
forgotten if the disk tier does not have it, and avoided for a while otherwise. Events of an
instance that has left are ignored until it joins again, or begins another life.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, KeysView
from contextlib import suppress
from typing import NamedTuple, assert_never

from kvbm_common.errors import KvbmError
from kvbm_common.identity import SequenceHash, hashes_from_hex
from kvbm_common.tier.departures import Departures
from kvbm_common.tier.failed_blocks import FailedBlocks
from kvbm_common.tier.follow import Followed, FollowLimits, FollowState, Verdict
from kvbm_common.tier.former_blocks import FormerBlocks
from kvbm_common.wire.events import Cleared, Event, Removed, Run, Stored, Tier
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply

from kvbm_host_tier.core.findable import Findable
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.messages import AskDiskSnapshot

LIMITS = FollowLimits(waiting_max=4_096, retry_ms=500, retry_max_ms=30_000)
AVOID_MS = 30_000
"""How long a block is avoided after a failed fill: a disk in trouble is not asked each time."""
STARTING_MS = 500
"""How long a block is avoided while the lower tier has not mapped our arena yet."""
AVOID_MAX = 65_536
GONE_MAX = 64
"""Instances that have left and whose position is remembered: more than a host ever has."""
AWAY_MAX = 1_048_576
"""Names of blocks of instances that are away; their memory was the view's before."""


Namespaces = frozenset[bytes]
ANY: Namespaces = frozenset()
"""The asker has no namespace: it may have the blocks of every namespace."""


class Holding(NamedTuple):
    """The instance, size and namespace of a block: one object for all blocks that share them."""

    instance: str
    block_bytes: int
    """0: the event did not say it."""
    namespace: bytes


class LowerTierView:
    """The instances of one medium, and block → the instance that has it."""

    def __init__(
        self,
        tier: Tier = "disk",
        former: FormerBlocks | None = None,
        findable: Findable | None = None,
    ) -> None:
        """Start without instances.

        `former` keeps the names of blocks that left long ago; `findable` hears of each block that
        comes or goes.
        """
        self._tier: Tier = tier
        self._findable = findable or Findable(HostTierLimits())
        self._holding: dict[SequenceHash, Holding] = {}
        self._last = Holding("", 0, b"")
        """The holding of the last event: blocks of the next event nearly always share it."""
        self._sources: dict[str, Followed[Event]] = {}
        """By instance, in the order in which they joined or left."""
        self._failed = FailedBlocks(AVOID_MAX)
        self._away: set[SequenceHash] = set()
        """Blocks of instances that are away now, to explain misses."""
        self.departures = Departures(former=former)
        """When and why blocks have left the lower tier, as its events say."""

    def __contains__(self, name: SequenceHash) -> bool:
        return name in self._holding

    def missing(self, names: Iterable[SequenceHash]) -> list[SequenceHash]:
        """Return those names that no disk tier has."""
        known = self._holding
        return [name for name in names if name not in known]

    def __len__(self) -> int:
        return len(self._holding)

    @property
    def names(self) -> KeysView[SequenceHash]:
        """Return the blocks that are known to be there."""
        return self._holding.keys()

    @property
    def is_followed(self) -> bool:
        """Whether some instance is there."""
        return bool(self.instances)

    @property
    def instances(self) -> list[str]:
        """The instances that have not left, whether they have told what they hold or not."""
        sources = self._sources.items()
        return [name for name, one in sources if one.state is not FollowState.GONE]

    def has_never_had(self, names: Collection[SequenceHash]) -> bool:
        """Return whether nothing is known of any of these names."""
        known = (self._holding.keys(), self._away)
        return self.departures.knows_none_of(names) and all(one.isdisjoint(names) for one in known)

    def is_away(self, name: SequenceHash) -> bool:
        """Return whether an instance had this block that is away."""
        return name in self._away

    def epoch(self, instance: str) -> int:
        """Return the epoch of an instance; 0: none is known."""
        source = self._sources.get(instance)
        return source.epoch if source is not None else 0

    def source(self, name: SequenceHash, now_ms: int, own: Namespaces = ANY) -> str | None:
        """Return the instance to ask for this block now.

        None: no instance has it, it is avoided, or it is in none of these namespaces.
        """
        holding = self._holding.get(name)
        if holding is None or (own and holding.namespace not in own):
            return None
        instance = holding.instance
        assert instance in self._sources, f"{name.hex()} is on {instance}, gone"
        return None if self._failed.avoids(name, now_ms) else instance

    def is_others(self, name: SequenceHash, own: Namespaces) -> bool:
        """Tell whether a block is there, in none of these namespaces."""
        holding = self._holding.get(name)
        return holding is not None and bool(own) and holding.namespace not in own

    def block_bytes(self, name: SequenceHash) -> int:
        """Return the size of a block; 0: it is not known."""
        holding = self._holding.get(name)
        return 0 if holding is None else holding.block_bytes

    def forget(self, name: SequenceHash) -> None:
        """Forget a block that the disk tier does not have, until it is announced again."""
        if self._holding.pop(name, None) is not None:
            self._findable.remove((name,))

    def avoid(self, name: SequenceHash, now_ms: int, *, for_ms: int = AVOID_MS) -> None:
        """Do not ask for a block for a while: a fill of it has failed, but it may be there."""
        assert for_ms > 0, f"{name.hex()} is avoided for {for_ms} ms"
        self._failed.add(name, now_ms + for_ms)

    def joined(self, instance: str, now_ms: int = 0) -> list[AskDiskSnapshot]:
        """Note a disk tier that has joined, and ask what it holds."""
        assert instance, f"a {self._tier} tier has a name"
        source = self._source_of(instance)
        source.fall_behind(now_ms)
        assert source.state is FollowState.BEHIND, f"{instance} has not said what it holds"
        source.ask_at_ms = min(source.ask_at_ms, now_ms)
        return self._ask(instance, now_ms)

    def left(self, instance: str, epoch: int = 0) -> None:
        """Remember the blocks of an instance that has left as away, and forget where they are."""
        self._remember_away(instance)
        self._clear(instance)
        source = self._sources.pop(instance, None)
        if source is None:
            return
        source.begin(epoch)  # Nothing of this life may have been heard yet.
        source.leave()
        self._sources[instance] = source
        gone = [name for name, one in self._sources.items() if one.state is FollowState.GONE]
        for name in gone[:-GONE_MAX]:
            del self._sources[name]

    def apply(
        self, instance: str, event: Event, now_ms: int = 0
    ) -> tuple[int, list[AskDiskSnapshot]]:
        """Take an event; returns how many blocks are new, and what to ask for after a gap."""
        source = self._source_of(instance)
        if source.state is FollowState.GONE and event.epoch <= source.epoch:
            return 0, []  # It was under way when the tier left: its blocks cannot be read.
        clears = isinstance(event, Cleared)
        if source.begin(event.epoch) and not clears:
            self._clear(instance)
        assert instance, f"{event} is of no instance"
        verdict = source.take(event, now_ms, clears=clears)
        if verdict in (Verdict.OLD_EPOCH, Verdict.DUPLICATE):
            return 0, []
        new = 0
        try:
            new = self._hear(instance, event, now_ms)
        except KvbmError:
            # An invalid hash: a snapshot will say which blocks the tier has.
            source.refuse(now_ms)
        if verdict is Verdict.FULL:
            source.refuse(now_ms)  # The view is ahead of the position: ask for a snapshot.
        self._hold_ready(instance, source, now_ms, heard=event)
        return new, self._ask(instance, now_ms)

    def snapshot(self, instance: str, reply: SnapshotReply | None, now_ms: int = 0) -> None:
        """Apply the answer to AskDiskSnapshot; None: there was no answer.

        Events newer than the snapshot have waited, and are applied once more on top of it.
        """
        source = self._sources.get(instance)
        if source is None or not source.landed() or source.state is not FollowState.BEHIND:
            return
        if reply is None or not source.accepts(reply.epoch, reply.seq):
            source.retry_later(now_ms)
            return
        try:
            alike = [(part, _names_of(part.runs)) for part in reply.parts]
        except KvbmError:
            source.retry_later(now_ms)
            return
        source.restore(reply.epoch, reply.seq, now_ms)
        assert source.epoch == reply.epoch, f"{instance} is in {source.epoch}, not {reply.epoch}"
        assert not source.hollow, f"{instance} holds less than its snapshot says"
        self._clear(instance)
        for part, names in alike:
            self._store(instance, names, part)
        self._hold_ready(instance, source, now_ms)
        for _, event in sorted(source.waiting.items()):
            with suppress(KvbmError):  # A malformed one has been refused already.
                self._hold(instance, event)

    @property
    def is_current(self) -> bool:
        """Whether no instance misses events."""
        return all(one.state is not FollowState.BEHIND for one in self._sources.values())

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
        before = len(self._holding)
        if isinstance(event, Cleared) and event.reason == "stop":
            self._remember_away(instance)
        names = self._hold(instance, event)
        if isinstance(event, Removed):
            self.departures.note(names, event.reason or "unknown", now_ms)
        elif isinstance(event, Stored):
            for name in names:
                self._failed.discard(name)
            new = len(self._holding) - before
            assert 0 <= new <= len(names), f"{new} of {len(names)} blocks of {instance} are new"
            return new
        return 0

    def _hold(self, instance: str, event: Event) -> list[SequenceHash]:
        """Apply an event to the view; returns its blocks."""
        match event:
            case Stored(runs=runs):
                names = _names_of(runs)
                self._store(instance, names, event)
            case Removed(hashes=hashes):
                names = hashes_from_hex(hashes)
                for name in names:
                    holding = self._holding.get(name)
                    if holding is not None and holding.instance == instance:
                        self.forget(name)
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

    def _store(self, instance: str, names: list[SequenceHash], said: Stored | SnapshotPart) -> None:
        assert instance in self._sources, f"{instance} has {len(names)} blocks, and is not followed"
        holding = Holding(instance, said.block_bytes, bytes.fromhex(said.namespace))
        if holding == self._last:
            holding = self._last
        self._last = holding
        stored = dict.fromkeys(names, holding)
        self._findable.add(stored.keys() - self._holding.keys())
        self._holding.update(stored)
        self._away.difference_update(names)

    def _remember_away(self, instance: str) -> None:
        gone = (name for name, holding in self._holding.items() if holding.instance == instance)
        self._away.update(gone)
        while len(self._away) > AWAY_MAX:
            self._away.pop()

    def _clear(self, instance: str) -> None:
        held = self._holding.items()
        kept = {name: holding for name, holding in held if holding.instance != instance}
        self._findable.remove(self._holding.keys() - kept.keys())
        self._holding = kept


def _names_of(runs: Iterable[Run]) -> list[SequenceHash]:
    """Return the blocks of runs; raises IdentityError."""
    return [name for run in runs for name in hashes_from_hex(run.hashes)]
