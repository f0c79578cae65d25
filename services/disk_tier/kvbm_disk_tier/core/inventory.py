"""The inventory: which slot holds which block, and the only place where blocks come and leave.

Whatever changes the slots is journaled, announced and remembered here, so that table, journal,
events and diary cannot disagree.

A block of a former life is announced when it is unfolded. Until then it was not announced, so that
no snapshot has it, and no event tells when it leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from kvbm_common.eviction import make_policy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.departures import Departures
from kvbm_common.tier.diary import DIARY_ENTRIES_MAX, Diary
from kvbm_common.tier.leases import Lease, LeaseTable
from kvbm_common.tier.slots import Block, SlotTable

from kvbm_disk_tier.core.announcements import Announcements
from kvbm_disk_tier.core.effects import AnnounceLater
from kvbm_disk_tier.core.journal_writer import JournalWriter
from kvbm_disk_tier.core.messages import StoreOpened
from kvbm_disk_tier.core.outbox import Outbox

Entries = list[tuple[int, Block]]
"""Slots and the blocks in them."""


class Inventory:
    """The slots of one store, and what an operator wants of them: see `AdministeredTier`."""

    def __init__(
        self,
        *,
        policy: str,
        first_lease: int,
        announced_max: int,
        journal: JournalWriter,
        announcements: Announcements,
        diary: Diary,
        departures: Departures,
        outbox: Outbox,
        counts: Counter[str],
    ) -> None:
        assert announced_max > 0
        self.table = SlotTable(0, make_policy(policy))
        self.leases = LeaseTable(first_id=first_lease)
        """The pins of operators; reads hold their slots themselves."""
        self.diary = diary
        self.draining = False
        """An operator wants no new blocks here."""
        self.now_ms = 0
        """The time of the step that is being taken: operators' verbs bring none."""
        self.policy_name = policy
        self._announced_max = announced_max
        self._journal = journal
        self._announcements = announcements
        self._departures = departures
        self._outbox = outbox
        self._counts = counts
        for reason in ("evicted", "corrupt", "gone"):
            counts[f"evictions.{reason}"] += 0  # A counter is shown before it counts.

    # --- the store's life -------------------------------------------------------------------

    def opened(self, event: StoreOpened) -> None:
        """Take over what the journal says is there, and begin to announce it."""
        assert len(self.table) == 0, f"{len(self.table)} blocks of another store are here"
        policy = make_policy(self.policy_name, event.slot_count)
        self.table = SlotTable(event.slot_count, policy)
        self._journal.opened(event.replay, event.slot_count)
        self.table.restore(event.replay.blocks)
        self._counts["recovered_blocks"] += len(self.table)
        for name in self.table.latest(DIARY_ENTRIES_MAX):
            self.diary.note(self.now_ms, "recovered from the journal", name)
        self.announce_former()

    def reformat(self) -> None:
        """Lose every block and slot: another store takes the place of this one."""
        assert not self.table.staged(), "a write is in flight"
        untold = {block.hash for block in self.table.unfold(self.table.folded_count)}
        blocks = self.table.blocks()
        self._counts["dropped.store_reformatted"] += len(blocks)
        self.table = SlotTable(0, make_policy(self.policy_name))
        for lease in self.leases.all():  # What they held is gone, and so are its slots.
            self.leases.release(lease.id)
        self._announce_removed(blocks, "reformatted", untold)

    def announce_former(self) -> None:
        """Announce the next of a former life's blocks, which are served meanwhile."""
        if not self.table.folded_count or self._announcements.stopped:
            return
        blocks = self.table.unfold(self._announced_max)
        assert len(blocks) <= self._announced_max
        self._announcements.stored(blocks)
        if self.table.folded_count:
            self._outbox.emit(AnnounceLater())

    def told_blocks(self) -> list[Block]:
        """Return the blocks that the world believes to be here."""
        return [] if self._announcements.stopped else self.table.unfolded_blocks()

    # --- blocks come ------------------------------------------------------------------------

    def stage(self, names: Sequence[SequenceHash]) -> list[int]:
        """Return a slot for each of these blocks, which are on their way into it."""
        assert len(names) <= self.table.reset_count, f"no room for {len(names)} blocks"
        slots = self.table.stage_all(names)
        self.diary.note_all(self.now_ms, "being written to slot {slot}", names, slots)
        return slots

    def commit(self, batches: Iterable[Entries]) -> list[Block]:
        """Make durable batches findable and announce them together; returns their blocks."""
        blocks: list[Block] = []
        for entries in batches:
            assert entries, "a batch without blocks is not committed"
            self.table.register_all(entries)
            names = [block.hash for _, block in entries]
            slots = [slot for slot, _ in entries]
            self.diary.note_all(self.now_ms, "committed in slot {slot}", names, slots)
            blocks += [block for _, block in entries]
        self._announcements.stored(blocks)
        return blocks

    def abort(self, entries: Iterable[tuple[int, Block]]) -> None:
        """Give back staged slots whose bytes are not there, or not the right ones."""
        for slot, block in entries:
            assert self.table.find(block.hash) != slot, self.diary.story(block.hash)
            self.table.abort(slot)

    def announce_listed(self, blocks: Sequence[Block]) -> None:
        """Announce blocks that a listing has found and registered."""
        assert all(self.table.find(block.hash) is not None for block in blocks)
        self.diary.note_all(self.now_ms, "listed", [block.hash for block in blocks])
        self._counts["listed_blocks"] += len(blocks)
        self._announcements.stored(blocks)

    # --- blocks leave -----------------------------------------------------------------------

    def make_room(self, count: int) -> int:
        """Evict for `count` slots; returns how many can be staged now."""
        assert count >= 0
        short = count - self.table.reset_count
        if short > 0:
            self._evict(self.table.policy.victims(short))
        return min(count, self.table.reset_count)

    def _evict(self, victims: Sequence[SequenceHash]) -> None:
        assert len(set(victims)) == len(victims), "a block is evicted once"
        untold = self.table.folded(victims)
        evicted = [(self.table.find(name), self.table.evict(name)) for name in victims]
        self._journal.removed(evicted)
        self._announce_removed([block for _, block in evicted], "evicted", untold)

    def lose(self, lost: Iterable[tuple[int, Block]], reason: str) -> None:
        """Discard blocks that cannot be had any more: no lookup finds them again.

        `gone`: the store has lost them already, and the journal need not say so.
        """
        assert reason, "blocks are lost for a reason"
        lost = list(lost)
        untold = self.table.folded(block.hash for _, block in lost)
        found = [
            (slot, block) for slot, block in lost if self.table.discard(block.hash) is not None
        ]
        if reason != "gone":
            self._journal.removed(found)
        self._announce_removed([block for _, block in found], reason, untold)

    def remove(self, names: Iterable[SequenceHash], reason: str) -> None:
        """Discard blocks at once, pinned or not."""
        assert reason, "blocks are removed for a reason"
        slots = [slot for name in names if (slot := self.table.find(name)) is not None]
        self.lose([(slot, self.table.block(slot)) for slot in slots], reason)

    def _announce_removed(
        self, blocks: Sequence[Block], reason: str, untold: Collection[SequenceHash]
    ) -> None:
        """Announce lost blocks, but for those that were never announced."""
        assert reason, "blocks are lost for a reason"
        self._counts[f"evictions.{reason}"] += len(blocks)
        names = [block.hash for block in blocks]
        self.diary.note_all(self.now_ms, f"removed: {reason}", names)
        detail = self.policy_name if reason == "evicted" else ""
        self._departures.note(names, reason, self.now_ms, detail=detail)
        told = [block for block in blocks if block.hash not in untold] if untold else blocks
        self._announcements.removed(told, reason)

    # --- operators --------------------------------------------------------------------------

    def use_policy(self, name: str) -> bool:
        """Have another policy choose victims, also in stores to come."""
        assert name, "a policy has a name"
        self.policy_name = name
        self.table.use_policy(make_policy(name, self.table.slot_count))
        return True

    def end_leases(self, leases: Iterable[Lease]) -> None:
        """Unpin what some leases held."""
        for lease in leases:
            assert self.leases.find(lease.id) is None, f"{lease} has not ended"
            self.table.unpin(lease.slots)

    def check(self) -> None:
        """Assert every invariant of slots and leases; O(slots)."""
        self.table.check()
        self.leases.check()
