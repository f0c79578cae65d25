"""A rank: one event stream of an engine, turned into drafts of our own events.

batch ──► Order ──► View per KV group ──► Merger ──► drafts
            │           ▲
            └─ Orphans ─┘   blocks that wait for their parent
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from kvbm_common.identity import Hasher, IdentityError, SequenceHash
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    EngineEvent,
    EngineHash,
    OtherEvent,
)
from kvbm_common.wire.local import Attach
from kvbm_common.wire.verbs import SnapshotPart

from kvbm_connectors.consolidator.merge import Draft, Merger
from kvbm_connectors.consolidator.messages import Limits, StreamKey
from kvbm_connectors.consolidator.names import NamedBlocks, named
from kvbm_connectors.consolidator.naming import extras_of
from kvbm_connectors.consolidator.order import Order, Ready, Sign
from kvbm_connectors.consolidator.orphans import Orphans
from kvbm_connectors.consolidator.view import View

DEVICE_MEDIA = (None, "", "GPU", "DEVICE")
"""Media names that mean device memory; an engine's own lower tiers are not ours to announce."""
GROUPS_MAX = 64
"""KV cache groups of one model: a handful."""

_Waiting = tuple[BlockStored, SequenceHash | None, Sequence[EngineHash]]
"""An event whose parent is known, our name of the parent, and what was removed meanwhile."""


