"""The tiers of this host, as their events on the bus tell: which blocks each of them has.

    UNKNOWN --cleared, seq 1--> KNOWN --a gap, another epoch, a lost stream--> BEHIND
                                  ^                                              │
                                  └───────────────── snapshot ───────────────────┘

Nothing is applied across a gap: the source is asked for a snapshot, and what differs from what was
believed is the change. Events that come meanwhile wait, bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvbm_common.errors import KvbmError
from kvbm_common.identity import SequenceHash, hash_from_hex, hashes_from_hex
from kvbm_common.wire.events import Cleared, Event, Removed, Run, Stored, Tier
from kvbm_common.wire.verbs import SnapshotReply

WAITING_MAX = 4_096
"""Events that wait for a snapshot; beyond it they are left out, which shows as another gap."""
ASK_EVERY_MS = 500
ASK_EVERY_MAX_MS = 30_000
"""A source whose last event is all that is left of it is asked less and less often."""

Blocks = dict[SequenceHash, SequenceHash]
"""Block → its parent."""


@dataclass(frozen=True, slots=True)
class Change:
    """What one source has gained and lost, of one namespace."""

    source: str
    tier: Tier
    namespace: str
    stored: list[tuple[SequenceHash, SequenceHash]]
    """Blocks and their parents."""
    removed: list[SequenceHash]


@dataclass(slots=True)
class _Source:
    tier: Tier
    epoch: int = 0
    seq: int = 0
    behind: bool = False
    asked: bool = False
    ask_at_ms: int = 0
    pause_ms: int = ASK_EVERY_MS
    waiting: list[Event] = field(default_factory=list)
    blocks: dict[str, Blocks] = field(default_factory=dict)
    """By namespace."""


class Tiers:
    """All tier sources of one host."""

    def __init__(self, drops: Counter[str]) -> None:
        self._drops = drops
        self._sources: dict[str, _Source] = {}

    # ---- inputs ------------------------------------------------------------------------------

    def seen(self, name: str, tier: Tier, epoch: int) -> None:
        """The registry names a source: if we do not know this life of it, it is asked."""
        source = self._sources.setdefault(name, _Source(tier))
        if epoch > source.epoch:
            source.behind, source.ask_at_ms = True, 0

    def take(self, event: Event) -> list[Change]:
        """An event of a tier."""
        source = self._sources.setdefault(event.source, _Source(event.tier))
        if source.behind:
            self._wait(source, event)
            return []
        if (event.epoch, event.seq) <= (source.epoch, source.seq):
            self._drops["tier_duplicate"] += 1
            return []
        begins = event.epoch > source.epoch and event.seq == 1 and isinstance(event, Cleared)
        if not begins and (event.epoch, event.seq) != (source.epoch, source.seq + 1):
            self._drops["tier_gap"] += 1
            source.behind, source.ask_at_ms = True, 0
            self._wait(source, event)
            return []
        try:
            changes = self._apply(source, event)
        except KvbmError:
            # Valid JSON, and no hashes in it: whatever it said, the source knows better.
            self._drops["tier_malformed"] += 1
            source.behind = True
            return []
        source.epoch, source.seq = event.epoch, event.seq
        return changes

    def snapshot(self, reply: SnapshotReply) -> list[Change]:
        """A source has said all that it holds; then come the events that have waited."""
        source = self._sources.get(reply.source)
        if source is None or not source.asked:
            self._drops["tier_snapshot_unasked"] += 1
            return []
        source.asked = False
        if (reply.epoch, reply.seq) < (source.epoch, source.seq):
            return []
        try:
            wanted = _blocks_of(reply)
        except KvbmError:
            self._drops["tier_malformed"] += 1
            return []
        changes = self._become(reply.source, source, wanted)
        source.epoch, source.seq, source.pause_ms = reply.epoch, reply.seq, ASK_EVERY_MS
        source.behind = False
        waiting, source.waiting = source.waiting, []
        for event in waiting:
            if (event.epoch, event.seq) > (source.epoch, source.seq):
                changes += self.take(event)
        return changes

    def snapshot_failed(self, name: str, now_ms: int) -> None:
        """A source did not answer: ask again later."""
        source = self._sources.get(name)
        if source is not None and source.asked:
            source.asked, source.ask_at_ms = False, now_ms + source.pause_ms
            source.pause_ms = min(2 * source.pause_ms, ASK_EVERY_MAX_MS)

    def lost(self, name: str, epoch: int, now_ms: int) -> list[Change]:
        """A source's place in the registry is gone: it holds nothing, until it answers."""
        source = self._sources.get(name)
        if source is None or source.epoch > epoch:
            return []
        source.behind, source.ask_at_ms = True, now_ms + source.pause_ms
        return self._become(name, source, {})

    def stream_lost(self, name: str) -> None:
        """The stream is another one: what was lost with the old one need not show as a gap."""
        source = self._sources.get(name)
        if source is not None:
            source.behind, source.ask_at_ms = True, 0

    def ask(self, now_ms: int) -> list[str]:
        """The sources that are to be asked for a snapshot now."""
        due = [
            name
            for name, source in self._sources.items()
            if source.behind and not source.asked and now_ms >= source.ask_at_ms
        ]
        for name in due:
            self._sources[name].asked = True
        return due

    # ---- questions ---------------------------------------------------------------------------

    def holding(self, block: SequenceHash, namespace: str) -> Iterable[Tier]:
        """The tiers that have a block."""
        for source in self._sources.values():
            if block in source.blocks.get(namespace, ()):
                yield source.tier

    def has_any(self, blocks: Iterable[SequenceHash], namespace: str) -> bool:
        """Whether some tier has one of these blocks."""
        return not all(
            source.blocks.get(namespace, {}).keys().isdisjoint(blocks)
            for source in self._sources.values()
        )

    def without(self, blocks: set[SequenceHash], namespace: str) -> set[SequenceHash]:
        """Those of these blocks that no tier has."""
        for source in self._sources.values():
            blocks = blocks.difference(source.blocks.get(namespace, ()))
        return blocks

    def parent_of(self, block: SequenceHash, namespace: str) -> SequenceHash:
        """The parent of a block that some tier has."""
        return next(
            source.blocks[namespace][block]
            for source in self._sources.values()
            if block in source.blocks.get(namespace, ())
        )

    def blocks(self, namespace: str) -> Blocks:
        """Every block of a namespace that some tier has, those of earlier sources first."""
        found: Blocks = {}
        for source in self._sources.values():
            found |= source.blocks.get(namespace, {})
        return found

    @property
    def block_count(self) -> int:
        """Blocks held, each tier for itself."""
        return sum(len(b) for source in self._sources.values() for b in source.blocks.values())

    @property
    def behind_count(self) -> int:
        """Sources whose snapshot is missing."""
        return sum(source.behind for source in self._sources.values())

    def check(self) -> None:
        """Every invariant, O(sources)."""
        for source in self._sources.values():
            assert len(source.waiting) <= WAITING_MAX
            assert source.behind or not source.waiting, "only who is behind lets events wait"

    # ---- inside ------------------------------------------------------------------------------

    def _wait(self, source: _Source, event: Event) -> None:
        if len(source.waiting) < WAITING_MAX:
            source.waiting.append(event)
        else:
            self._drops["tier_waiting_full"] += 1

    def _apply(self, source: _Source, event: Event) -> list[Change]:
        match event:
            case Cleared():
                return self._become(event.source, source, {})
            case Stored():
                blocks = source.blocks.setdefault(event.namespace, {})
                new = pairs_of(event.runs)
                if not blocks.keys().isdisjoint([block for block, _ in new]):
                    new = [pair for pair in new if pair[0] not in blocks]
                blocks.update(new)
                return [Change(event.source, source.tier, event.namespace, new, [])]
            case Removed():
                blocks = source.blocks.setdefault(event.namespace, {})
                hashes = hashes_from_hex(event.hashes)
                gone = [block for block in hashes if blocks.pop(block, None) is not None]
                return [Change(event.source, source.tier, event.namespace, [], gone)]

    def _become(self, name: str, source: _Source, wanted: dict[str, Blocks]) -> list[Change]:
        """Hold exactly this; returns what differs from before."""
        before, source.blocks = source.blocks, wanted
        changes = []
        for namespace in before.keys() | wanted.keys():
            had, has = before.get(namespace, {}), wanted.get(namespace, {})
            new = [(block, parent) for block, parent in has.items() if block not in had]
            gone = [block for block in had if block not in has]
            if new or gone:
                changes.append(Change(name, source.tier, namespace, new, gone))
        return changes


def _blocks_of(reply: SnapshotReply) -> dict[str, Blocks]:
    blocks: dict[str, Blocks] = {}
    for part in reply.parts:
        blocks.setdefault(part.namespace, {}).update(pairs_of(part.runs))
    return blocks


def pairs_of(runs: Iterable[Run]) -> list[tuple[SequenceHash, SequenceHash]]:
    """Blocks and their parents; raises IdentityError."""
    pairs: list[tuple[SequenceHash, SequenceHash]] = []
    for run in runs:
        hashes = hashes_from_hex(run.hashes)
        pairs += zip(hashes, [hash_from_hex(run.parent), *hashes[:-1]], strict=True)
    return pairs
