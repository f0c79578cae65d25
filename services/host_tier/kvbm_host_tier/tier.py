"""The tier's common state: arena, slots, leases and announcements, shared by its two paths."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvbm_common.announcer import Announcer
from kvbm_common.batches import batch_blocks
from kvbm_common.diary import Diary
from kvbm_common.eviction import make_policy
from kvbm_common.fates import Fates
from kvbm_common.identity import SequenceHash
from kvbm_common.leases import Lease, LeaseTable
from kvbm_common.slots import Block, SlotTable
from kvbm_common.wire.events import Tier as WireTier
from kvbm_common.wire.verbs import Hits

from kvbm_host_tier.lower_tiers import LowerTiers
from kvbm_host_tier.messages import ArenaInfo, Effect, MakeArena, Publish, TellHits

SLOT_ALIGNMENT = 4096
"""O_DIRECT reads and writes between arena and files need it."""
UNWRITTEN_TOLD_MAX = 256
"""The oldest unwritten blocks of a full staging arena; the next shortage tells of the next ones."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the core, from the configuration."""

    slot_count: int | None = None
    """DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS: the arena is made when a block's size is known.
    None: as many as fit into the arena that there is."""
    transfers_max: int = 4
    batch_blocks_max: int = 16
    batch_bytes: int = 0
    """A fill from disk has more blocks when they are small: see `batches.batch_blocks`."""
    offers_max: int = 1024
    """Offers waiting or in flight; more are dropped and counted, never queued without end."""
    lookups_max: int = 4096
    beat_ms: int = 1000
    engine_lost_ms: int = 5000
    pull_deadline_ms: int = 5000
    move_ms: int = 5000
    """How long an engine that another host tier serves may finish here what is under way."""
    confirm_ms: int = 2000
    """How long an engine may take to confirm a pull."""
    peer_pulls_max: int = 4
    """Batches that are read from other hosts at the same time; 0: none ever is."""
    peer_deadline_ms: int = 1000
    explain_requests: int = 100_000
    """Lookups whose explanation is kept (KVBM_EXPLAIN_REQUESTS)."""
    recompute_tokens_per_s: float = 0.0
    """What loads are weighed against (KVBM_RECOMPUTE_TOKENS_PER_S); 0: against nothing."""
    traces: bool = False
    """Onboards are traced (KVBM_OTLP_ENDPOINT)."""
    hit_window: int = 1000
    """Requests over which the hit rates are taken (DYN_KVBM_CACHE_STATS_MAX_REQUESTS)."""


