"""The tier's common state: store, slots, journal and announcements, shared by its two paths.

The store follows the arena: its slots are as large as the arena's, and one that fits no more is
made anew as soon as nothing flies. A store that cannot be made is tried again, and said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from kvbm_common.announcer import EVENT_BLOCKS_MAX, Announcer
from kvbm_common.batches import BATCH_UNIT_BYTES, batch_blocks
from kvbm_common.breaker import Breaker, BreakerState
from kvbm_common.config import Settings
from kvbm_common.diary import DIARY_ENTRIES_MAX, Diary
from kvbm_common.eviction import make_policy
from kvbm_common.fates import Fates
from kvbm_common.identity import SequenceHash
from kvbm_common.leases import Lease, LeaseTable
from kvbm_common.slots import Block, SlotTable
from kvbm_common.wire.events import Event
from kvbm_common.wire.events import Tier as WireTier
from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.journal import RECORD_BYTES, Operation, Record
from kvbm_disk_tier.messages import (
    AnnounceLater,
    AppendJournal,
    Depth,
    Effect,
    OpenStore,
    Publish,
    RewriteJournal,
    StoreFailed,
    StoreOpened,
)

SLOW_MS = 5_000
"""A batch of sixteen blocks that takes so long is slower than computing them anew."""
STORE_RETRY_MS = 5_000
"""A full disk is rarely emptied faster."""
JOURNAL_RECORDS_MIN = 65_536
"""8 MiB: a journal shorter than that is not worth a rewrite."""


@dataclass(frozen=True, slots=True)
class StoreKind:
    """What a core needs to know of the medium below it."""

    service: str
    tier: WireTier
    sized: bool
    """Its slots are places as large as the arena's. Otherwise a slot is a name in the table, the
    store is opened once, without an arena, and what it holds is listed later."""
    verifies_writes: bool
    """What is written is compared with its checksum first, so it is right whatever became of the
    lease."""
    offloaded: str = ""
    """The counter of its blocks; empty: by the arena's mode."""


