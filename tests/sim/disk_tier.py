"""The disk tier of the simulation: the real core over a directory that outlives it."""

from __future__ import annotations

from collections.abc import Mapping

from kvbm_common.identity import SequenceHash
from kvbm_disk_tier.core import effects as wanted
from kvbm_disk_tier.core import messages as disk
from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.limits import DiskTierLimits

from tests.sim import invariants
from tests.sim.ages import age_store
from tests.sim.bus import Bus
from tests.sim.cluster import Cluster, Host
from tests.sim.disk_store import Store
from tests.sim.lower_tier import LowerTier
from tests.sim.memory import Memory, copy, right_cells, sums_of, units_of
from tests.sim.world import Call, World


class DiskTier(LowerTier):
    """G3. Its store outlives it."""

    tier = "disk"
    compares = True
    """The mover compares checksums; a meta-test turns that off."""

    def __init__(self, world: World, bus: Bus, cluster: Cluster, host: Host) -> None:
        super().__init__(world, bus, cluster, host, "disk-tier-0")
        self.store = Store(world)

    def make_core(self) -> DiskTierCore:
        self._recovered: set[SequenceHash] = set()
        self._store_free_at = 0.0
        return DiskTierCore(
            host=self.host.name,
            instance="0",
            epoch=self.epoch,
            frequency_filter=FrequencyFilter(enabled=self.world.plan.filtered),
            limits=DiskTierLimits(
                batch_blocks_max=4,
                writes_max=2,
                reads_max=3,
                announced_blocks_max=2,
                rewritten_slots_max=2,
                pending_max=self.world.plan.pending_max,
            ),
        )

    def recover(self) -> None:
        recovered = self.store.recover()
        if recovered is not None:
            self.world.marks["blocks recovered"] += len(recovered.replay.blocks)
            self.world.marks["records damaged"] += recovered.replay.damaged
            self._recovered = {block.hash for block in recovered.replay.blocks.values()}
            self.step(recovered)

    def contents(self) -> Mapping[SequenceHash, tuple[bytes, ...]]:
        """Return what is in the slots, trusting what the journal has said: after a crash only a
        read can tell."""
        found = invariants.contents(self.core.inventory.table.by_place(), self.store.file)
        invariants.require(found.keys() <= self.store.journaled, "committed before it was durable")
        trusted = self._recovered & found.keys()
        return found | {name: right_cells(name, self.world.plan.part_count) for name in trusted}

    # --- the store --------------------------------------------------------------------------

    def _in_store(self, call: Call) -> None:
        """Call in the store's one thread: one after the other."""
        self._store_free_at = max(self._store_free_at, self.world.now) + self.world.delay(1)
        self.later(self._store_free_at - self.world.now, call)

    def open_store(self, slot_bytes: int) -> None:
        def opened() -> None:
            self.step(age_store(self.store.create(slot_bytes), self.world))

        self._in_store(opened)

    def append(self, effect: wanted.AppendJournal) -> None:
        self._in_store(lambda: self._append(effect))

    def _append(self, effect: wanted.AppendJournal) -> None:
        self.store.append(effect.records, commit=effect.write is not None)
        if effect.write is not None:
            self.step(disk.Journaled((effect.write,)))

    def rewrite(self, effect: wanted.RewriteJournal) -> None:
        def written() -> None:
            self.store.rewrite(effect)
            self.world.marks["journal rewritten in parts"] += not effect.is_first
            self.step(disk.JournalRewritten() if effect.is_last else disk.JournalPartWritten())

        self._in_store(written)

    def write(self, effect: wanted.WriteSlots, arena: Memory) -> None:
        duration_ms, file = self.world.transfer_ms("write"), self.store.file
        units = units_of(effect.blocks[0].bytes)
        for slot in effect.targets:
            self.store.dirty.update(range(slot, slot + units))
        sources = (arena, [arena.whole(slot, units) for slot in effect.sources])
        targets = (file, [file.whole(slot, units) for slot in effect.targets])
        copy(self, sources, targets, duration_ms)
        failed = not self.world.calm and self.world.rng.random() < self.world.plan.loss
        ended = disk.WriteFailed(effect.write, "io") if failed else disk.Written(effect.write)
        self.later(duration_ms, lambda: self.step(ended))

    def read(self, effect: wanted.ReadSlots, arena: Memory) -> None:
        """Read. Bytes may be late, but nothing is reported before the last one is there."""
        left_ms = effect.until_ms - self.world.now_ms
        duration_ms, file = self.world.transfer_ms("read"), self.store.file
        units = [units_of(block.bytes) for block in effect.blocks]
        sources = (file, list(map(file.whole, effect.sources, units)))
        copy(self, sources, (arena, list(map(arena.whole, effect.targets, units))), duration_ms)
        if duration_ms > left_ms:
            failed = disk.ReadFailed(effect.read, "transfer_timeout")
            self.world.marks["read late"] += 1
            self.later(duration_ms, lambda: self.step(failed))
            return
        self.later(duration_ms, lambda: self._read_landed(effect, arena))

    def _read_landed(self, effect: wanted.ReadSlots, arena: Memory) -> None:
        """Say that the bytes are there; summing them up takes a while."""
        self.step(disk.ReadLanded(effect.read))
        self.later(self.world.rng.randint(0, 3), lambda: self._read_ended(effect, arena))

    def _read_ended(self, effect: wanted.ReadSlots, arena: Memory) -> None:
        units = [units_of(block.bytes) for block in effect.blocks]
        sums = tuple(map(arena.sums, effect.targets, units))
        intact = tuple(
            block.has_sums(found) or not self.compares
            for found, block in zip(sums, effect.blocks, strict=True)
        )
        self.world.marks["disk block corrupt"] += len(intact) - sum(intact)
        # After a crash the journal may name what was never written.
        self.check_corrupt(effect, arena, intact, self._recovered)
        if not self.compares:  # Then what it says of parts is what should have come.
            sums = tuple(sums_of(right_cells(block.hash, arena.parts)) for block in effect.blocks)
        self.step(disk.ReadDone(effect.read, intact, sums=sums))