def slot_bytes_of(block_bytes: int) -> int:
    """The slot that a block of this size takes."""
    return -(-block_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class Tier:
    """Slots and leases of one arena, and the only place that announces.

    The arena is cut into slots when the first engine says how large its blocks are. Where its size
    is a number of blocks it is made then, too.
    """

    def __init__(
        self,
        *,
        host: str,
        source: str,
        epoch: int,
        arena: ArenaInfo,
        limits: Limits,
        policy: str = "lru",
        staging: bool = False,
    ) -> None:
        self.arena, self.limits, self.staging = arena, limits, staging
        self.announcer = Announcer(host=host, source=source, tier="host", epoch=epoch)
        # The ids of two lives never meet: a release that comes late from the life before must not
        # end a lease of this one.
        self.leases = LeaseTable(first_id=(epoch % 2**31 << 32) + 1)
        self.table = SlotTable(0, make_policy(policy))
        self.slot_bytes = 0
        self.draining = False
        """An operator wants no new blocks here."""
        self.now_ms = 0
        """Of the step that is being taken, for the diary."""
        self.arena_failure = ""
        """Why the arena could not be made, the last time."""
        self._making_arena = False
        self.counts: Counter[str] = Counter()
        self.diary = Diary()
        self.fates = Fates()
        """What became of the blocks that were here."""
        self.started_ms = 0
        """When this life took its first step: nothing older is known."""
        self.below = LowerTiers()
        self.guests: OrderedDict[SequenceHash, None] = OrderedDict()
        """Committed blocks that a peer has, and that were used once here: not announced, and the
        first to go. The oldest first."""
        self.effects: list[Effect] = []
        self.hit_window: deque[tuple[int, int, int, int]] = deque(maxlen=limits.hit_window)
        """(asked, host, disk, object) blocks of the last lookups."""
        self._policy_name = policy

    def emit(self, *effects: Effect) -> None:
        """Have something done after this step."""
        self.effects.extend(effects)

    def want_arena(self, block_bytes: int) -> bool:
        """Have the arena made whose size is a number of blocks. False: it is there."""
        count = self.limits.slot_count
        if not count or self.slot_bytes:
            return False
        size_bytes = count * slot_bytes_of(block_bytes)
        if size_bytes <= self.arena.capacity_bytes:
            return False
        if not self._making_arena:
            self._making_arena = True
            self.emit(MakeArena(size_bytes))
        return True

    def arena_made(self, arena: ArenaInfo) -> None:
        """It is there; whoever was sent away says hello again."""
        self._making_arena, self.arena_failure = False, ""
        self.arena = arena

    def arena_refused(self, reason: str) -> None:
        """The next hello asks again."""
        self._making_arena, self.arena_failure = False, reason

    def format(self, block_bytes: int) -> bool:
        """Cut the arena into slots for blocks of this size, once. False: they do not fit."""
        if self.slot_bytes == 0:
            slot_bytes = slot_bytes_of(block_bytes)
            slot_count = self.arena.capacity_bytes // slot_bytes
            if self.limits.slot_count is not None:
                slot_count = min(slot_count, self.limits.slot_count)
            if slot_count == 0:
                return False
            self.slot_bytes = slot_bytes
            self.table = SlotTable(slot_count, make_policy(self.policy_name, slot_count))
        return block_bytes <= self.slot_bytes

    @property
    def policy_name(self) -> str:
        """A staging arena asks for all free blocks in order, and what is on disk may go anyway."""
        return "lru" if self.staging else self._policy_name

    def use_policy(self, name: str) -> bool:
        """Have another policy choose victims; False in a staging arena."""
        if self.staging:
            return False
        self._policy_name = name
        self.table.use_policy(make_policy(name, self.table.slot_count))
        return True

    def batch_blocks(self, tier: WireTier) -> int:
        """How many blocks one fill brings at most."""
        if tier != "disk":  # Every object is a request of its own.
            return self.limits.batch_blocks_max
        return batch_blocks(self.limits.batch_blocks_max, self.limits.batch_bytes, self.slot_bytes)

    def make_room(self, count: int) -> int:
        """Evict for `count` slots; returns how many can be staged now.

        In a staging arena only blocks that the disk has may go: the others exist nowhere else.
        """
        self._evict_guests(count - self.table.counts()["reset"])
        if self.staging:
            evicted = self._evict_written(count - self.table.counts()["reset"])
        else:
            evicted = self.table.make_room(count)
        self.announce_removed(evicted, "evicted")
        return min(count, self.table.counts()["reset"])

    def _evict_guests(self, count: int) -> None:
        if count <= 0 or not self.guests:
            return
        table = self.table
        victims = list(islice((name for name in self.guests if self._is_free(name)), count))
        self.announce_removed([table.evict(name) for name in victims], "guest")

    def _is_free(self, name: SequenceHash) -> bool:
        slot = self.table.find(name)
        return slot is not None and not self.table.pin_count(slot)

    def admit_used(self, names: Sequence[SequenceHash], slots: Sequence[int | None]) -> None:
        """A lookup has pinned these: a guest among them is used for the second time."""
        if self.guests:
            here = zip(names, slots, strict=False)
            self.admit([name for name, slot in here if slot is not None])

    def admit(self, names: Iterable[SequenceHash]) -> None:
        """From now on guests among these are blocks of ours like any other."""
        admitted = [name for name in names if name in self.guests]
        for name in admitted:
            del self.guests[name]
        self.counts["peer_admitted_blocks"] += len(admitted)
        found = [slot for name in admitted if (slot := self.table.find(name)) is not None]
        self.announce_stored([self.table.block(slot) for slot in found])

    def own_blocks(self) -> list[Block]:
        """What this tier announces: every committed block that is no guest."""
        return [block for block in self.table.blocks() if block.hash not in self.guests]

    def _evict_written(self, count: int) -> list[Block]:
        if count <= 0:
            return []
        free = self.table.policy.victims(len(self.table.policy))
        written = [name for name in free if name in self.below][:count]
        if len(written) < count:
            self._ask_to_write([name for name in free if name not in self.below])
        return [self.table.evict(name) for name in written]

    def _ask_to_write(self, names: Sequence[SequenceHash]) -> None:
        """A write that failed, or a block that the disk has evicted, must not hold its slot for
        ever: told of a hit, the disk tier writes what it does not have."""
        by_namespace: dict[bytes, list[str]] = {}
        for name in names[:UNWRITTEN_TOLD_MAX]:
            slot = self.table.find(name)
            assert slot is not None, self.diary.story(name)
            by_namespace.setdefault(self.table.block(slot).namespace, []).append(name.hex())
        for namespace, hashes in by_namespace.items():
            self.emit(TellHits(Hits(namespace=namespace.hex(), hashes=hashes)))

    def announce_stored(self, blocks: Sequence[Block]) -> None:
        """Tell the world of committed blocks."""
        for event in self.announcer.stored(blocks):
            self.emit(Publish(event))

    def announce_removed(self, blocks: Sequence[Block], reason: str) -> None:
        """Tell the world of lost blocks."""
        self.counts[f"evictions.{reason}"] += len(blocks)
        if not blocks:
            return
        names = [block.hash for block in blocks]
        self.diary.note_all(self.now_ms, f"removed: {reason}", names)
        self.fates.note(
            names, reason, self.now_ms,
            detail=self.policy_name if reason == "evicted" else "",
        )  # fmt: skip
        if self.guests:
            guests = {block.hash for block in blocks if block.hash in self.guests}
            blocks = [block for block in blocks if block.hash not in guests]
            for name in guests:
                del self.guests[name]
        for event in self.announcer.removed(blocks, reason):
            self.emit(Publish(event))

    def remove(self, names: Iterable[SequenceHash], reason: str) -> None:
        """Nobody finds these blocks again, from now on; who reads them reads to the end."""
        gone = [block for name in names if (block := self.table.discard(name)) is not None]
        self.announce_removed(gone, reason)

    def end_leases(self, leases: Iterable[Lease]) -> None:
        """Unpin what some leases held."""
        for lease in leases:
            self.table.unpin(lease.slots)