class Rank:
    """One data-parallel rank of one life of an engine."""

    def __init__(
        self, attach: Attach, peer: bytes, limits: Limits, drops: Counter[str], now_ms: int
    ) -> None:
        self.attach = attach
        self.peer = peer
        """Who attached it last, and is answered."""
        self.key = StreamKey(attach.engine, attach.incarnation, attach.rank)
        self.namespace_hex = attach.namespace.digest.hex()
        self._limits = limits
        self._drops = drops
        self._views: dict[int, View] = {}
        self._merger = Merger()
        self._named: list[NamedBlocks] = []
        self.orphans = Orphans(limits.orphan_blocks_max)
        self.order = self._new_order(now_ms)

    @property
    def block_count(self) -> int:
        """Blocks held, over all groups."""
        return sum(len(view) for view in self._views.values())

    # ---- the stream --------------------------------------------------------------------------

    def restart(self, now_ms: int) -> None:
        """The engine's publisher has begun anew: nothing that we know counts any more."""
        self._drops["orphan"] += self.orphans.clear()
        self._views.clear()
        self._merger = Merger()
        self.order = self._new_order(now_ms)

    def apply(self, ready: Ready, now_ms: int) -> bool:
        """Take what is in order; returns whether the engine's publisher has restarted."""
        for item in ready:
            if item is Sign.RESTARTED:
                return True
            if item is Sign.LOST:
                self._clear("gap")
                self._drops["orphan"] += self.orphans.clear()
            elif isinstance(item, EngineBatch):
                for event in item.events:
                    self._apply_event(event, now_ms)
        return False

    def take_drafts(self) -> list[Draft]:
        """What is to be said about all that was applied since the last time."""
        return self._merger.take()

    def take_named(self) -> list[NamedBlocks]:
        """What was said of blocks since the last time."""
        named, self._named = self._named, []
        return named

    def age(self, now_ms: int) -> None:
        """Ask for a replay on behalf of blocks that have waited too long for their parent."""
        condemned = bool(self.orphans) and self.orphans.condemn(now_ms - self._limits.orphan_age_ms)
        if condemned and not self.order.want_replay():
            self.drop_orphans()

    def drop_orphans(self) -> None:
        """The replay has brought what there is: who still waits to no purpose is dropped."""
        self._drops["orphan"] += self.orphans.drop_condemned()

    def everything(self) -> list[Draft]:
        """All that is held, as drafts: the beginning of an epoch."""
        for group, view in self._views.items():
            self._merger.stored(group, view.namespace_hex, view.block_runs())
        return self._merger.take()

    def parts(self) -> list[SnapshotPart]:
        """All that is held, for a snapshot."""
        rank = self.key.rank
        return [
            SnapshotPart(namespace=view.namespace_hex, rank=rank, group=group, runs=view.runs())
            for group, view in self._views.items()
            if len(view)
        ]

    def blocks(self) -> Iterable[tuple[int, SequenceHash]]:
        """Every (group, block) held."""
        return ((group, block) for group, view in self._views.items() for block in view.blocks())

    def check(self) -> None:
        """Every invariant, O(n)."""
        self.orphans.check()
        for view in self._views.values():
            view.check()
        assert self.order.pending_count <= self._limits.pending_batches_max

    # ---- events ------------------------------------------------------------------------------

    def _apply_event(self, event: EngineEvent, now_ms: int) -> None:
        match event:
            case BlockStored():
                self._store(event, now_ms)
            case BlockRemoved():
                self._remove(event)
            case AllBlocksCleared():
                self._clear("engine")
                self._drops["orphan"] += self.orphans.clear()
            case OtherEvent():
                self._drops[event.reason] += 1

    def _store(self, event: BlockStored, now_ms: int) -> None:
        if not self._is_device(event) or not event.block_hashes:
            return
        view = self._view_of(event)
        if view is None or not self._fits(event, view):
            return
        parent = None if event.parent is None else view.name_of(event.parent)
        if event.parent is not None and parent is None:
            if not self.orphans.add(self._group_of(event), event, now_ms):
                self._drops["orphans_full"] += len(event.block_hashes)
            return
        self._name_and_hold(event, view, parent)

    def _name_and_hold(self, event: BlockStored, view: View, parent: SequenceHash | None) -> None:
        """Store, and with it whoever waited for these blocks; children come after their parents."""
        waiting: list[_Waiting] = [(event, parent, ())]
        group = self._group_of(event)
        while waiting:
            event, parent, removed = waiting.pop()
            hashes = event.block_hashes
            try:
                chain = view.names_for(
                    hashes, event.token_ids, parent=parent, extras=extras_of(event)
                )
            except IdentityError:
                self._drops["bad_tokens"] += len(hashes)
                continue
            if chain is None:
                self._drops["name_conflict"] += len(hashes)
                continue
            if self._limits.naming:
                self._named.append(named(chain, event))
            self._merger.stored(group, view.namespace_hex, view.store(hashes, chain, parent))
            for orphan in self.orphans.adopt(group, hashes):
                assert orphan.event.parent is not None, "an orphan has a parent"
                adopter = view.name_of(orphan.event.parent)
                waiting.append((orphan.event, adopter, orphan.removed))
            self._let_go(view, group, removed)

    def _remove(self, event: BlockRemoved) -> None:
        if not self._is_device(event):
            return
        view = self._view_of(event)
        if view is not None:
            self._let_go(view, self._group_of(event), event.block_hashes)

    def _let_go(self, view: View, group: int, hashes: Iterable[EngineHash]) -> None:
        gone: list[SequenceHash] = []
        for engine_hash in hashes:
            block, held = view.remove(engine_hash)
            if block is not None:
                gone.append(block)
            elif not held and not self.orphans.remove(group, engine_hash):
                self._drops["removed_unknown"] += 1
        if gone:
            self._merger.removed(group, view.namespace_hex, gone)

    def _clear(self, reason: str) -> None:
        if self.block_count:
            self._merger.cleared(reason)
        for view in self._views.values():
            view.clear()

    # ---- helpers -----------------------------------------------------------------------------

    def _is_device(self, event: BlockStored | BlockRemoved) -> bool:
        medium = event.medium and event.medium.upper()
        if medium in DEVICE_MEDIA and event.locality != "REMOTE":
            return True
        self._drops["other_medium"] += len(event.block_hashes)
        return False

    def _fits(self, event: BlockStored, view: View) -> bool:
        """Whether the event's blocks are the namespace's, and their tokens are all theirs."""
        block_tokens = view.hasher.namespace.block_tokens
        block_count = len(event.block_hashes)
        if event.block_size != block_tokens:
            self._drops["block_size"] += block_count
        elif len(event.token_ids) > block_count * block_tokens:
            # Blocks were left out, and which ones we are not told: better no name than a wrong one.
            self._drops["masked_blocks"] += block_count
        elif len(event.token_ids) < block_count * block_tokens:
            self._drops["short_tokens"] += block_count
        else:
            return True
        return False

    def _group_of(self, event: BlockStored | BlockRemoved) -> int:
        return self.attach.namespace.group if event.group_idx is None else event.group_idx

    def _view_of(self, event: BlockStored | BlockRemoved) -> View | None:
        group = self._group_of(event)
        view = self._views.get(group)
        if view is None:
            if len(self._views) >= GROUPS_MAX:
                self._drops["groups_full"] += len(event.block_hashes)
                return None
            namespace = msgspec.structs.replace(self.attach.namespace, group=group)
            view = self._views[group] = View(Hasher(namespace))
        return view

    def _new_order(self, now_ms: int) -> Order:
        replayable = bool(self.attach.replay_endpoint)
        return Order(self._limits, self._drops, replayable=replayable, now_ms=now_ms)
