"""The inventory: which slot holds which block, and the only place where blocks come and leave.

Whatever changes the slots is journaled, announced and remembered here, so that table, journal,
events and diary cannot disagree.

A block of a former life is announced when it is *unfolded*, some time after the start. Until then
no snapshot contains it, and no event is published when it leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from kvbm_common.eviction import make_policy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.announcer import PAGE_BLOCKS, Announcer, BlocksNow
from kvbm_common.tier.departures import Departures
from kvbm_common.tier.diary import DIARY_ENTRIES_MAX, Diary
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.leases import LeaseTable
from kvbm_common.tier.reclaim import ANOTHER_SIZE
from kvbm_common.tier.slots import Block, SlotTable
from kvbm_common.tier.tenants import Tenants, shares_of

from kvbm_disk_tier.core.effects import AnnounceLater, Publish
from kvbm_disk_tier.core.journal_writer import Entries, JournalWriter
from kvbm_disk_tier.core.limits import Means
from kvbm_disk_tier.core.messages import StoreOpened


class Inventory:
    """The blocks in the slots of one store, with its leases, journal and announcements.

    The verbs of operators use it as an `AdministeredTier`.
    """

    def __init__(
        self, announcer: Announcer, *, policy: str, has_journal: bool, means: Means
    ) -> None:
        self._tenant_shares = shares_of(means.limits.tenant_shares)
        self.policy_name = policy
        self.table = self._new_table(Layout.unsized(0))
        self.leases = LeaseTable(announcer.epoch)
        """The pins of operators; reads keep their slots without leases."""
        self.diary = Diary()
        self.departures = Departures(means.limits.history_entries)
        """Times and reasons of blocks that have left, or were not written."""
        self.journal = JournalWriter(
            has_file=has_journal,
            place=lambda slot: self.table.pool.place_of[slot],
            diary=self.diary,
            means=means,
        )
        self.announcer = announcer
        self.stopped = False
        """The last `cleared` is out: nothing more is announced."""
        self.draining = False
        """An operator wants no new blocks here."""
        self._limits, self._counts, self._emit = means.limits, means.counts, means.emit
        for reason in ("evicted", "corrupt", "gone"):
            self._counts[f"evictions.{reason}"] += 0  # A counter is shown before it counts.

    # --- the store's life -------------------------------------------------------------------

    def _new_table(self, layout: Layout) -> SlotTable:
        make = partial(make_policy, self.policy_name)
        return SlotTable(layout, make, Tenants(self._tenant_shares), packs=True)

    def opened(self, event: StoreOpened, now_ms: int) -> None:
        """Take the blocks of the journal over, and begin to announce them."""
        assert len(self.table) == 0, f"{len(self.table)} blocks of another store are here"
        self.table = self._new_table(event.layout)
        self.departures.size_for(event.layout.slot_count)
        self.journal.opened(event.replay, event.layout)
        self.table.restore(event.replay.blocks)
        self._counts["recovered_blocks"] += len(self.table)
        for name in self.table.latest_folded(DIARY_ENTRIES_MAX):
            self.diary.note(now_ms, "recovered from the journal", name)
        self.announce_former()

    def reformat(self, now_ms: int) -> None:
        """Lose every block and slot: another store takes the place of this one."""
        assert not self.table.staged(), "a write is in flight"
        unannounced = {block.hash for block in self.table.unfold(self.table.folded_count)}
        blocks = self.table.blocks()
        self._counts["dropped.store_reformatted"] += len(blocks)
        self.table = self._new_table(Layout.unsized(0))
        self.journal.dropped()
        for lease in self.leases.all():  # The leased blocks are gone, with their slots.
            self.leases.release(lease.id)
        assert len(self.leases) == 0, f"{len(self.leases)} leases hold slots of another store"
        self._announce_removed(blocks, "reformatted", unannounced, now_ms)

    def announce_former(self) -> None:
        """Announce the next blocks of a former life; those not announced yet are served as well."""
        if not self.table.folded_count or self.stopped:
            return
        blocks = self.table.unfold(self._limits.announced_blocks_max)
        assert len(blocks) <= self._limits.announced_blocks_max
        found = (self.table.find(block.hash) for block in blocks)
        self.journal.restored(slot for slot in found if slot is not None)
        self._announce(blocks)
        if self.table.folded_count:
            self._emit(AnnounceLater())

    def announced_blocks(self) -> list[Block]:
        """Return the blocks that were announced and have not left, for a snapshot."""
        announced = [block for part in self.announced_parts() for block in part()]
        folded = 0 if self.stopped else len(self.table) - len(announced)
        assert 0 <= folded <= self.table.folded_count, f"{folded} blocks are folded"
        return announced

    def announced_parts(self) -> list[BlocksNow]:
        """Return what lists those blocks, a page of a snapshot each."""
        parts = self.table.cut(PAGE_BLOCKS)
        return [partial(self._announced_in, part) for part in parts]

    def _announced_in(self, slots: Sequence[range]) -> list[Block]:
        return [] if self.stopped else self.table.unfolded_in(slots)

    # --- blocks come ------------------------------------------------------------------------

    def stage(
        self,
        names: Sequence[SequenceHash],
        block_bytes: int,
        now_ms: int,
        namespace: bytes = b"",
    ) -> list[int]:
        """Return slots for these blocks of one size, now staged; fewer: there is no more room."""
        assert names, "slots are staged for blocks"
        room = self.table.room_for(len(names), block_bytes)
        if room < len(names):
            room = self._make_room(len(names), block_bytes, now_ms, namespace)
        staged = names[:room]
        slots = self.table.stage_all(staged, block_bytes) if room else []
        places = self.table.places(slots)
        self.diary.note_all(now_ms, "being written to slot {slot}", staged, places)
        return slots

    def commit(self, batches: Iterable[Entries], now_ms: int) -> list[Block]:
        """Make durable batches findable and announce them together; returns their blocks."""
        blocks: list[Block] = []
        for entries in batches:
            assert entries, "a batch without blocks is not committed"
            self.table.register_all(entries)
            names = [block.hash for _, block in entries]
            slots = [slot for slot, _ in entries]
            places = self.table.places(slots)
            self.diary.note_all(now_ms, "committed in slot {slot}", names, places)
            blocks += [block for _, block in entries]
        self._announce(blocks)
        return blocks

    def abort(self, entries: Iterable[tuple[int, Block]]) -> None:
        """Give back staged slots whose bytes are not there, or not the right ones."""
        for slot, block in entries:
            assert self.table.find(block.hash) != slot, self.diary.story(block.hash)
            self.table.abort(slot)

    def announce_listed(self, blocks: Sequence[Block], now_ms: int) -> None:
        """Announce blocks that a listing has found and registered."""
        assert all(self.table.find(block.hash) is not None for block in blocks)
        self.diary.note_all(now_ms, "listed", [block.hash for block in blocks])
        self._counts["listed_blocks"] += len(blocks)
        self._announce(blocks)

    def _announce(self, blocks: Sequence[Block]) -> None:
        if not self.stopped:
            for event in self.announcer.stored(blocks):
                self._emit(Publish(event))

    # --- blocks leave -----------------------------------------------------------------------

    def _make_room(self, count: int, block_bytes: int, now_ms: int, namespace: bytes) -> int:
        """Evict for `count` blocks of this size and namespace; returns how many can be staged."""
        victims = self.table.victims(count, block_bytes, namespace=namespace)
        self._evict(victims.chosen, self.policy_name, now_ms)
        if victims.emptied:
            self._counts["slabs_moved"] += 1
            self._evict(victims.emptied, ANOTHER_SIZE, now_ms)
        return self.table.room_for(count, block_bytes)

    def why_no_room(self, block_bytes: int) -> str:
        """Return why a block of this size found no slot."""
        pool = self.table.pool
        if pool.size_of(block_bytes) is not None:
            return "no_room"
        is_long = pool.layout.slot_bytes_of(block_bytes) > pool.layout.slab_bytes
        return "too_large" if is_long else "size_limit"

    def evict_idle(self, count: int, now_ms: int) -> int:
        """Evict up to `count` blocks of any size; returns how many have left."""
        idle = self.table.longest_idle(count)
        self._evict(idle, self.policy_name, now_ms)
        return len(idle)

    def _evict(self, victims: Sequence[SequenceHash], by: str, now_ms: int) -> None:
        """Evict blocks that were chosen by this policy, or for this reason."""
        assert len(set(victims)) == len(victims), "a block is evicted once"
        unannounced = self.table.folded(victims)
        evicted = [(self.table.find(name), self.table.evict(name)) for name in victims]
        self.journal.removed(evicted)
        gone = [block for _, block in evicted]
        self._announce_removed(gone, "evicted", unannounced, now_ms, detail=by)

    def lose(self, lost: Iterable[tuple[int, Block]], reason: str, now_ms: int) -> None:
        """Discard blocks that cannot be read any more: no lookup finds them again.

        With the reason `gone` the store has lost them itself, and the journal needs no record.
        """
        assert reason, "blocks are lost for a reason"
        lost = list(lost)
        unannounced = self.table.folded(block.hash for _, block in lost)
        here = self.table.find_all([block.hash for _, block in lost])
        # No reader gives back what an operator has pinned.
        self.table.unpin(self.leases.leave(slot for slot in here if slot is not None))
        found = [
            (slot, block) for slot, block in lost if self.table.discard(block.hash) is not None
        ]
        if reason != "gone":
            self.journal.removed(found)
        self._announce_removed([block for _, block in found], reason, unannounced, now_ms)

    def remove(self, names: Iterable[SequenceHash], reason: str, now_ms: int) -> None:
        """Discard blocks at once, pinned or not."""
        assert reason, "blocks are removed for a reason"
        slots = [slot for name in names if (slot := self.table.find(name)) is not None]
        self.lose([(slot, self.table.block(slot)) for slot in slots], reason, now_ms)

    def _announce_removed(
        self,
        blocks: Sequence[Block],
        reason: str,
        unannounced: Collection[SequenceHash],
        now_ms: int,
        *,
        detail: str = "",
    ) -> None:
        """Announce that blocks have left, except those in `unannounced`."""
        assert reason, "blocks are lost for a reason"
        self._counts[f"evictions.{reason}"] += len(blocks)
        names = [block.hash for block in blocks]
        self.diary.note_all(now_ms, f"removed: {reason}", names)
        self.departures.note(names, reason, now_ms, detail=detail)
        announced = (
            [block for block in blocks if block.hash not in unannounced] if unannounced else blocks
        )
        if not self.stopped:
            for event in self.announcer.removed(announced, reason):
                self._emit(Publish(event))

    # --- operators --------------------------------------------------------------------------

    def use_policy(self, name: str) -> bool:
        """Have another policy choose victims, also in stores to come."""
        assert name, "a policy has a name"
        self.policy_name = name
        self.table.use_policy(partial(make_policy, name))
        return True

    def check(self) -> None:
        """Assert every invariant of slots and leases; O(slots)."""
        self.table.check()
        self.leases.check()
        assert self.table.discarded().isdisjoint(self.leases.pinned_slots), "a lost block's slot"
