"""The disk tier's directory: what is in the files, and what of it would survive a power cut."""

from __future__ import annotations

from dataclasses import replace

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_disk_tier.core import effects as wanted
from kvbm_disk_tier.core import messages as disk
from kvbm_disk_tier.core.journal import RECORD_BYTES, Record, Replay, encode_records, replay

from tests.sim.memory import Memory
from tests.sim.world import World


class Store:
    """The disk tier's directory: what is in the files, and what of it would survive a power cut."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.layout: Layout | None = None
        """How the file is cut; None: there is no store."""
        units = world.plan.units(world.plan.disk_slots)
        self.file = Memory(world, units, parts=world.plan.part_count)
        self.journal = bytearray()
        self.next_journal: bytearray | None = None
        """The journal to come, of a rewrite under way; a crash leaves it out."""
        self.durable = 0
        """Bytes of the journal that are synchronised."""
        self.dirty: set[int] = set()
        self.journaled: set[SequenceHash] = set()

    @property
    def is_durable(self) -> bool:
        """A power cut would lose nothing."""
        return self.durable == len(self.journal)

    def recover(self) -> disk.StoreOpened | None:
        """Open what a former life has left."""
        if self.layout is None:
            return None
        self.next_journal = None
        del self.journal[len(self.journal) - len(self.journal) % RECORD_BYTES :]
        return disk.StoreOpened(self.layout, replay(bytes(self.journal), self.layout))

    def create(self, slot_bytes: int) -> disk.StoreOpened:
        """Make it anew."""
        layout = Layout.of(slot_bytes, self.file.unit_count * UNIT_BYTES // slot_bytes)
        if slab_bytes := self.world.plan.slab_units * UNIT_BYTES:
            layout = replace(layout, slab_slots=slab_bytes // slot_bytes)
        self.layout, self.durable, self.next_journal = layout, 0, None
        self.journal.clear()
        return disk.StoreOpened(layout, Replay(blocks={}, next_order=1, records=0, damaged=0))

    def append(self, records: tuple[Record, ...], *, commit: bool) -> None:
        """Write records; with `commit` data and journal are durable afterwards."""
        self.journal += encode_records(records)
        if self.next_journal is not None:
            self.next_journal += encode_records(records)
        if commit:
            self.journaled.update(record.block.hash for record in records)
            self.durable = len(self.journal)
            self.dirty.clear()

    def rewrite(self, part: wanted.RewriteJournal) -> None:
        """Write a part of the journal to come; with the last it is the journal, and durable."""
        if part.is_first:
            self.next_journal = bytearray()
        assert self.next_journal is not None, "a part of no rewrite"
        self.next_journal += encode_records(part.records)
        if part.is_last:
            self.journal, self.next_journal = self.next_journal, None
            self.durable = len(self.journal)

    def power_cut(self) -> None:
        """What was not synchronised may be gone, whole or in part, or damaged."""
        rng = self.world.rng
        if rng.random() < 0.5:  # Else the file is as long as it was, and not all of it as it was.
            del self.journal[rng.randint(self.durable, len(self.journal)) :]
        if len(self.journal) > self.durable:
            self.journal[rng.randrange(self.durable, len(self.journal))] ^= 0xFF
        for slot in sorted(self.dirty):
            if rng.random() < 0.5:
                self.file.tear(slot)
        self.dirty.clear()
