"""A rank: one event stream of an engine, turned into drafts of our own events.

batch ──► Sequencer ──► RunJoiner ──► HeldBlocks per KV group ──► BatchMerger ──► drafts
                           │              ▲
                           └── Orphans ───┘   blocks that wait for their parent
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
from kvbm_common.identity import Hasher, IdentityError, Namespace, SequenceHash
from kvbm_common.tier.kv_groups import GROUPS_MAX
from kvbm_common.wire.consolidator import Attach
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    EngineEvent,
    EngineHash,
    OtherEvent,
)

from kvbm_connectors.consolidator.core.batch_merger import BatchMerger, Draft
from kvbm_connectors.consolidator.core.generations import Adapters, Generations, adapter_key
from kvbm_connectors.consolidator.core.hash_extras import extras_of
from kvbm_connectors.consolidator.core.held_blocks import HeldBlocks
from kvbm_connectors.consolidator.core.messages import ConsolidatorLimits, StreamKey
from kvbm_connectors.consolidator.core.orphans import Orphan, Orphans
from kvbm_connectors.consolidator.core.run_joiner import RunJoiner, join
from kvbm_connectors.consolidator.core.sequencer import Ready, Sequencer, Sign
from kvbm_connectors.consolidator.core.sglang_keys import unsaid_key
from kvbm_connectors.consolidator.core.snapshot_pages import Piece, ViewKey, pieces_of
from kvbm_connectors.consolidator.core.token_names import NamedBlocks, named

DEVICE_MEDIA = (None, "", "GPU", "DEVICE")
"""Media names that mean device memory; an engine's own lower tiers are not ours to announce."""
NO_PARENT = "no_parent"
NO_ADAPTER = "no_adapter"
"""Reasons why an event waits; for other reasons it is dropped."""


