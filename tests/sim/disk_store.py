"""The disk tier's directory: what is in the files, and what of it would survive a power cut."""

from __future__ import annotations

from kvbm_common.identity import SequenceHash
from kvbm_disk_tier.core import messages as disk
from kvbm_disk_tier.core.journal import RECORD_BYTES, Record, Replay, encode_records, replay

from tests.sim.memory import Memory
from tests.sim.world import World


class Store:
    """The disk tier's directory: what is in the files, and what of it would survive a power cut."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.slot_bytes = 0
        self.file = Memory(world, world.plan.disk_slots, parts=world.plan.ranks)
        self.journal = bytearray()
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
        if not self.slot_bytes:
            return None
        del self.journal[len(self.journal) - len(self.journal) % RECORD_BYTES :]
        slot_count = self.file.slot_count
        journal = bytes(self.journal)
        return self._opened(replay(journal, slot_count=slot_count, slot_bytes=self.slot_bytes))

    def create(self, slot_bytes: int) -> disk.StoreOpened:
        """Make it anew."""
        self.slot_bytes, self.durable = slot_bytes, 0
        self.journal.clear()
        return self._opened(Replay(blocks={}, next_order=1, records=0, damaged=0))

    def _opened(self, found: Replay) -> disk.StoreOpened:
        return disk.StoreOpened(self.file.slot_count, self.slot_bytes, found)

    def append(self, records: tuple[Record, ...], *, commit: bool) -> None:
        """Write records; with `commit` data and journal are durable afterwards."""
        self.journal += encode_records(records)
        if commit:
            self.journaled.update(record.block.hash for record in records)
            self.durable = len(self.journal)
            self.dirty.clear()

    def power_cut(self) -> None:
        """What was not synchronised may be gone, whole or in part, or damaged."""
        rng = self.world.rng
        del self.journal[rng.randint(self.durable, len(self.journal)) :]
        if len(self.journal) > self.durable:
            self.journal[rng.randrange(self.durable, len(self.journal))] ^= 0xFF
        for slot in sorted(self.dirty):
            if rng.random() < 0.5:
                self.file.tear(slot)
        self.dirty.clear()
