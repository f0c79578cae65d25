"""The merged stream: for each engine rank, the blocks that it can use on its host.

```
  an engine's own events ──► devices ───────┐
                                            ├─► which tiers have it? ──► stored, removed, cleared
  the tiers' events ─────► tier_views.py ───┘        per rank
```

On the wire it is the *consolidated* stream. `dedup` publishes a block's first store and its last
removal only; both name the tier of the first store. `passthrough` publishes the stores and removals
of each tier. Blocks in device memory count for the rank that has them; blocks in host memory and
below for every rank of every engine of the same namespace. When an engine clears its
blocks (a reset, a gap that could not be replayed), its stream is cleared with the same reason, and
the blocks of the tiers are published again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from itertools import islice

import msgspec
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.announcer import Pages
from kvbm_common.wire.events import Cleared, Event, EventHead, Removed, Tier
from kvbm_common.wire.raw_events import RawEvent, RawRemoved, RawStored
from kvbm_common.wire.verbs import SnapshotReply

from kvbm_connectors.consolidator.core.batch_merger import (
    ClearedDraft,
    Draft,
    RemovedDraft,
    StoredDraft,
)
from kvbm_connectors.consolidator.core.block_books import DROPS_PER_BLOCK
from kvbm_connectors.consolidator.core.events import EventBuilder
from kvbm_connectors.consolidator.core.held_blocks import Held
from kvbm_connectors.consolidator.core.messages import GroupNamespace
from kvbm_connectors.consolidator.core.rank_view import (
    BITS,
    DEVICE,
    TIER_BITS,
    TIERS,
    MergedEngine,
    RankView,
)
from kvbm_connectors.consolidator.core.replaced_books import Change
from kvbm_connectors.consolidator.core.snapshot_pages import pages_of
from kvbm_connectors.consolidator.core.tier_passes import TierPasses, after_ancestors
from kvbm_connectors.consolidator.core.tier_views import TIER_BLOCKS_MAX, TierViews

ANCESTORS_MAX = 65_536
"""Ancestors that a pass publishes at once before a block: a million tokens, once. A longer chain is
counted."""
Settled = tuple[SequenceHash, SequenceHash | None]
"""A block and its parent, which a removal does not name."""
Unpublished = tuple[SequenceHash, SequenceHash, int, int, bool]
"""A block, its parent, the tiers that it was and is to be published for, and whether the device has
it."""


class MergedStreams:
    """The merged streams of all engines of one host."""

    def __init__(
        self, host: str, *, dedup: bool, drops: Counter[str], blocks_max: int = TIER_BLOCKS_MAX
    ) -> None:
        self._host, self._blocks_max = host, blocks_max
        self._dedup, self._drops = dedup, drops
        self._engines: dict[str, MergedEngine] = {}
        self.tiers = TierViews(drops, blocks_max)
        self._passes = TierPasses()
        self._out: list[RawEvent] = []
        self.touched: set[SequenceHash] = set()
        """Blocks of the drafts that come in this step: tables are ahead of what is published."""

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
        engine = self._engines.pop(name, None)
        for view in engine.views.values() if engine is not None else ():
            self.tiers.replaced.discarded.add(view.clear())
        self._passes.forget(name)

    def engine_event(self, event: RawEvent, draft: Draft) -> None:
        """Apply an event that the consolidator has published of an engine; `draft` is what it was
        made of."""
        engine = self._engines.setdefault(event.source, MergedEngine(event.source))
        match draft, event:
            case ClearedDraft(), Cleared():
                self._engine_cleared(engine, event)
            case StoredDraft(held=held), RawStored():
                self._engine_stored(engine, event, held)
            case RemovedDraft(), RawRemoved():
                self._engine_removed(engine, event)
            case _:
                raise AssertionError(f"{draft} does not make {event}")

    def tiers_changed(self, changes: list[Change], event: Event | None = None) -> None:
        """Publish what tiers have gained or lost, for every rank whose view it changes."""
        ts_ms = event.ts_ms if event else 0
        reason = event.reason if isinstance(event, Removed) else ""
        for change in changes:
            for engine in self._engines.values():
                for view in engine.views.values():
                    if view.namespace == change.namespace and engine.epoch:
                        self._settle(engine, view, self._news(view, change), ts_ms, reason)

    def rebuild(self, *, has_turn: bool) -> None:
        """Publish the tiers' blocks again, for ranks that are new or whose stream was cleared.

        Called at the end of a step: an engine that was cleared because it ended is gone by then. A
        step that has its turn publishes a part of many blocks.
        """
        for engine in self._engines.values():
            if not engine.cleared or not engine.epoch:
                continue
            assert engine.seq > 0, f"{engine.name}: an epoch begins with cleared"
            ranks, engine.cleared = engine.cleared, set()
            for view in engine.views.values():
                if view.rank in ranks:
                    self._passes.begin(engine.name, view, self.tiers.blocks(view.namespace))
        left = self._blocks_max if has_turn else 0
        while self._passes and left > 0:
            name, view, some = self._passes.take(left)
            left -= max(1, len(some))
            held = self.tiers.held_of(some, view.namespace)
            self._settle(self._engines[name], view, held, 0, may_put_off=False)
        if has_turn and not self._is_publishing:  # No pass reads a discarded table.
            self.tiers.replaced.discarded.shed(self._blocks_max * DROPS_PER_BLOCK)

    @property
    def is_going_on(self) -> bool:
        """Tell whether blocks of tiers are still to be read or published, or memory to be given
        back."""
        return self._is_publishing or bool(self.tiers.replaced.discarded)

    @property
    def _is_publishing(self) -> bool:
        return bool(self._passes) or self.tiers.is_going_on

    def take(self) -> list[RawEvent]:
        """Return the events that are to be published, in order, and forget them."""
        out, self._out = self._out, []
        return out

    # ---- questions ---------------------------------------------------------------------------

    def snapshot_pages(self, name: str) -> Pages | None:
        """Return the whole merged stream of an engine, as of its last event; None if unknown."""
        engine = self._engines.get(name)
        if engine is None or not engine.epoch:
            return None
        assert engine.seq > 0, f"{name} has epoch {engine.epoch}, and no event"
        head = SnapshotReply(host=self._host, source=name, tier="device", epoch=engine.epoch,
                             seq=engine.seq, parts=[])  # fmt: skip
        views = engine.views.values()
        return pages_of(head, [p for view in views for p in view.pieces(self.tiers.known_of)])

    def live(self, name: str, rank: int = 0) -> dict[SequenceHash, set[Tier]]:
        """Return what was published for one rank and not taken back: each block with its tiers."""
        engine = self._engines.get(name, MergedEngine(name))
        views = (view for view in engine.views.values() if view.rank == rank)
        return {
            block: {TIERS[bit] for bit in BITS[mask]}
            for view in views
            for block, mask in view.all_published()
        }

    @property
    def block_count(self) -> int:
        """Published blocks, over all engines and ranks."""
        return sum(len(v) for engine in self._engines.values() for v in engine.views.values())

    def check(self) -> None:
        """Assert every invariant, in O(n)."""
        self.tiers.check()
        for engine in self._engines.values():
            assert (engine.seq > 0) == (engine.epoch > 0), "an epoch begins with cleared"
            for view in engine.views.values():
                view.check()
                if not engine.epoch or view.rank in engine.cleared or self._is_publishing:
                    continue
                for block, published in view.all_published():
                    have = self._beyond(view, block) | (DEVICE if block in view.device else 0)
                    assert have, f"{block.hex()} is nowhere, and {engine.name} announces it"
                    text = f"{block.hex()} is in {have}, published by {engine.name} in {published}"
                    assert published == have if not self._dedup else published in TIERS, text

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
                self.tiers.replaced.discarded.add(view.clear())
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

    def _engine_stored(self, engine: MergedEngine, event: RawStored, held: Held) -> None:
        """Apply a store. The engines' half publishes only the first copy of a block, so none of
        these was in the device."""
        view = self._join(engine, event.rank, event.namespace, event.group)
        assert event.runs, f"{engine.name} stores nothing"
        view.device = held
        blocks = [block for _, run in event.runs for block in run]
        if self.touched and self._dedup:
            self._publish_lost_parents(engine, view, event)
        if view.beyond.has_none_of(blocks) and not self.tiers.has_any(blocks, view.namespace):
            self._pass_on(engine, event)
            return
        view.store(blocks)
        pairs = [
            pair for parent, run in event.runs for pair in zip(run, [parent, *run], strict=False)
        ]
        self._settle(engine, view, pairs, event.ts_ms, inside=True)

    def _publish_lost_parents(self, engine: MergedEngine, view: RankView, event: RawStored) -> None:
        """Publish what tiers have of the ancestors of a store, where it follows a block that the
        device does not have any more: its removal was in a gap."""
        assert view.rank in {rank for rank, _ in engine.views}, f"{engine.name} has no {view.rank}"
        events = EventBuilder()
        for parent, (child, *_) in event.runs:
            if parent not in view.device:
                waiting = self._unpublished(view, child, parent)
                for one in reversed(list(islice(waiting, ANCESTORS_MAX))):
                    view.publish(events, *one)
        self._say(engine, view, events, event.ts_ms, "")

    def _engine_removed(self, engine: MergedEngine, event: RawRemoved) -> None:
        """Apply a removal. The engines' half publishes only the removal of the last copy of a
        block, so all of these were in the device."""
        blocks = event.hashes
        assert blocks, f"{engine.name} removes nothing"
        view = self._join(engine, event.rank, event.namespace, event.group)
        apart = view.otherwise.keys().isdisjoint(blocks)
        if apart and not self.tiers.has_any(blocks, view.namespace):
            self._pass_on(engine, event)
            return
        view.remove(blocks)
        gone = [(block, None) for block in blocks]
        self._settle(engine, view, gone, event.ts_ms, event.reason, inside=False)

    def _pass_on(self, engine: MergedEngine, event: RawStored | RawRemoved) -> None:
        """Publish the engine's event as the merged one: only its number differs."""
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
        may_put_off: bool = True,
    ) -> None:
        """Compare what was published of some blocks with what is true now; publish the difference.

        `inside`: the device has all of the blocks, or none, while an engine's events are taken.
        None: its table says which. Then ancestors that wait are published first. With many of them
        a block is put off until all else is published for the rank. So is, for tiers below, a
        block of an engine's event: the device's table is ahead of what is published.
        """
        assert engine.views.get((view.rank, view.namespace)) is view, (engine.name, view.rank)
        events, late = EventBuilder(), dict[SequenceHash, SequenceHash]()
        last: SequenceHash | None = None
        room = self._blocks_max if may_put_off else ANCESTORS_MAX
        is_ahead = inside is not None and (self._is_publishing or bool(engine.cleared))
        for block, parent in blocks:
            is_inside = block in view.device if inside is None else inside
            published = view.published(block, inside=is_inside)
            want = self._wanted(view, block, published, inside=is_inside)
            if want & ~published:
                parent = self._parent_of(view, block) if parent is None else parent
                if is_ahead and want & ~published & ~DEVICE:
                    late[block], want = parent, want & (published | DEVICE)
                if inside is None and parent != last:
                    waiting = () if parent in late else self._unpublished(view, block, parent)
                    unpublished = list(islice(waiting, room + 1))
                    is_long = len(unpublished) > room
                    room -= min(room, len(unpublished)) if may_put_off else 0
                    if may_put_off and (is_long or parent in late):
                        late[block] = parent
                        continue
                    if is_long:
                        self._drops["tier_chain_long"] += 1
                    for one in reversed(unpublished):
                        view.publish(events, *one)
            if want != published:
                view.publish(events, block, parent, published, want, is_inside)
            last = block if want else None
        if late:
            above = partial(self._unpublished, view)
            self._passes.put_off(engine.name, view, after_ancestors(late, above))
        self._say(engine, view, events, ts_ms, reason)

    def _say(
        self, engine: MergedEngine, view: RankView, events: EventBuilder, ts_ms: int, reason: str
    ) -> None:
        for draft in events.take() if engine.epoch else ():
            head = self._next(engine, draft.tier, ts_ms, view.rank)
            self._out.append(draft.event(head, view.group, view.namespace, reason))

    def _wanted(self, view: RankView, block: SequenceHash, published: int, *, inside: bool) -> int:
        """Return the tiers that a block is to be published for, as bits."""
        have = self._beyond(view, block) | (DEVICE if inside else 0)
        # The lowest bit of what it has is the tier that an engine reaches first.
        return (published or have & -have) if self._dedup and have else have

    def _unpublished(
        self, view: RankView, block: SequenceHash, parent: SequenceHash
    ) -> Iterator[Unpublished]:
        """Yield the ancestors of a block that are still to be published, its parent first.

        Blocks of tiers are published in parts: a child may come while its parent waits.
        """
        passed, at = {block}, parent
        while at not in passed and at not in self.touched:
            passed.add(at)
            inside = at in view.device
            published = view.published(at, inside=inside)
            want = published
            if not published or not self._dedup:
                want = self._wanted(view, at, published, inside=inside)
            if want == published or not want:
                return
            above = self._parent_of(view, at)
            yield at, above, published, want, inside
            at = above

    def _beyond(self, view: RankView, block: SequenceHash) -> int:
        """Return the tiers that have a block, without the device, as bits."""
        have = 0
        for tier in self.tiers.holding(block, view.namespace):
            have |= TIER_BITS[tier]
        return have

    def _parent_of(self, view: RankView, block: SequenceHash) -> SequenceHash:
        parent = view.device.get(block)
        return self.tiers.parent_of(block, view.namespace) if parent is None else parent