class Rank:
    """One data-parallel rank of one life of an engine."""

    def __init__(
        self,
        attach: Attach,
        peer: bytes,
        limits: ConsolidatorLimits,
        drops: Counter[str],
        now_ms: int,
        hasher: type[Hasher] = Hasher,
    ) -> None:
        assert attach.engine, "a rank has an engine"
        self.attach = attach
        self.peer = peer
        """The peer that attached the rank last, and that is answered."""
        self.key = StreamKey(attach.engine, attach.incarnation, attach.rank)
        self.namespace_hex = attach.namespace.digest.hex()
        self._generations = Generations(attach)
        self._batch_s = 0.0
        """The time of the batch that is applied."""
        self._limits, self._hasher = limits, hasher
        self._drops = drops
        self._views: dict[int, HeldBlocks] = {}
        self._merger = BatchMerger()
        self._named: list[NamedBlocks] = []
        self._joiner = RunJoiner()
        self.orphans = Orphans(limits.orphan_blocks_max)
        self.sequencer = self._new_sequencer(now_ms)

    @property
    def block_count(self) -> int:
        """Blocks held, over all groups."""
        return sum(len(view) for view in self._views.values())

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """Return the namespaces of all KV groups, the first group's first."""
        return self.attach.namespace, *self.attach.group_namespaces

    # ---- what the connector says ---------------------------------------------------------------

    def continues(self, attach: Attach) -> bool:
        """Return whether this is the same life: all is as before but what may change in it."""
        return _fixed(attach) == _fixed(self.attach)

    def describe(self, attach: Attach) -> None:
        """Take what the connector says of its engine now: a generation, adapters, a reason.

        A generation that is announced late has blocks here under other names. They are forgotten,
        and the engine is asked again for its events since then, which have their tokens.
        """
        assert self.continues(attach), f"{self.key} is described as another engine: {attach}"
        self.attach = attach
        if self._generations.announce(attach):
            if not self.sequencer.read_again(attach.generation_us / 1e6):
                self._drops["generation_late"] += self.block_count
            self.orphans.clear()
            self._generations.read_again()
            self._clear("generation")
            self._begin_generation()
        for group, view in self._views.items() if self.orphans else ():
            self._hold_orphans(self.orphans.adopt(group, tuple(self._adapters or ())), view)

    @property
    def _adapters(self) -> Adapters:
        now = self._generations.now
        return None if now is None else now.adapters

    def _begin_generation(self) -> None:
        """Begin another generation: what was stored is gone, or unknown, and the engine's hashes
        stand for other content."""
        assert not self.block_count, f"{self.key}: {self.block_count} blocks of old weights"
        assert not self.orphans, f"{self.key}: {self.orphans.block_count} orphans of old weights"
        for view in self._views.values():
            view.forget()

    # ---- the stream --------------------------------------------------------------------------

    def restart(self, now_ms: int) -> None:
        """Forget all: the engine's publisher has begun again, and nothing that we know counts any
        more."""
        self._drops["orphan"] += self.orphans.clear()
        self._joiner.take()
        self._views.clear()
        assert not self.orphans, f"{self.key}: {self.orphans.block_count} orphans outlive a restart"
        self._generations = Generations(self.attach)
        self._merger = BatchMerger()
        self.sequencer = self._new_sequencer(now_ms)

    def apply(self, ready: Ready, now_ms: int) -> bool:
        """Take what is in order; returns whether the engine's publisher has restarted.

        Some of it is put off until `settle`.
        """
        for item in ready:
            if item is Sign.RESTARTED:
                return True
            if item is Sign.LOST:
                self.settle(now_ms)
                self._clear("gap")
                self._drops["orphan"] += self.orphans.clear()
                if self._generations.lose():
                    self._begin_generation()
            else:
                assert isinstance(item, EngineBatch), f"{self.key}: {item} is no batch"
                self._batch_s = max(0.0, item.ts)
                for event in item.events:
                    self._apply_event(event, now_ms)
        return False

    def settle(self, now_ms: int) -> None:
        """Store what was put off: together where that works, or else one by one."""
        for parts in self._joiner.take():
            assert parts, f"{self.key}: nothing was put off together"
            # What one part adopts comes before the next part, should both be called the same.
            together = len(parts) > 1 and not self.orphans
            if together and not self._try_to_store(join(parts)):
                continue
            for event in parts:
                trouble = self._try_to_store(event)
                if trouble:
                    self._let_wait_or_drop(event, trouble, now_ms)

    def take_drafts(self) -> list[Draft]:
        """Return what is to be published about all that was applied since the last call."""
        return self._merger.take()

    def take_named(self) -> list[NamedBlocks]:
        """Return what the engine's events said of blocks since the last call."""
        named, self._named = self._named, []
        return named

    def age(self, now_ms: int) -> None:
        """Ask for a replay on behalf of blocks that have waited too long for their parent."""
        condemned = bool(self.orphans) and self.orphans.condemn(now_ms - self._limits.orphan_age_ms)
        if condemned and not self.sequencer.want_replay():
            self.drop_orphans()

    def drop_orphans(self) -> None:
        """Drop the condemned orphans: the replay has brought what there is, and they still wait."""
        self._drops["orphan"] += self.orphans.drop_condemned()

    def everything(self) -> list[Draft]:
        """Return all that is held, as drafts: the beginning of an epoch."""
        for group, view in self._views.items():
            self._merger.stored(group, view, view.block_runs())
        drafts = self._merger.take()
        assert bool(drafts) == bool(self.block_count), f"{self.key}: {self.block_count} blocks"
        return drafts

    def pieces(self) -> list[Piece]:
        """Return all that is held, for a snapshot."""
        return [
            piece
            for group, held in self._views.items()
            for piece in pieces_of(
                ViewKey(held.namespace_hex, self.key.rank, group), held.names(), held.held_of
            )
        ]

    def check(self) -> None:
        """Assert every invariant, in O(n)."""
        self.orphans.check()
        for view in self._views.values():
            view.check()
        assert self.sequencer.pending_count <= self._limits.pending_batches_max

    # ---- events ------------------------------------------------------------------------------

    def _apply_event(self, event: EngineEvent, now_ms: int) -> None:
        if isinstance(event, BlockStored):
            if not self._is_of_known_generation(event):
                self._drops["generation_unknown"] += len(event.block_hashes)
                return
            while not self._joiner.add(event):
                self.settle(now_ms)
            return
        self.settle(now_ms)
        match event:
            case BlockRemoved():
                self._remove(event)
            case AllBlocksCleared():
                self._clear("engine")
                self._drops["orphan"] += self.orphans.clear()
                if self._generations.clear(self._batch_s):
                    self._begin_generation()
            case OtherEvent():
                self._drops[event.reason] += 1

    def _is_of_known_generation(self, event: BlockStored) -> bool:
        """Tell whether the generation of stored blocks is known; perhaps it begins with them."""
        if _in_device(event) and self._generations.store(self._batch_s):
            self._begin_generation()
        return self._generations.now is not None

    def _try_to_store(self, event: BlockStored) -> str:
        """Hold the blocks of an event, or say why not; then nothing has changed."""
        assert event.block_hashes, f"{self.key}: an event without blocks was put off"
        if not _in_device(event):
            return "other_medium"
        view = self._view_of(event)
        if view is None:
            return "groups_full"
        if misfit := _misfit(event, view):
            return misfit
        parent = None if event.parent is None else view.name_of(event.parent)
        if parent is None and event.parent is not None:
            return NO_PARENT
        if parent is None and self._lora_of(event) == NO_ADAPTER:
            return NO_ADAPTER
        waiting = self._hold(event, view, parent)
        if isinstance(waiting, str):
            return waiting
        self._hold_orphans(waiting, view)
        return ""

    def _let_wait_or_drop(self, event: BlockStored, trouble: str, now_ms: int) -> None:
        assert trouble, f"{self.key}: an event without trouble is held"
        if trouble in (NO_PARENT, NO_ADAPTER):
            adapter = adapter_key(event.lora_id, event.lora_name) if trouble == NO_ADAPTER else ""
            if self.orphans.add(self._group_of(event), event, now_ms, adapter=adapter):
                return
            trouble = "orphans_full"
        self._drops[trouble] += len(event.block_hashes)

    def _hold_orphans(self, waiting: list[Orphan], view: HeldBlocks) -> None:
        """Hold those who have waited; children come after their parents."""
        while waiting:
            orphan = waiting.pop()
            first = orphan.event.parent
            parent = None if first is None else view.name_of(first)
            found = self._hold(orphan.event, view, parent)
            if isinstance(found, str):
                self._drops[found] += len(orphan.event.block_hashes)
                continue
            waiting += found
            self._let_go(view, orphan.group, orphan.removed)

    def _hold(
        self, event: BlockStored, view: HeldBlocks, parent: SequenceHash | None
    ) -> list[Orphan] | str:
        """Hold blocks; returns who waited for them. Or why they have no names: nothing is held."""
        group, hashes = self._group_of(event), event.block_hashes
        assert hashes, f"{self.key}: an event without blocks is held"
        now = self._generations.now
        assert now is not None, f"{self.key}: blocks of an unknown generation are held"
        unsaid = unsaid_key(event) if self.attach.shows_extra_keys else ""
        lora = self._lora_of(event)
        extras = extras_of(event, lora=lora, generation=now.name, unsaid=unsaid)
        try:
            chain = view.hasher.chain(event.token_ids, parent=parent, extras=extras)
        except IdentityError:
            return "bad_tokens"
        runs = view.store(hashes, chain, parent)
        if runs is None:
            return "name_conflict"
        if unsaid:
            self._drops["extra_key"] += len(hashes)
        if self._limits.naming:
            self._named.append(named(chain, event, unsaid, parent))
        self._merger.stored(group, view, runs)
        return self.orphans.adopt(group, hashes) if self.orphans else []

    def _remove(self, event: BlockRemoved) -> None:
        if not _in_device(event):
            self._drops["other_medium"] += len(event.block_hashes)
            return
        view = self._view_of(event)
        if view is not None:
            self._let_go(view, self._group_of(event), event.block_hashes)

    def _let_go(self, view: HeldBlocks, group: int, hashes: Iterable[EngineHash]) -> None:
        gone: list[SequenceHash] = []
        for engine_hash in hashes:
            block, held = view.remove(engine_hash)
            if block is not None:
                gone.append(block)
            elif not held and not self.orphans.remove(group, engine_hash):
                self._drops["removed_unknown"] += 1
        if gone:
            self._merger.removed(group, view, gone)

    def _clear(self, reason: str) -> None:
        assert reason, f"{self.key} is cleared for a reason"
        if self.block_count:
            self._merger.cleared(reason)
        for view in self._views.values():
            view.clear()

    # ---- helpers -----------------------------------------------------------------------------

    def _lora_of(self, event: BlockStored) -> str | None:
        """Return what stands for an event's adapter in names; None if nothing but its own name
        does."""
        if self._adapters is None or not event.lora_name:
            return None
        return self._adapters.get(adapter_key(event.lora_id, event.lora_name), NO_ADAPTER)

    def _group_of(self, event: BlockStored | BlockRemoved) -> int:
        return self.attach.namespace.group if event.group_idx is None else event.group_idx

    def _view_of(self, event: BlockStored | BlockRemoved) -> HeldBlocks | None:
        group = self._group_of(event)
        view = self._views.get(group)
        if view is None:
            if len(self._views) >= GROUPS_MAX:
                self._drops["groups_full"] += len(event.block_hashes)
                return None
            view = self._views[group] = HeldBlocks(self._hasher(self._namespace_of(group)))
        assert view.hasher.namespace.group == group, f"{self.key}: the view is not of group {group}"
        return view

    def _namespace_of(self, group: int) -> Namespace:
        """Return the namespace of a KV group. A connector from before groups had sizes of their own
        says the first one's alone."""
        own = next((one for one in self.namespaces if one.group == group), None)
        return own or msgspec.structs.replace(self.attach.namespace, group=group)

    def _new_sequencer(self, now_ms: int) -> Sequencer:
        replayable = bool(self.attach.replay_endpoint)
        return Sequencer(self._limits, self._drops, replayable=replayable, now_ms=now_ms)


def _fixed(attach: Attach) -> Attach:
    """Return an attachment without what may change in a life."""
    return msgspec.structs.replace(
        attach, generation="", generation_us=0, adapters=None, passes_through=""
    )


def _in_device(event: BlockStored | BlockRemoved) -> bool:
    medium = event.medium
    if medium not in DEVICE_MEDIA and (medium or "").upper() not in DEVICE_MEDIA:
        return False
    return event.locality != "REMOTE"


def _misfit(event: BlockStored, view: HeldBlocks) -> str:
    """Return why these are not blocks of the namespace; empty if they are, and have all their
    tokens."""
    block_tokens = view.hasher.namespace.block_tokens
    spare = len(event.token_ids) - len(event.block_hashes) * block_tokens
    if event.block_size != block_tokens:
        return "block_size"
    if spare > 0:
        # Blocks were left out, and which ones we are not told: better no name than a wrong one.
        return "masked_blocks"
    return "short_tokens" if spare < 0 else ""
