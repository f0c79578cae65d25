"""The blocks that each tier of this host has, as its events on the bus say.

Each tier is followed by the rule of `kvbm_common/tier/follow.py`: no event is applied behind a gap.
A snapshot is compared with the blocks known before; the difference is the change. The blocks
that end with a source's life are a change in parts: a million at once held the loop for a second.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvbm_common.errors import KvbmError
from kvbm_common.identity import SequenceHash, hash_from_hex, hashes_from_hex
from kvbm_common.tier.follow import Followed, FollowLimits, FollowState, Verdict
from kvbm_common.wire.events import Cleared, Event, Removed, Run, Stored, Tier
from kvbm_common.wire.verbs import SnapshotReply

from kvbm_connectors.consolidator.core.events import parents_first

LIMITS = FollowLimits(waiting_max=4_096, retry_ms=500, retry_max_ms=30_000)
"""A source that does not answer is asked less and less often."""
FORGET_MS = 600_000
"""A source that has left is forgotten after this: no event of it is under way any more."""
GONE_MAX = 4_096
"""Blocks of a former life that one step tells of: a microsecond each."""
DROPPED = {
    Verdict.OLD_EPOCH: "tier_duplicate",
    Verdict.DUPLICATE: "tier_duplicate",
    Verdict.FULL: "tier_waiting_full",
}
"""Verdict → the counter of the events that are dropped for it."""

Blocks = dict[SequenceHash, SequenceHash]
"""Block → its parent."""


@dataclass(frozen=True, slots=True)
class Change:
    """The blocks of one namespace that one source has gained and lost."""

    source: str
    tier: Tier
    namespace: str
    stored: list[tuple[SequenceHash, SequenceHash]]
    """Blocks and their parents."""
    removed: list[SequenceHash]


@dataclass(slots=True)
class _Source(Followed[Event]):
    name: str
    tier: Tier
    blocks: dict[str, Blocks] = field(default_factory=dict)
    """Namespace → its blocks."""
    left_ms: int = 0
    """When it last left."""
    registered_epoch: int = 0
    """The life that the registry names; 0: none. It may have a lower epoch than what the stream
    still has of a life before, because the registry is another one."""


@dataclass(frozen=True, slots=True)
class _Going:
    """What a source had in a namespace, and may have lost."""

    source: str
    tier: Tier
    namespace: str
    names: Iterator[SequenceHash]


class TierViews:
    """All tier sources of one host."""

    def __init__(self, drops: Counter[str]) -> None:
        self._drops = drops
        self._sources: dict[str, _Source] = {}
        self._going: deque[_Going] = deque()
        """What is still to be told of; questions are answered without it."""

    # ---- inputs ------------------------------------------------------------------------------

    def joined(self, name: str, tier: Tier, epoch: int, now_ms: int) -> list[Change]:
        """Note that the registry names a source; if this life of it is unknown, ask it for a
        snapshot.

        A lower epoch may be a new life, or the late entry of an old one: the source says which.
        """
        source = self._source_of(name, tier)
        source.registered_epoch = epoch
        begun = source.begin(epoch)
        assert source.epoch >= epoch, f"{name} begins {epoch}, is in {source.epoch}"
        if epoch < source.epoch:
            source.outdate()
        if begun or epoch < source.epoch or source.state is FollowState.GONE:
            source.fall_behind(now_ms)
        return self._become(source, {}) if begun else []

    def take(self, event: Event, now_ms: int) -> list[Change]:
        """Take an event of a tier; returns what has changed."""
        source = self._source_of(event.source, event.tier)
        believed = event.epoch == source.registered_epoch
        is_late = event.epoch <= source.epoch and not believed
        if source.state is FollowState.GONE and is_late:
            return []  # It was under way when the tier left: its blocks are gone.
        begun = source.begin(event.epoch, believed=believed)
        changes = self._become(source, {}) if begun else []
        was_behind = source.state is FollowState.BEHIND
        verdict = source.take(event, now_ms, clears=isinstance(event, Cleared))
        if verdict in DROPPED:
            self._drops[DROPPED[verdict]] += 1
        if source.state is FollowState.BEHIND and not was_behind:
            self._drops["tier_gap"] += 1
        return changes + self._apply_ready(source, now_ms)

    def snapshot(self, reply: SnapshotReply, now_ms: int) -> list[Change]:
        """Replace the blocks of a source by its snapshot, and apply the events that have waited.

        Returns what has changed.
        """
        source = self._sources.get(reply.source)
        if source is None or not source.landed():
            self._drops["tier_snapshot_unasked"] += 1
            return []
        if source.state is not FollowState.BEHIND:
            return []
        is_lower = reply.epoch < source.epoch and reply.epoch == source.registered_epoch
        if not is_lower and not source.accepts(reply.epoch, reply.seq):
            source.retry_later(now_ms)
            return []
        try:
            wanted = _blocks_of(reply)
        except KvbmError:
            self._drops["tier_malformed"] += 1
            source.retry_later(now_ms)
            return []
        if is_lower:
            source.begin(reply.epoch, believed=True)
            source.fall_behind(now_ms)
        source.restore(reply.epoch, reply.seq, now_ms)
        assert source.epoch == reply.epoch, f"{source.name} is in {source.epoch}, not {reply.epoch}"
        return self._become(source, wanted) + self._apply_ready(source, now_ms)

    def snapshot_failed(self, name: str, now_ms: int) -> None:
        """Note that a source did not answer, so that it is asked again later."""
        source = self._sources.get(name)
        if source is not None and source.landed():
            source.retry_later(now_ms)

    def left(self, name: str, epoch: int, now_ms: int) -> list[Change]:
        """Drop the blocks of a source that has left the registry.

        Its events are ignored until it joins again, or begins another life. Blocks of a life with a
        higher epoch go with the life that was named last; if it lives, it is asked when it joins.
        """
        source = self._sources.get(name)
        if source is None or (source.epoch > epoch != source.registered_epoch):
            return []
        source.registered_epoch = 0
        source.begin(epoch)
        source.leave()
        source.left_ms = now_ms
        assert source.state is FollowState.GONE, f"{name} has left, and is {source.state.name}"
        return self._become(source, {})

    def stream_lost(self, name: str, now_ms: int) -> None:
        """Ask a source for a snapshot: its stream was replaced, and events that were lost with the
        old stream may leave no gap."""
        source = self._sources.get(name)
        if source is not None:
            source.lose(now_ms)
            assert source.state is not FollowState.CURRENT, f"{name} believes a lost stream"

    @property
    def is_going_on(self) -> bool:
        """Whether `go_on` has more to tell."""
        return bool(self._going)

    def go_on(self) -> list[Change]:
        """Tell of some more blocks that sources have lost, and have not got back since."""
        changes: list[Change] = []
        left = GONE_MAX
        while self._going and left:
            going = self._going[0]
            names = list(islice(going.names, left))
            left -= len(names)
            if left:
                self._going.popleft()
            source = self._sources.get(going.source)
            has = source.blocks.get(going.namespace, {}) if source is not None else {}
            gone = [name for name in names if name not in has]
            if gone:
                changes.append(Change(going.source, going.tier, going.namespace, [], gone))
        assert sum(len(change.removed) for change in changes) <= GONE_MAX, "too many for a step"
        return changes

    @property
    def is_current(self) -> bool:
        """Whether no source misses events."""
        return all(s.state is not FollowState.BEHIND for s in self._sources.values())

    def ask(self, now_ms: int) -> list[str]:
        """Return the sources to ask for a snapshot now, and note that they are asked.

        Sources that left long ago are forgotten.
        """
        for source in list(self._sources.values()):
            if source.state is FollowState.GONE and now_ms - source.left_ms > FORGET_MS:
                del self._sources[source.name]
        due = [name for name, source in self._sources.items() if source.should_ask(now_ms)]
        for name in due:
            self._sources[name].ask(now_ms)
        return due

    # ---- questions ---------------------------------------------------------------------------

    def holding(self, block: SequenceHash, namespace: str) -> Iterable[Tier]:
        """Yield the tiers that have a block."""
        for source in self._sources.values():
            if block in source.blocks.get(namespace, ()):
                yield source.tier

    def has_any(self, blocks: Iterable[SequenceHash], namespace: str) -> bool:
        """Return whether some tier has one of these blocks."""
        return not all(
            source.blocks.get(namespace, {}).keys().isdisjoint(blocks)
            for source in self._sources.values()
        )

    def without(self, blocks: set[SequenceHash], namespace: str) -> set[SequenceHash]:
        """Return those of these blocks that no tier has."""
        for source in self._sources.values():
            blocks = blocks.difference(source.blocks.get(namespace, ()))
        return blocks

    def parent_of(self, block: SequenceHash, namespace: str) -> SequenceHash:
        """Return the parent of a block that some tier has."""
        books = (source.blocks.get(namespace, {}) for source in self._sources.values())
        found = next((book[block] for book in books if block in book), None)
        assert found is not None, f"no tier has {block.hex()}"
        return found

    def blocks(self, namespace: str) -> Blocks:
        """Return every block of a namespace that some tier has, those of earlier sources first."""
        found: Blocks = {}
        for source in self._sources.values():
            found |= source.blocks.get(namespace, {})
        return found

    @property
    def block_count(self) -> int:
        """The blocks of all tiers; a block in two tiers counts twice."""
        return sum(len(b) for source in self._sources.values() for b in source.blocks.values())

    @property
    def source_count(self) -> int:
        """The sources that are followed, or have left lately."""
        return len(self._sources)

    @property
    def behind_count(self) -> int:
        """Sources whose snapshot is missing."""
        return sum(source.state is FollowState.BEHIND for source in self._sources.values())

    def check(self) -> None:
        """Assert every invariant, in O(sources)."""
        for source in self._sources.values():
            source.check()

    # ---- inside ------------------------------------------------------------------------------

    def _source_of(self, name: str, tier: Tier) -> _Source:
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = _Source(name, tier, limits=LIMITS, loss_overtakes=True)
        return source

    def _apply_ready(self, source: _Source, now_ms: int) -> list[Change]:
        changes: list[Change] = []
        for event in source.ready():
            try:
                changes += self._apply(source, event)
            except KvbmError:
                # An invalid hash: a snapshot of the source will say which blocks it has.
                self._drops["tier_malformed"] += 1
                source.refuse(now_ms)
        return changes

    def _apply(self, source: _Source, event: Event) -> list[Change]:
        match event:
            case Cleared():
                return self._become(source, {})
            case Stored():
                blocks = source.blocks.setdefault(event.namespace, {})
                new = pairs_of(event.runs)
                if not blocks.keys().isdisjoint([block for block, _ in new]):
                    new = [pair for pair in new if pair[0] not in blocks]
                blocks.update(new)
                return [Change(source.name, source.tier, event.namespace, new, [])]
            case Removed():
                blocks = source.blocks.setdefault(event.namespace, {})
                hashes = hashes_from_hex(event.hashes)
                gone = [block for block in hashes if blocks.pop(block, None) is not None]
                return [Change(source.name, source.tier, event.namespace, [], gone)]

    def _become(self, source: _Source, wanted: dict[str, Blocks]) -> list[Change]:
        """Replace the blocks of a source; returns what differs from before, but some losses only:
        `go_on` has the rest."""
        assert self._sources.get(source.name) is source, f"{source.name} is followed no more"
        before, source.blocks = source.blocks, wanted
        changes: list[Change] = []
        for namespace in before.keys() | wanted.keys():
            had, has = before.get(namespace, {}), wanted.get(namespace, {})
            order = parents_first(has, has.get)
            new = [(block, has[block]) for block in order if block not in had]
            if new:
                changes.append(Change(source.name, source.tier, namespace, new, []))
            if had:
                self._going.append(_Going(source.name, source.tier, namespace, iter(had)))
        return changes + (self.go_on() if before else [])


def _blocks_of(reply: SnapshotReply) -> dict[str, Blocks]:
    blocks: dict[str, Blocks] = {}
    for part in reply.parts:
        blocks.setdefault(part.namespace, {}).update(pairs_of(part.runs))
    return blocks


def pairs_of(runs: Iterable[Run]) -> list[tuple[SequenceHash, SequenceHash]]:
    """Return the blocks of these runs, with their parents; raises IdentityError."""
    pairs: list[tuple[SequenceHash, SequenceHash]] = []
    for run in runs:
        hashes = hashes_from_hex(run.hashes)
        # Not strict: an empty run has a parent, and no block.
        pairs += zip(hashes, [hash_from_hex(run.parent), *hashes[:-1]], strict=False)
    return pairs
