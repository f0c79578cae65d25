"""A lower tier: which blocks the disk tiers, or object tiers, of this host have announced.

This is a hint. A block that is wrongly in it costs a failed fill, one that is missing a recompute.
Each instance is followed by the rule of `kvbm_common/tier/follow.py`, with one difference: an event
that follows a gap is applied at once, and once more when an older one has closed the gap. A block
whose fill failed is forgotten when the disk tier does not have it, and left alone for a while
otherwise. Events of an instance that has left are dropped until it joins again, or begins another
life.

No step goes over all blocks. A life that ends is hidden at once, and its blocks are dropped in
parts (`blocks_below.py`). A snapshot is applied in parts, and so are newer events on top of it
(`replay.py`). Until a snapshot is applied, blocks of before it count as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import filterfalse

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_lookup import BlockLookup
from kvbm_common.tier.departures import Departures
from kvbm_common.tier.failed_blocks import FailedBlocks
from kvbm_common.tier.follow import FollowState, Verdict
from kvbm_common.tier.former_blocks import FormerBlocks
from kvbm_common.wire.events import Cleared, Event, Removed, Tier

from kvbm_host_tier.core.blocks_below import BlocksBelow, Holding, Life
from kvbm_host_tier.core.findable import Findable
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.lower_snapshot import LowerSnapshot
from kvbm_host_tier.core.lower_source import LowerSource
from kvbm_host_tier.core.messages import AskLowerTierSnapshot
from kvbm_host_tier.core.replay import BlockChange, Replay, change_of, pieces_of

AVOID_MS = 30_000
"""A disk in trouble is not asked for the same block by every request, and is asked again later."""
PASSING_MS = 500
"""The time for which a block is not asked for after its fill failed by no fault of the block or its
medium, in milliseconds."""
AVOID_MAX = 65_536
GONE_INSTANCES_MAX = 64
"""Instances that have left, whose position is remembered: the names of all that a host has."""
CUTS = 4
"""Pieces of a snapshot that one step takes in: it may take a last one that is too many."""

Namespaces = frozenset[bytes]
ANY: Namespaces = frozenset()
"""The asker has no namespace: it may have the blocks of every namespace."""


class LowerTierView:
    """The blocks of one medium below: block → the instance of the lower tier that has it."""

    def __init__(
        self,
        tier: Tier = "disk",
        former: FormerBlocks | None = None,
        findable: Findable | None = None,
        limits: HostTierLimits | None = None,
    ) -> None:
        """Start without instances; `former` keeps the names of what left long ago, and `findable`
        hears of all that come and go."""
        limits = limits or HostTierLimits()
        self._tier: Tier = tier
        self._piece = limits.below_piece
        self._blocks = BlocksBelow(findable or Findable(limits))
        self._lives: dict[str, Life] = {}
        """Instance → its life, to which the blocks of its events belong."""
        self._replays: dict[str, Replay] = {}
        self._sources: dict[str, LowerSource] = {}
        """Instance → its source, in the order in which they joined or left."""
        self._failed = FailedBlocks(AVOID_MAX)
        self.departures = Departures(limits.history_entries, former)
        """The reasons why blocks have left the lower tier, as far as events say."""

    def __contains__(self, name: SequenceHash) -> bool:
        return name in self._blocks

    def tester(self) -> Callable[[SequenceHash], bool]:
        """Return what tells of many names, as of this moment, whether a disk tier has them."""
        return self._blocks.tester()

    def missing(self, names: Iterable[SequenceHash]) -> list[SequenceHash]:
        """Return those names that no disk tier has."""
        return list(filterfalse(self._blocks.tester(), names))

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def table(self) -> BlockLookup[Holding]:
        """Return the table of blocks that the miss filter has: some are not there any more."""
        return self._blocks.table

    def has_none_of(self, names: Collection[SequenceHash]) -> bool:
        """Return whether none of these is there; False as well if one was a moment ago."""
        return self._blocks.has_none_of(names)

    @property
    def is_followed(self) -> bool:
        """Tell whether any instance of the tier is there."""
        return bool(self.instances)

    @property
    def instances(self) -> list[str]:
        """The instances that are there, whether their blocks are known or not."""
        sources = self._sources.items()
        return [name for name, one in sources if one.state is not FollowState.GONE]

    def has_never_had(self, names: Sequence[SequenceHash]) -> bool:
        """Return whether nothing is known of any of these names."""
        return self.departures.knows_none_of(names) and self._blocks.has_never_had(names)

    def is_away(self, name: SequenceHash) -> bool:
        """Return whether an instance had this block that is away."""
        return self._blocks.is_away(name)

    def epoch(self, instance: str) -> int:
        """Return the life of a disk tier that we know of, or 0."""
        source = self._sources.get(instance)
        return source.epoch if source is not None else 0

    def source(self, name: SequenceHash, now_ms: int, own: Namespaces = ANY) -> str | None:
        """Return the instance to ask for this block now; None: it is not worth while, or the block
        is in none of these namespaces."""
        holding = self._blocks.get(name)
        if holding is None or (own and holding.namespace not in own):
            return None
        instance = holding.life.instance
        assert instance in self._sources, f"{name.hex()} is on {instance}, gone"
        return None if self._failed.is_failed(name, now_ms) else instance

    def is_others(self, name: SequenceHash, own: Namespaces) -> bool:
        """Tell whether a block is there, in none of these namespaces."""
        holding = self._blocks.get(name)
        return holding is not None and bool(own) and holding.namespace not in own

    def block_bytes(self, name: SequenceHash) -> int:
        """Return the size of a block; 0: it is not known."""
        holding = self._blocks.get(name)
        return 0 if holding is None else holding.block_bytes

    def forget(self, name: SequenceHash) -> None:
        """Forget a block that the disk tier does not have, until it is announced again."""
        holding = self._blocks.get(name)
        if holding is None:
            return
        self._blocks.remove((name,))
        replay = self._replays.get(holding.life.instance)
        if replay is not None:
            replay.supersede([name])

    def avoid(self, name: SequenceHash, now_ms: int, *, for_ms: int = AVOID_MS) -> None:
        """Leave a block alone for a while: a fill of it has failed, but it may be there."""
        assert for_ms > 0, f"{name.hex()} is avoided for {for_ms} ms"
        self._failed.add(name, now_ms + for_ms)

    def joined(self, instance: str, now_ms: int = 0, epoch: int = 0) -> list[AskLowerTierSnapshot]:
        """Note that the registry names a life of a disk tier, or 0: one that is not known.

        A snapshot is requested, unless its blocks are known, or this life was named before. A lower
        epoch may be a new life, or the late entry of an old one: the tier's events say which.
        """
        assert instance, f"a {self._tier} tier has a name"
        source = self._source_of(instance)
        if source.register(epoch):
            return []
        source.fall_behind(now_ms)
        assert source.state is FollowState.BEHIND, f"{instance} is asked for a snapshot"
        source.next_request_ms = min(source.next_request_ms, now_ms)
        return self._ask(instance, now_ms)

    def events_lost(self, now_ms: int) -> list[AskLowerTierSnapshot]:
        """Ask every instance that is there for a snapshot: events may be lost without a gap.

        The next event in order proves nothing: it may have come before the loss, and have waited.
        """
        for source in self._sources.values():
            source.stream_lost(now_ms)
        return [question for one in self.instances for question in self._ask(one, now_ms)]

    def left(self, instance: str, epoch: int = 0) -> None:
        """Drop what a disk tier held, and remember it as away: the tier has left."""
        self._clear(instance, is_away=True)
        self._work(self._piece)
        source = self._sources.pop(instance, None)
        if source is None:
            return
        source.registered_epoch = 0
        source.begin(epoch)  # No event of this life may have come yet.
        source.leave()
        self._sources[instance] = source
        gone = [name for name, one in self._sources.items() if one.state is FollowState.GONE]
        for name in gone[:-GONE_INSTANCES_MAX]:
            del self._sources[name]

    def apply(
        self, instance: str, event: Event, now_ms: int = 0
    ) -> tuple[int, list[AskLowerTierSnapshot]]:
        """Take an event; returns how many blocks are new, and what to ask for after a gap."""
        source = self._source_of(instance)
        if source.is_late(event.epoch):
            return 0, []  # It was under way when the tier left: its blocks are gone.
        clears = isinstance(event, Cleared)
        begins = source.begin(event.epoch)
        if begins and not clears:
            self._clear(instance)
        assert instance, f"{event} is of no instance"
        change = change_of(event)
        verdict = source.take(change, now_ms, clears=clears)
        if verdict in (Verdict.OLD_EPOCH, Verdict.DUPLICATE):
            self._apply_late_removal(instance, change, clears=clears)
            return 0, []
        if isinstance(event, Cleared):
            self._clear(instance, is_away=event.reason == "stop")
        elif isinstance(event, Removed):
            self.departures.note(change.names, event.reason or "unknown", now_ms)
        if change.malformed or verdict is Verdict.FULL:
            source.refuse(now_ms)  # Less is held than the position says.
        new = self._apply_first_time(instance, change, self._ready(source, now_ms))
        if isinstance(event, Cleared) and event.reason == "stop" and source.is_replaced:
            source.fall_behind(now_ms)  # The registered life goes on, and may be silent.
        if begins or clears:
            self._work(self._piece)
        else:
            self._replay_some(len(change.names))  # As many as have come: so a replay ends.
        return new, self._ask(instance, now_ms)

    def snapshot(self, instance: str, snapshot: LowerSnapshot | None, now_ms: int = 0) -> None:
        """Take the answer to AskLowerTierSnapshot; None: there was none.

        Events that have overtaken it have waited, and are applied once more on top.
        """
        source = self._sources.get(instance)
        if source is None or not source.end_request() or source.state is not FollowState.BEHIND:
            return
        if snapshot is None:
            source.retry_later(now_ms)
            return
        if not source.accepts(snapshot.epoch, snapshot.seq):
            source.retry_later(now_ms)
            return
        if snapshot.epoch != source.epoch:
            self._clear(instance)
        source.restore(snapshot.epoch, snapshot.seq, now_ms)
        assert source.epoch == snapshot.epoch, f"{instance}: {source.epoch}, not {snapshot.epoch}"
        pieces = pieces_of(snapshot, max(1, self._piece // CUTS))
        replay = Replay(snapshot.seq, pieces, self._lives.pop(instance, None))
        self._end_replay(instance)
        self._replays[instance] = replay
        replay.add([*self._ready(source, now_ms), *source.waiting.values()])
        self._work(self._piece)

    @property
    def is_current(self) -> bool:
        """Tell whether no instance misses events."""
        return all(one.state is not FollowState.BEHIND for one in self._sources.values())

    @property
    def is_settled(self) -> bool:
        """Tell whether no instance misses events, and no part of the work is left."""
        return self.is_current and not self._replays and self._blocks.is_settled

    def tick(self, now_ms: int) -> list[AskLowerTierSnapshot]:
        """Do the next part of the work, and return the questions that are due again: a quiet
        instance sends no event that asks."""
        self._work(self._piece)
        return [question for instance in self._sources for question in self._ask(instance, now_ms)]

    def check(self) -> None:
        """Assert every invariant, in O(instances)."""
        for source in self._sources.values():
            source.check()
        self._blocks.check()
        assert self._replays.keys() <= self._sources.keys(), "a replay of an unknown instance"

    # ---- inside ------------------------------------------------------------------------------

    def _source_of(self, instance: str) -> LowerSource:
        source = self._sources.get(instance)
        if source is None:
            source = self._sources[instance] = LowerSource(loss_overtakes=True)
        return source

    def _ask(self, instance: str, now_ms: int) -> list[AskLowerTierSnapshot]:
        source = self._sources[instance]
        if instance in self._replays or not source.should_request(now_ms):
            return []  # Before another snapshot comes, the last one is taken in.
        source.begin_request(now_ms)
        return [AskLowerTierSnapshot(instance, self._tier)]

    def _ready(self, source: LowerSource, now_ms: int) -> list[BlockChange]:
        """Return the changes that are next in order, with those that waited for them."""
        ready: list[BlockChange] = []
        for change in source.ready():
            if change.malformed:
                source.refuse(now_ms)
            else:
                ready.append(change)
        return ready

    def _apply_first_time(
        self, instance: str, change: BlockChange, ready: list[BlockChange]
    ) -> int:
        """Apply an event that has just come; returns how many blocks are new.

        Newer events that came before are applied once more on top.
        """
        waiting = self._sources[instance].waiting
        newer = ready[1:]
        if max(waiting, default=0) > change.seq:
            newer += [one for one in waiting.values() if one.seq > change.seq]
        if change.stores:
            for name in change.names:
                self._failed.discard(name)
        if not newer:
            return self._apply(instance, change)
        replay = self._replays.setdefault(instance, Replay())
        replay.add(newer)
        new = 0
        if change.stores:
            new = len(self.missing(set(change.names)))
            replay.add([change])
        else:
            self._apply(instance, change)  # At once: a removed block must not be found.
        self._work(self._piece)
        assert 0 <= new <= len(change.names), f"{new} of {len(change.names)} blocks are new"
        return new

    def _apply_late_removal(self, instance: str, change: BlockChange, *, clears: bool) -> None:
        """Apply a removal that arrives after a newer snapshot: blocks of before it leave."""
        replay = self._replays.get(instance)
        former = None if replay is None else replay.former
        if former is None or change.epoch < self.epoch(instance):
            return
        assert former is not self._lives.get(instance), f"{instance} has one life"
        if clears:
            self._blocks.end(former, is_away=False)
        elif not change.stores:
            self._blocks.remove(change.names, [former])

    def _apply(self, instance: str, change: BlockChange) -> int:
        """Apply an event, or a piece of a snapshot, to blocks that no newer event has changed.

        Returns how many blocks are new.
        """
        names = change.names
        if instance in self._replays:
            names = self._replays[instance].not_superseded(change)
        if not change.stores:
            self._blocks.remove(names, self._lives_of(instance))
            return 0
        life = self._lives.get(instance)
        if life is None:
            life = self._lives[instance] = Life(instance)
        return self._blocks.store(life, names, change.block_bytes, change.namespace)

    def _work(self, room: int) -> None:
        """Go on with replays, and drop blocks of ended lives, about `room` blocks in all."""
        room = self._replay_some(room)
        assert room <= 0 or not self._replays, f"room for {room} blocks is left"
        self._blocks.let_go(room)

    def _replay_some(self, room: int) -> int:
        """Apply pieces of replays, about `room` blocks at most; return the room that is left."""
        for instance, replay in list(self._replays.items()):
            while room > 0 and (change := replay.next_piece()) is not None:
                self._apply(instance, change)
                room -= max(1, len(change.names))
            if room <= 0:
                break
            self._end_replay(instance)
        return room

    def _end_replay(self, instance: str) -> None:
        replay = self._replays.pop(instance, None)
        if replay is not None and replay.former is not None:
            self._blocks.end(replay.former, is_away=False)

    def _clear(self, instance: str, *, is_away: bool = False) -> None:
        """End every life of an instance, so that none of its blocks is found."""
        for life in self._lives_of(instance):
            self._blocks.end(life, is_away=is_away)
        self._lives.pop(instance, None)
        self._replays.pop(instance, None)

    def _lives_of(self, instance: str) -> list[Life]:
        """Return the life of an instance, and the former one while its blocks still count."""
        replay = self._replays.get(instance)
        lives = (self._lives.get(instance), None if replay is None else replay.former)
        return [life for life in lives if life is not None]