DISK = StoreKind("disk-tier", "disk", sized=True, verifies_writes=False)
OBJECT = StoreKind(
    "object-tier", "object", sized=False, verifies_writes=True, offloaded="offload_blocks_d2o"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the core, from the configuration."""

    writes_max: int = 4
    """Batches being written; as many are leased ahead."""
    writes_beside_reads_max: int = 1
    """Onboarding goes ahead of offloading: while reads are in flight, writes hold back."""
    commits_max: int = 32
    """Batches that are written and not announced yet: they wait for the journal, not for the
    disk's bandwidth, and share its synchronisations."""
    journal_wait_ms: int = 100
    """How long the record of what was written waits for others, while more is being written."""
    reads_max: int = 64
    """Fills: as many as NIXL is given at a time."""
    reads_waiting_max: int = 4096
    read_blocks_max: int = 256
    write_blocks_max: int = 64
    """Blocks in flight, as far as nothing was measured; one batch may always fly."""
    ahead_batches: int = 4
    """Reads, or writes, that are handed over beyond that: they wait in the mover, and the disk has
    the next one at once when one has ended."""
    batch_blocks_max: int = 16
    batch_bytes: int = 0
    """A transfer has more blocks when they are small: see `batches.batch_blocks`."""
    batch_transfers_max: int = 4
    """Of one batch of writes, on a disk that is fast: see `batch_size`."""
    pending_max: int = 65_536
    """Blocks that wait to be written; beyond that the oldest are dropped and counted."""
    lease_ms: int = 5_000
    journal_records_per_slot: int = 4
    """The journal is rewritten when it holds more than this per slot (and 65,536)."""
    announced_blocks_max: int = EVENT_BLOCKS_MAX
    """Of a former life's blocks so many are announced in one step, within some 5 ms."""


def limits_of(settings: Settings) -> Limits:
    """What the configuration bounds; the rest by default."""
    return Limits(
        writes_max=settings.max_concurrent_transfers,
        batch_blocks_max=settings.max_transfer_batch_size,
        batch_bytes=settings.max_transfer_batch_size * BATCH_UNIT_BYTES,
        lease_ms=settings.lease_ms,
    )


class Tier:
    """Slots of one store, and the only place that journals and announces."""

    def __init__(
        self,
        *,
        host: str,
        instance: str,
        epoch: int,
        limits: Limits,
        policy: str = "lru",
        kind: StoreKind = DISK,
    ) -> None:
        self.limits = limits
        self.kind = kind
        self.announcer = Announcer(
            host=host, source=f"{kind.service}-{instance}", tier=kind.tier, epoch=epoch
        )
        self.table = SlotTable(0, make_policy(policy))
        self.leases = LeaseTable(first_id=(epoch % 2**31 << 32) + 1)
        """The pins of operators; reads hold their slots themselves."""
        self.draining = False
        """An operator wants no new blocks here."""
        self.now_ms = 0
        """Of the step that is being taken, for the diary."""
        self.slot_bytes = 0
        self.arenas: dict[str, ArenaReply] = {}
        """Those that are mapped, by the host tier whose they are."""
        self.hosts: set[str] = set()
        """The host tiers that are there."""
        self.stopping = False
        """The last `cleared` is out: nothing more is announced or begun."""
        self.problem = ""
        """Why there is no store, for /readyz."""
        self.is_down = False
        """The store is there and does not work: nothing is begun."""
        self.may_write = kind.sized
        """Otherwise only after a first look at what is there."""
        self.counts: Counter[str] = Counter()
        self.diary = Diary()
        self.fates = Fates()
        """What became of the blocks that were here, or should have come here."""
        self.effects: list[Effect] = []
        self.breaker = Breaker()
        self._policy_name = policy
        self._is_open = False
        self._opening = False
        self._open_again_ms = 0
        self._order = 1
        self._journal_records = 0
        self._next_id = 1

    def emit(self, *effects: Effect) -> None:
        """Have something done after this step."""
        self.effects.extend(effects)

    def take_id(self) -> int:
        """An id for a write or a read."""
        self._next_id += 1
        return self._next_id

    @property
    def staging(self) -> bool:
        """Disk-only mode: every block is for the disk."""
        return any(arena.staging for arena in self.arenas.values())

    @property
    def arena(self) -> ArenaReply | None:
        """An arena with slots, if there is one."""
        return next((arena for arena in self.arenas.values() if arena.slot_bytes), None)

    def usable(self, arena: ArenaReply) -> bool:
        """Can blocks be moved between this arena and the store?"""
        fits = arena.slot_bytes == self.slot_bytes or not self.kind.sized
        return fits and arena.slot_bytes > 0

    def arena_of_life(self, epoch: int) -> ArenaReply | None:
        """The arena that an epoch names."""
        return next((one for one in self.arenas.values() if one.epoch == epoch), None)

    def arena_for(self, instance: str) -> ArenaReply | None:
        """Where to lease what this host tier had; if it is gone, another may have it."""
        known = self.arenas.get(instance)
        if known is not None or instance in self.hosts:
            return known if known is not None and self.usable(known) else None
        return next((one for one in self.arenas.values() if self.usable(one)), None)

    @property
    def accepting(self) -> bool:
        """Whether blocks are well placed here: otherwise other instances write ours, too."""
        sound = not self.problem and self.breaker.state is not BreakerState.OPEN
        return sound and not self.stopping and not self.draining

    # --- the disk's health ------------------------------------------------------------------

    def disk_ended(self, started_ms: int, now_ms: int, *, failed: bool) -> None:
        """Something that went to the disk has come back, or has not."""
        if not failed and now_ms - started_ms < SLOW_MS:
            self.breaker.good()
            return
        self.counts["disk_troubles.failed" if failed else "disk_troubles.slow"] += 1
        if self.breaker.trouble(now_ms):
            self.counts["disk_bypasses"] += 1

    # --- the store --------------------------------------------------------------------------

    def fits(self) -> bool:
        """There is an arena and a store that works, and their slots are of the same size."""
        if not self.kind.sized:
            sizes = (arena.slot_bytes for arena in self.arenas.values())
            self.slot_bytes = max(sizes, default=self.slot_bytes)
        fits = any(self.usable(arena) for arena in self.arenas.values())
        return fits and self._is_open and not self.is_down

    def fit_store(self, now_ms: int) -> None:
        """Have a store whose slots are those of an arena. Only while nothing flies."""
        sizes = {arena.slot_bytes for arena in self.arenas.values() if arena.slot_bytes}
        if self.kind.sized and (not sizes or self.slot_bytes in sizes):
            return
        slot_bytes = max(sizes, default=0)
        if not self.kind.sized and self._is_open:
            return
        if self._opening or self.stopping or now_ms < self._open_again_ms:
            return
        self._is_open, self._opening = False, True
        untold = {block.hash for block in self.table.unfold(self.table.folded_count)}
        blocks = self.table.blocks()
        self.counts["dropped.store_reformatted"] += len(blocks)
        self.table = SlotTable(0, make_policy(self._policy_name))
        for lease in self.leases.all():  # What they held is gone, and so are its slots.
            self.leases.release(lease.id)
        self.slot_bytes = 0
        self.announce_removed(blocks, "reformatted", untold)
        self.emit(OpenStore(slot_bytes))

    def opened(self, event: StoreOpened, now_ms: int) -> None:
        """Take over what the journal says is there, and begin to announce it."""
        assert len(self.table) == 0
        self._is_open, self._opening = True, False
        self.problem = ""
        self.slot_bytes = event.slot_bytes
        policy = make_policy(self._policy_name, event.slot_count)
        self.table = SlotTable(event.slot_count, policy)
        self._order = event.replay.next_order
        self._journal_records = event.replay.records
        self.counts["journal_damaged_records"] += event.replay.damaged
        self.table.restore(event.replay.blocks)
        self.counts["recovered_blocks"] += len(self.table)
        self.counts["bytes.measuring"] += event.depth.written_bytes
        self._use_depth(event.depth)
        for name in self.table.latest(DIARY_ENTRIES_MAX):
            self.diary.note(now_ms, "recovered from the journal", name)
        self.announce_former()

    def _use_depth(self, depth: Depth) -> None:
        reads, writes = self.limits.read_blocks_max, self.limits.write_blocks_max
        self.limits = replace(
            self.limits,
            read_blocks_max=reads if depth.reads is None else depth.reads,
            write_blocks_max=writes if depth.writes is None else depth.writes,
        )

    def open_failed(self, event: StoreFailed, now_ms: int) -> None:
        """No store for now: the service lives on, says why, and tries again."""
        self._opening = False
        self.problem = event.reason
        self.counts["store_failures"] += 1
        self._open_again_ms = now_ms + STORE_RETRY_MS

    def went_down(self, reason: str) -> None:
        """The store does not work for now: nothing is begun until it is up again."""
        self.is_down, self.problem = True, reason
        self.counts["store_failures"] += 1

    def came_up(self) -> None:
        """… and it is."""
        self.is_down, self.problem = False, ""

    @property
    def transfer_blocks(self) -> int:
        """How many blocks are moved at once, as configured."""
        if not self.kind.sized:  # Every object is a request of its own.
            return self.limits.batch_blocks_max
        return batch_blocks(self.limits.batch_blocks_max, self.limits.batch_bytes, self.slot_bytes)

    @property
    def ahead_blocks(self) -> int:
        """How many blocks wait in the mover at most."""
        return self.limits.ahead_batches * self.transfer_blocks if self.kind.sized else 0

    def stored_bytes(self, blocks: Iterable[Block]) -> int:
        """What blocks take up in the store: slots, or their own size."""
        return sum(self.slot_bytes if self.kind.sized else block.bytes for block in blocks)

    @property
    def policy_name(self) -> str:
        """The eviction policy in force."""
        return self._policy_name

    def use_policy(self, name: str) -> bool:
        """Have another policy choose victims, also in stores to come."""
        self._policy_name = name
        self.table.use_policy(make_policy(name, self.table.slot_count))
        return True

    def make_room(self, count: int) -> int:
        """Evict for `count` slots; returns how many can be staged now."""
        victims = self.table.policy.victims(max(0, count - self.table.counts()["reset"]))
        untold = self.table.folded(victims)
        evicted = [(self.table.find(name), self.table.evict(name)) for name in victims]
        self.journal_removed(evicted)
        self.announce_removed([block for _, block in evicted], "evicted", untold)
        return min(count, self.table.counts()["reset"])

    def quarantine(self, corrupt: Iterable[tuple[int, Block]]) -> None:
        """Blocks whose bytes are wrong: nobody finds them again, now or after a restart."""
        self.lose(corrupt, "corrupt")

    def lose(self, lost: Iterable[tuple[int, Block]], reason: str) -> None:
        """Blocks that cannot be had any more; `gone`: the store has lost them already."""
        lost = list(lost)
        untold = self.table.folded(block.hash for _, block in lost)
        found = [
            (slot, block) for slot, block in lost if self.table.discard(block.hash) is not None
        ]
        if reason != "gone":
            self.journal_removed(found)
        self.announce_removed([block for _, block in found], reason, untold)

    def remove(self, names: Iterable[SequenceHash], reason: str) -> None:
        """Blocks that leave at once, pinned or not."""
        slots = [slot for name in names if (slot := self.table.find(name)) is not None]
        self.lose([(slot, self.table.block(slot)) for slot in slots], reason)

    def end_leases(self, leases: Iterable[Lease]) -> None:
        """Unpin what some leases held."""
        for lease in leases:
            self.table.unpin(lease.slots)

    # --- announcements ----------------------------------------------------------------------
    #
    # A block of a former life is announced when it is unfolded. Until then nobody was told of it,
    # so that no snapshot has it, and nobody is told when it leaves.

    def announce_former(self) -> None:
        """Tell the world of the next of a former life's blocks: it is served meanwhile."""
        if not self.table.folded_count or self.stopping:
            return
        self.announce_stored(self.table.unfold(self.limits.announced_blocks_max))
        if self.table.folded_count:
            self.emit(AnnounceLater())

    def told_blocks(self) -> list[Block]:
        """The blocks that the world believes to be here."""
        return [] if self.stopping else self.table.unfolded_blocks()

    def announce_stored(self, blocks: Sequence[Block]) -> None:
        """Tell the world of committed blocks."""
        self._publish(self.announcer.stored(blocks) if not self.stopping else [])

    def announce_removed(
        self, blocks: Sequence[Block], reason: str, untold: Collection[SequenceHash] = ()
    ) -> None:
        """Tell the world of lost blocks, but for those that it was never told of."""
        self.counts[f"evictions.{reason}"] += len(blocks)
        names = [block.hash for block in blocks]
        self.diary.note_all(self.now_ms, f"removed: {reason}", names)
        self.fates.note(
            names, reason, self.now_ms,
            detail=self.policy_name if reason == "evicted" else "",
        )  # fmt: skip
        told = [block for block in blocks if block.hash not in untold] if untold else blocks
        self._publish(self.announcer.removed(told, reason) if not self.stopping else [])

    def _publish(self, events: Iterable[Event]) -> None:
        for event in events:
            self.emit(Publish(event))

    # --- the journal ------------------------------------------------------------------------

    def journal_committed(self, write_id: int, entries: Iterable[tuple[int, Block]]) -> None:
        """Have it written that these slots hold these blocks; ends in Journaled or not."""
        self._append(write_id, self._records(Operation.COMMITTED, entries))

    def journal_removed(self, entries: Iterable[tuple[int | None, Block]]) -> None:
        """… that they do no more. Nobody waits for it: the checksum finds what it misses."""
        records = self._records(Operation.REMOVED, entries)
        if records:
            self._append(None, records)

    def rewrite_long_journal(self, committing: Callable[[], Iterable[tuple[int, Block]]]) -> None:
        """Keep only what is live: committed blocks, and those whose record is on its way."""
        if not self.kind.sized or self.table.folded_count:
            return  # What is there is said by what is there; or there is more urgent work.
        longest = max(
            JOURNAL_RECORDS_MIN, self.limits.journal_records_per_slot * self.table.slot_count
        )
        if self._journal_records <= longest:
            return
        live = [(self.table.find(block.hash), block) for block in self.table.blocks()]
        records = self._records(Operation.COMMITTED, [*live, *committing()])
        self._journal_records = len(records)
        self.counts["bytes.journal"] += len(records) * RECORD_BYTES
        self.emit(RewriteJournal(records))

    def _records(
        self, operation: Operation, entries: Iterable[tuple[int | None, Block]]
    ) -> tuple[Record, ...]:
        records: list[Record] = []
        for slot, block in entries:
            assert slot is not None, self.diary.story(block.hash)
            self._order += 1
            records.append(Record(operation, self._order, slot, block))
        return tuple(records)

    def _append(self, write_id: int | None, records: tuple[Record, ...]) -> None:
        self.emit(AppendJournal(write_id, records))
        if self.kind.sized:
            self._journal_records += len(records)
            self.counts["bytes.journal"] += len(records) * RECORD_BYTES
