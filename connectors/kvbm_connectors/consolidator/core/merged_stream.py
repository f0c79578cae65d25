"""The consolidated stream: for each engine rank, the blocks that it can use on its host.

```
  an engine's own events ──► devices ───────┐
                                            ├─► which tiers have it? ──► stored, removed, cleared
  the tiers' events ─────► tier_views.py ───┘        per rank
```

`dedup` publishes a block's first store and its last removal only; both name the tier of the first
store. `passthrough` publishes the stores and removals of each tier. Blocks in device memory count
for the rank that has them; blocks in host memory and below for every rank of every engine of the
same namespace. When an engine clears its blocks (a reset, a gap that could not be replayed), its
stream is cleared with the same reason, and the blocks of the tiers are published again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import msgspec
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.announcer import runs_of
from kvbm_common.wire.events import Cleared, Event, EventHead, Removed, Stored, Tier
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply

from kvbm_connectors.consolidator.core.batch_merger import (
    ClearedDraft,
    Draft,
    RemovedDraft,
    StoredDraft,
)
from kvbm_connectors.consolidator.core.events import EventBuilder
from kvbm_connectors.consolidator.core.messages import GroupNamespace
from kvbm_connectors.consolidator.core.rank_view import BITS, DEVICE, TIER_BITS, TIERS, RankView
from kvbm_connectors.consolidator.core.tier_views import TIER_BLOCKS_MAX, Change, TierViews

ANCESTORS_MAX = 65_536
"""Ancestors that a step says before a block: a million tokens, once. A longer chain is counted."""
Settled = tuple[SequenceHash, SequenceHash | None]
"""A block and its parent, which a removal does not name."""
Unsaid = tuple[SequenceHash, SequenceHash, int, int, bool]
"""A block, its parent, what was said, what is to be said, and whether the device has it."""


@dataclass(slots=True)
class MergedEngine:
    """One engine: its position in its own consolidated stream, and its views."""

    name: str
    epoch: int = 0
    seq: int = 0
    views: dict[tuple[int, str], RankView] = field(default_factory=dict)
    """By rank and namespace."""
    cleared: set[int] = field(default_factory=set)
    """Ranks whose tiers' blocks must be published again."""


