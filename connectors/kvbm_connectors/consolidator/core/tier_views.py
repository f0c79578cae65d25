"""The blocks that each tier of this host has, as its events on the bus say.

Each tier is followed by the rule of `kvbm_common/tier/follow.py`: no event is applied after a gap.
A snapshot is compared with the blocks known before; the difference is the change. It is read in
parts, as if it came when its last one is read; what waits for it meanwhile waits on. The blocks
that it brings, and those that it or the end of a life takes away, are announced in parts, too: a
million at once held the loop for seconds. Questions are answered as if all were announced.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from kvbm_common.errors import KvbmError
from kvbm_common.identity import SequenceHash, hashes_from_hex
from kvbm_common.tier.block_lookup import BlockLookup
from kvbm_common.tier.follow import Followed, FollowState, Verdict
from kvbm_common.wire.events import Cleared, Event, Removed, Stored, Tier
from kvbm_common.wire.verbs import SnapshotReply

from kvbm_connectors.consolidator.core.block_books import (
    NOTHING,
    Blocks,
    Pairs,
    pairs_of,
    parent_in,
    parents_before_children,
    parts_of,
    store_pairs,
)
from kvbm_connectors.consolidator.core.replaced_books import Change, ReplacedBooks

FORGET_MS = 600_000
"""A source that has left is forgotten after this: no event of it is under way any more."""
TIER_BLOCKS_MAX = 512
"""Blocks of a snapshot that one step reads, and blocks that one step announces: some 5 µs
each, and more for each rank."""
DROPPED = {
    Verdict.OLD_EPOCH: "tier_duplicate",
    Verdict.DUPLICATE: "tier_duplicate",
    Verdict.FULL: "tier_waiting_full",
}
"""Verdict → the counter of the events that are dropped for it."""


@dataclass(slots=True)
class _Source(Followed[Event]):
    name: str
    tier: Tier
    blocks: dict[str, Blocks] = field(default_factory=dict)
    """Namespace → its blocks."""
    left_ms: int = 0
    """The time at which the source last left."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """A snapshot that is read in parts."""

    source: _Source
    reply: SnapshotReply
    parts: Iterator[tuple[str, Pairs]]
    blocks: dict[str, Blocks] = field(default_factory=dict)
    """Namespace → its blocks, as far as they were read."""


class TierViews:
    """All tier sources of one host."""

    def __init__(self, drops: Counter[str], blocks_max: int = TIER_BLOCKS_MAX) -> None:
        """Start without sources; a step reads, or announces, `blocks_max` blocks."""
        assert blocks_max > 0, f"steps of {blocks_max} blocks"
        self._drops, self._blocks_max = drops, blocks_max
        self._sources: dict[str, _Source] = {}
        self._reading: deque[_Reading] = deque()
        self.replaced = ReplacedBooks()

    # ---- inputs ------------------------------------------------------------------------------

    def joined(self, name: str, tier: Tier, epoch: int, now_ms: int) -> list[Change]:
        """Note that the registry names a source; if this life of it is unknown, ask it for a
        snapshot.

        A lower epoch may be a new life, or the late entry of an old one: the source says which.
        """
        source = self._source_of(name, tier)
        begun = epoch > source.epoch and source.begin(epoch)
        source.registered_epoch = epoch
        assert source.epoch >= epoch, f"{name} begins {epoch}, is in {source.epoch}"
        if epoch < source.epoch:
            source.mark_snapshot_stale()
        if begun or epoch < source.epoch or source.state is FollowState.GONE:
            source.fall_behind(now_ms)
        return self._become(source, {}) if begun else []

    def take(self, event: Event, now_ms: int) -> list[Change]:
        """Take an event of a tier; returns what has changed."""
        source = self._source_of(event.source, event.tier)
        if source.is_late(event.epoch):
            return []  # It was under way when the tier left: its blocks are gone.
        begun = source.begin(event.epoch)
        changes = self._become(source, {}) if begun else []
        was_behind = source.state is FollowState.BEHIND
        verdict = source.take(event, now_ms, clears=isinstance(event, Cleared))
        if verdict in DROPPED:
            self._drops[DROPPED[verdict]] += 1
        if source.state is FollowState.BEHIND and not was_behind:
            self._drops["tier_gap"] += 1
        most = 1 if source.is_paused else self._blocks_max  # No more wait than before it came.
        return changes + self._apply_ready(source, now_ms, most)

    def snapshot(self, reply: SnapshotReply, now_ms: int) -> list[Change]:
        """Replace the blocks of a source by its snapshot, and apply the events that have waited.

        Returns what has changed until now. A large one is still to be read: `go_on` does it.
        """
        source = self._sources.get(reply.source)
        is_asked = source is not None and source.requested_at_ms is not None
        if source is None or not is_asked or any(one.source is source for one in self._reading):
            self._drops["tier_snapshot_unasked"] += 1
            return []
        self._reading.append(_Reading(source, reply, parts_of(reply, self._blocks_max)))
        return self.go_on(now_ms)

    def _read_on(self, now_ms: int) -> list[Change]:
        """Read some more of a snapshot; if that was all of it, take it in."""
        reading = self._reading[0]
        source, room, is_malformed = reading.source, self._blocks_max, False
        try:
            while room > 0:
                namespace, pairs = next(reading.parts)
                room -= max(1, len(pairs))
                book = reading.blocks.setdefault(namespace, BlockLookup())
                store_pairs(book, pairs)
            return []
        except StopIteration:
            self._reading.popleft()
        except KvbmError:
            self._reading.popleft()
            is_malformed = True
        is_followed = self._sources.get(source.name) is source
        is_expected = source.end_request()
        assert is_expected or not is_followed, f"{source.name}: an answer without a request"
        if not is_followed or source.state is not FollowState.BEHIND:
            return []
        return self._take_in(reading, now_ms, is_malformed=is_malformed)

    def _take_in(self, reading: _Reading, now_ms: int, *, is_malformed: bool) -> list[Change]:
        source, reply = reading.source, reading.reply
        if not source.accepts(reply.epoch, reply.seq):
            source.retry_later(now_ms)
            return []
        if is_malformed:
            self._drops["tier_malformed"] += 1
            source.retry_later(now_ms)
            return []
        source.restore(reply.epoch, reply.seq, now_ms)
        assert source.epoch == reply.epoch, f"{source.name} is in {source.epoch}, not {reply.epoch}"
        changes = self._become(source, reading.blocks)
        return changes + self._apply_ready(source, now_ms, self._blocks_max)

    def snapshot_failed(self, name: str, now_ms: int) -> None:
        """Note that a source did not answer, so that it is asked again later."""
        source = self._sources.get(name)
        is_read = any(one.source is source for one in self._reading)
        if source is not None and not is_read and source.end_request():
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
            source.stream_lost(now_ms)
            assert source.state is not FollowState.CURRENT, f"{name} may miss events"

    @property
    def is_going_on(self) -> bool:
        """Tell whether `go_on` has more to read, to apply or to announce."""
        return self.is_catching_up or bool(self.replaced)

    @property
    def is_catching_up(self) -> bool:
        """Tell whether `go_on` has more to read or to apply: events of a source wait for it."""
        return bool(self._reading) or any(one.is_paused for one in self._sources.values())

    def go_on(self, now_ms: int) -> list[Change]:
        """Read more of a snapshot, apply more events that waited, or announce more blocks."""
        if self._reading:
            return self._read_on(now_ms)
        for source in self._sources.values():
            if source.is_paused:
                return self._apply_ready(source, now_ms, self._blocks_max)
        return self._announce_some()

    def _announce_some(self) -> list[Change]:
        return self.replaced.announce(self._blocks_max, self._book_of)

    def _book_of(self, name: str, namespace: str) -> Blocks:
        assert namespace, f"{name} has blocks of a namespace"
        source = self._sources.get(name)
        return NOTHING if source is None else source.blocks.get(namespace, NOTHING)

    @property
    def is_current(self) -> bool:
        """Tell whether no source misses events."""
        return all(s.state is not FollowState.BEHIND for s in self._sources.values())

    def ask(self, now_ms: int) -> list[str]:
        """Return the sources to ask for a snapshot now, and note that they are asked.

        Sources that left long ago are forgotten.
        """
        for source in list(self._sources.values()):
            if source.state is FollowState.GONE and now_ms - source.left_ms > FORGET_MS:
                del self._sources[source.name]
        due = [name for name, source in self._sources.items() if source.should_request(now_ms)]
        for name in due:
            self._sources[name].begin_request(now_ms)
        return due

    # ---- questions ---------------------------------------------------------------------------

    def holding(self, block: SequenceHash, namespace: str) -> Iterable[Tier]:
        """Yield the tiers that have a block."""
        for source in self._sources.values():
            if block in source.blocks.get(namespace, NOTHING):
                yield source.tier

    def has_any(self, blocks: Collection[SequenceHash], namespace: str) -> bool:
        """Return whether some tier has one of these blocks."""
        return not all(
            source.blocks.get(namespace, NOTHING).has_none_of(blocks)
            for source in self._sources.values()
        )

    def without(self, blocks: set[SequenceHash], namespace: str) -> set[SequenceHash]:
        """Return those of these blocks that no tier has."""
        for source in self._sources.values():
            blocks = blocks - source.blocks.get(namespace, NOTHING).among(blocks)
        return blocks

    def parent_of(self, block: SequenceHash, namespace: str) -> SequenceHash:
        """Return the parent of a block that some tier has."""
        found = parent_in(self._books(namespace), block)
        assert found is not None, f"no tier has {block.hex()}"
        return found

    def blocks(self, namespace: str) -> Iterator[SequenceHash | None]:
        """Yield every block of a namespace that some tier has, after its parent, and None now and
        then. Blocks may come and leave meanwhile."""
        return parents_before_children(self._books(namespace))

    def held_of(self, blocks: Iterable[SequenceHash | None], namespace: str) -> Pairs:
        """Return those of these blocks that some tier has, each with its parent."""
        books = self._books(namespace)
        return [
            (block, parent)
            for block in blocks
            if block is not None and (parent := parent_in(books, block)) is not None
        ]

    def known_of(self, blocks: Iterable[SequenceHash], namespace: str) -> Pairs:
        """Return those of these blocks that some tier has, or had until a change that is still to
        be announced, each with its parent."""
        books = self._books(namespace) + self.replaced.of(namespace)
        found = ((block, parent_in(books, block)) for block in blocks)
        return [(block, parent) for block, parent in found if parent is not None]

    def _books(self, namespace: str) -> list[Blocks]:
        books = (source.blocks.get(namespace) for source in self._sources.values())
        return [book for book in books if book is not None]

    @property
    def block_count(self) -> int:
        """The blocks of all tiers; a block in two tiers counts twice."""
        return sum(len(b) for source in self._sources.values() for b in source.blocks.values())

    @property
    def source_count(self) -> int:
        """The sources that are followed, or have left lately; for tests."""
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
            source = self._sources[name] = _Source(name, tier, loss_overtakes=True)
        return source

    def _apply_ready(self, source: _Source, now_ms: int, room: int) -> list[Change]:
        changes: list[Change] = []
        source.is_paused = False
        for event in source.ready():
            try:
                changes += (made := self._apply(source, event))
            except KvbmError:
                # An invalid hash: a snapshot of the source will say which blocks it has.
                self._drops["tier_malformed"] += 1
                source.refuse(now_ms)
                break
            room -= 1 + sum(len(change.stored) + len(change.removed) for change in made)
            source.is_paused = room <= 0
        source.is_paused = source.is_paused and bool(source.waiting)
        return changes

    def _apply(self, source: _Source, event: Event) -> list[Change]:
        match event:
            case Cleared():
                return self._become(source, {})
            case Stored():
                blocks = source.blocks.setdefault(event.namespace, BlockLookup())
                new = pairs_of(event.runs)
                if not blocks.has_none_of([name for name, _ in new]):
                    new = [pair for pair in new if pair[0] not in blocks]
                store_pairs(blocks, new)
                return [Change(source.name, source.tier, event.namespace, new, [])]
            case Removed():
                blocks = source.blocks.setdefault(event.namespace, BlockLookup())
                hashes = hashes_from_hex(event.hashes)
                found = zip(hashes, blocks.pop_all(hashes), strict=True)
                gone = [name for name, parent in found if parent is not None]
                return [Change(source.name, source.tier, event.namespace, [], gone)]

    def _become(self, source: _Source, wanted: dict[str, Blocks]) -> list[Change]:
        """Replace the blocks of a source; returns some of what differs from before: `go_on` has
        the rest."""
        assert self._sources.get(source.name) is source, f"{source.name} is followed no more"
        before, source.blocks = source.blocks, wanted
        for namespace in before | wanted:  # In the order of the dictionaries, as a set has none.
            had, has = before.get(namespace, NOTHING), wanted.get(namespace, NOTHING)
            self.replaced.add(source.name, source.tier, namespace, before=had, now=has)
        return self._announce_some() if before or wanted else []