class MergedStreams:
    """The consolidated streams of all engines of one host."""

    def __init__(
        self, host: str, *, dedup: bool, drops: Counter[str], blocks_max: int = TIER_BLOCKS_MAX
    ) -> None:
        self._host, self._blocks_max = host, blocks_max
        self._dedup, self._drops = dedup, drops
        self._engines: dict[str, MergedEngine] = {}
        self.tiers = TierViews(drops, blocks_max)
        self._again: dict[
            tuple[str, int, str], tuple[MergedEngine, RankView, Iterator[SequenceHash | None]]
        ] = {}
        """Engine, rank and namespace → what is still to be said again of the tiers' blocks."""
        self._out: list[Event] = []

    # ---- inputs ------------------------------------------------------------------------------

    def engine_known(
        self, name: str, ranks: Iterable[int], groups: Collection[GroupNamespace]
    ) -> None:
        """Note that an engine has these ranks, perhaps one more than before, and these KV groups:
        tiers may have blocks of each before the device has any."""
        assert name, "an engine has a name"
        assert groups, f"{name} has no KV group"
        engine = self._engines.setdefault(name, MergedEngine(name))
        for rank in ranks:
            for group, namespace in groups:
                self._join(engine, rank, namespace, group)

    def engine_left(self, name: str) -> None:
        """Forget an engine whose life is over; its `cleared` was the last event."""
        self._engines.pop(name, None)
        self._again = {key: again for key, again in self._again.items() if key[0] != name}

    def engine_event(self, event: Event, draft: Draft) -> None:
        """Apply an event that the consolidator has published of an engine; `draft` is what it was
        made of."""
        engine = self._engines.setdefault(event.source, MergedEngine(event.source))
        match draft, event:
            case ClearedDraft(), Cleared():
                self._engine_cleared(engine, event)
            case StoredDraft(), Stored():
                self._engine_stored(engine, event, draft)
            case RemovedDraft(blocks=gone), Removed():
                self._engine_removed(engine, event, gone)
            case _:
                raise AssertionError(f"{draft} does not make {event}")

    def tiers_changed(self, changes: list[Change], event: Event | None = None) -> None:
        """Tell every rank whose view is changed by what tiers have gained or lost."""
        ts_ms = event.ts_ms if event else 0
        reason = event.reason if isinstance(event, Removed) else ""
        for change in changes:
            for engine in self._engines.values():
                for view in engine.views.values():
                    if view.namespace == change.namespace and engine.epoch:
                        self._settle(engine, view, self._news(view, change), ts_ms, reason)

    def rebuild(self) -> None:
        """Say again what the tiers hold, to those who are new or whose stream was cleared.

        Called at the end of a step: an engine that was cleared because it ended is gone by then. Of
        many blocks a step says some.
        """
        for engine in self._engines.values():
            if not engine.cleared or not engine.epoch:
                continue
            assert engine.seq > 0, f"{engine.name}: an epoch begins with cleared"
            ranks, engine.cleared = engine.cleared, set()
            for view in engine.views.values():
                if view.rank in ranks:
                    key = engine.name, view.rank, view.namespace
                    self._again.pop(key, None)  # The new pass waits behind those of others.
                    self._again[key] = engine, view, self.tiers.blocks(view.namespace)
        left = self._blocks_max
        while self._again and left:
            key, (engine, view, names) = next(iter(self._again.items()))
            assert self._engines.get(engine.name) is engine, f"{engine.name} is gone, and hears"
            some = list(islice(names, left))
            if len(some) < left:
                del self._again[key]
            left -= len(some)
            self._settle(engine, view, self.tiers.held_of(some, view.namespace), 0)

    @property
    def is_going_on(self) -> bool:
        """Whether blocks of tiers are still to be said."""
        return bool(self._again) or self.tiers.is_going_on

    def take(self) -> list[Event]:
        """Return the events that are to be published, in order, and forget them."""
        out, self._out = self._out, []
        return out

    # ---- questions ---------------------------------------------------------------------------

    def snapshot(self, name: str) -> SnapshotReply | None:
        """Return the whole consolidated stream of an engine, as of its last event; None if
        unknown."""
        engine = self._engines.get(name)
        if engine is None or not engine.epoch:
            return None
        assert engine.seq > 0, f"{name} has epoch {engine.epoch}, and no event"
        parts = [
            SnapshotPart(
                namespace=view.namespace,
                rank=view.rank,
                group=view.group,
                runs=runs_of((block, self._parent_of(view, block)) for block, _ in view.all_said()),
            )
            for view in engine.views.values()
            if len(view)
        ]
        return SnapshotReply(host=self._host, source=name, tier="device", epoch=engine.epoch,
                             seq=engine.seq, parts=parts)  # fmt: skip

    def live(self, name: str, rank: int = 0) -> dict[SequenceHash, set[Tier]]:
        """Return what was published for one rank and not taken back: each block with its tiers."""
        engine = self._engines.get(name, MergedEngine(name))
        views = (view for view in engine.views.values() if view.rank == rank)
        return {
            block: {TIERS[bit] for bit in BITS[mask]}
            for view in views
            for block, mask in view.all_said()
        }

    @property
    def block_count(self) -> int:
        """Blocks said, over all engines and ranks."""
        return sum(len(v) for engine in self._engines.values() for v in engine.views.values())

    def check(self) -> None:
        """Assert every invariant, in O(n)."""
        self.tiers.check()
        for engine in self._engines.values():
            assert (engine.seq > 0) == (engine.epoch > 0), "an epoch begins with cleared"
            for view in engine.views.values():
                view.check()
                if not engine.epoch or view.rank in engine.cleared or self.is_going_on:
                    continue
                for block, said in view.all_said():
                    have = self._beyond(view, block) | (DEVICE if block in view.device else 0)
                    assert have, f"{block.hex()} is nowhere, and {engine.name} announces it"
                    text = f"{block.hex()} is in {have}, and {engine.name} announces it in {said}"
                    assert said == have if not self._dedup else said in TIERS, text

    # ---- inside ------------------------------------------------------------------------------

    def _join(self, engine: MergedEngine, rank: int, namespace: str, group: int = 0) -> RankView:
        view = engine.views.get((rank, namespace))
        if view is None:
            view = engine.views[rank, namespace] = RankView(namespace, rank, group)
            engine.cleared.add(rank)
        return view

    def _engine_cleared(self, engine: MergedEngine, event: Cleared) -> None:
        ranks = {event.rank} if event.rank_only else {rank for rank, _ in engine.views}
        for view in engine.views.values():
            if view.rank in ranks:
                view.clear()
        engine.cleared |= ranks
        if event.epoch > engine.epoch:
            engine.epoch, engine.seq = event.epoch, 0
        assert event.source == engine.name, f"{event.source}'s event clears {engine.name}"
        assert engine.epoch >= event.epoch > 0, f"{engine.name}: {engine.epoch}, {event.epoch}"
        head = self._next(engine, "device", event.ts_ms, event.rank)
        self._out.append(Cleared(**head, reason=event.reason, rank_only=event.rank_only))

    def _next(self, engine: MergedEngine, tier: Tier, ts_ms: int, rank: int) -> EventHead:
        assert engine.epoch > 0, f"{engine.name}: an event before its epoch"
        engine.seq += 1
        return EventHead(
            host=self._host, source=engine.name, tier=tier, epoch=engine.epoch, seq=engine.seq,
            ts_ms=ts_ms, rank=rank,
        )  # fmt: skip

    def _engine_stored(self, engine: MergedEngine, event: Stored, draft: StoredDraft) -> None:
        """Apply a store. The engines' half publishes only the first copy of a block, so none of
        these was in the device."""
        view = self._join(engine, event.rank, event.namespace, event.group)
        assert draft.group == event.group, f"{engine.name}: {draft.group} is not {event.group}"
        view.device = draft.held
        blocks = [block for _, run in draft.blocks for block in run]
        if view.beyond.has_none_of(blocks) and not self.tiers.has_any(blocks, view.namespace):
            self._pass_on(engine, event)
            return
        view.store(blocks)
        pairs = [
            pair for parent, run in draft.blocks for pair in zip(run, [parent, *run], strict=False)
        ]
        self._settle(engine, view, pairs, event.ts_ms, inside=True)

    def _engine_removed(
        self, engine: MergedEngine, event: Removed, blocks: Collection[SequenceHash]
    ) -> None:
        """Apply a removal. The engines' half publishes only the removal of the last copy of a
        block, so all of these were in the device."""
        assert blocks, f"{engine.name} removes nothing"
        view = self._join(engine, event.rank, event.namespace, event.group)
        apart = view.otherwise.keys().isdisjoint(blocks)
        if apart and not self.tiers.has_any(blocks, view.namespace):
            self._pass_on(engine, event)
            return
        view.remove(blocks)
        gone = [(block, None) for block in blocks]
        self._settle(engine, view, gone, event.ts_ms, event.reason, inside=False)

    def _pass_on(self, engine: MergedEngine, event: Stored | Removed) -> None:
        """Publish the engine's event as the consolidated one: only its number differs."""
        assert event.source == engine.name, f"{event.source}'s event in {engine.name}'s stream"
        if engine.epoch:
            engine.seq += 1
            self._out.append(msgspec.structs.replace(event, seq=engine.seq))

    def _news(self, view: RankView, change: Change) -> Iterator[Settled]:
        """Yield the blocks of a change that may matter to a view.

        With `dedup` these are few: neither blocks that were published, and are in one more tier
        now, nor blocks that have left one of several tiers.
        """
        stored, removed = change.stored, change.removed
        if self._dedup:
            new = {block for block, _ in stored}.difference(view.device)
            new -= view.beyond.among(new)
            if len(new) < len(stored):
                stored = [pair for pair in stored if pair[0] in new]
            gone = self.tiers.without(set(removed).difference(view.device), view.namespace)
            if len(gone) < len(removed):
                removed = [block for block in removed if block in gone]
        yield from stored
        yield from ((block, None) for block in removed)

    def _settle(
        self,
        engine: MergedEngine,
        view: RankView,
        blocks: Iterable[Settled],
        ts_ms: int,
        reason: str = "",
        *,
        inside: bool | None = None,
    ) -> None:
        """Compare what was said of some blocks with what is true now, and say the difference.

        `inside`: the device has all of the blocks, or none, while an engine's events are taken.
        None: its table says which. Then ancestors that wait for their turn are said first.
        """
        assert engine.views.get((view.rank, view.namespace)) is view, (engine.name, view.rank)
        drafts = EventBuilder()
        last: SequenceHash | None = None
        for block, parent in blocks:
            here = block in view.device if inside is None else inside
            said = view.said(block, inside=here)
            want = self._wanted(view, block, said, here=here)
            if want & ~said:
                parent = self._parent_of(view, block) if parent is None else parent
                if inside is None and parent != last:
                    for one in self._unsaid_before(view, block, parent):
                        self._say(view, drafts, *one)
            if want != said:
                self._say(view, drafts, block, parent, said, want, here)
            last = block if want else None
        for draft in drafts.take() if engine.epoch else ():
            head = self._next(engine, draft.tier, ts_ms, view.rank)
            self._out.append(draft.event(head, view.group, view.namespace, reason))

    @staticmethod
    def _say(
        view: RankView,
        drafts: EventBuilder,
        block: SequenceHash,
        parent: SequenceHash | None,
        said: int,
        want: int,
        here: bool,
    ) -> None:
        view.say(block, want, inside=here)
        for bit in BITS[said & ~want]:
            drafts.removed(TIERS[bit], block)
        for bit in BITS[want & ~said]:
            assert parent is not None, f"{block.hex()} is stored behind an unknown block"
            drafts.stored(TIERS[bit], parent, block)

    def _wanted(self, view: RankView, block: SequenceHash, said: int, *, here: bool) -> int:
        """Return the tiers that a block is to be published for, as bits. `here`: the device has
        it."""
        have = self._beyond(view, block) | (DEVICE if here else 0)
        # The lowest bit of what it has is the tier that an engine reaches first.
        return (said or have & -have) if self._dedup and have else have

    def _unsaid_before(
        self, view: RankView, block: SequenceHash, parent: SequenceHash
    ) -> list[Unsaid]:
        """Return the ancestors of a block that are still to be said, the oldest one first.

        Blocks of tiers are said in parts: a child may come while its parent waits for its turn.
        """
        found: dict[SequenceHash, Unsaid] = {}
        at = parent
        while at not in found and at != block:
            here = at in view.device
            said = view.said(at, inside=here)
            want = said if said and self._dedup else self._wanted(view, at, said, here=here)
            if want == said or not want:
                break
            if len(found) == ANCESTORS_MAX:
                self._drops["tier_chain_long"] += 1
                break
            behind = self._parent_of(view, at)
            found[at] = (at, behind, said, want, here)
            at = behind
        return list(reversed(found.values()))

    def _beyond(self, view: RankView, block: SequenceHash) -> int:
        """Return the tiers that have a block, without the device, as bits."""
        mask = 0
        for tier in self.tiers.holding(block, view.namespace):
            mask |= TIER_BITS[tier]
        return mask

    def _parent_of(self, view: RankView, block: SequenceHash) -> SequenceHash:
        parent = view.device.get(block)
        return self.tiers.parent_of(block, view.namespace) if parent is None else parent
