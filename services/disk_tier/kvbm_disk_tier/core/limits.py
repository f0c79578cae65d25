"""Limits of a disk tier's core, the medium below it, and what every part of it is given."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvbm_common.config.settings import Settings
from kvbm_common.tier.announcer import EVENT_BLOCKS_MAX
from kvbm_common.tier.blocks import BATCH_UNIT_BYTES
from kvbm_common.wire.events import Tier

from kvbm_disk_tier.core.effects import Emit


@dataclass(frozen=True, slots=True)
class StoreKind:
    """The kind of medium that the blocks lie in."""

    service: str
    tier: Tier
    sized: bool
    """Slots are places as large as the arena's, and a journal says what they hold. Otherwise a slot
    is a name in the table, the store is opened once, without an arena, and what it holds is listed
    later."""
    verifies_writes: bool
    """A write compares each block with its checksum first, so what is stored is right whatever
    became of the lease."""
    offloaded: str = ""
    """The counter of its blocks; empty: by the arena's mode."""
    called: str = "disk"
    """The store's name in reasons of /readyz."""


DISK = StoreKind("disk-tier", "disk", sized=True, verifies_writes=False)
OBJECT = StoreKind(
    "object-tier",
    "object",
    sized=False,
    verifies_writes=True,
    offloaded="offload_blocks_d2o",
    called="object store",
)


@dataclass(frozen=True, slots=True)
class DiskTierLimits:
    """Every bound of the core, from the configuration."""

    writes_max: int = 4
    """Batches being written; as many are leased ahead."""
    writes_beside_reads_max: int = 1
    """Onboarding goes ahead of offloading: while reads are in flight, writes hold back."""
    commits_max: int = 32
    """Batches that are written and not announced yet: they wait for the journal, not for the
    disk's bandwidth, and share its synchronisations."""
    journal_wait_ms: int = 100
    """The time that records of written blocks wait for others, while more is being written."""
    reads_max: int = 64
    """Fills: as many as NIXL is given at a time."""
    reads_waiting_max: int = 4096
    read_blocks_max: int = 256
    write_blocks_max: int = 64
    """Blocks in flight, as far as nothing was measured; one batch may always be in flight."""
    ahead_batches: int = 4
    """Reads, or writes, that are handed over beyond that: they wait in the mover, and the disk has
    the next one at once when one has ended."""
    batch_blocks_max: int = 16
    batch_bytes: int = 0
    """A transfer has more blocks when they are small: see `blocks.batch_blocks`."""
    batch_transfers_max: int = 4
    """Transfers of one batch of writes on a fast disk: see `pending.BatchSize`."""
    pending_max: int = 65_536
    """Blocks that wait to be written; beyond that new ones are refused and counted."""
    lease_ms: int = 5_000
    journal_records_per_slot: int = 4
    """The journal is rewritten when it holds more than this per slot (and 65,536)."""
    rewritten_slots_max: int = 2_048
    """Slots of one part of a rewrite: some 5 ms of the core, and as much of the thread that
    writes."""
    tenant_shares: str = ""
    """The weights by which tenants share the store and its write budget (KVBM_TENANT_SHARES)."""
    history_entries: int | None = None
    """Departures that are kept (KVBM_HISTORY_ENTRIES); None: by the slots."""
    announced_blocks_max: int = EVENT_BLOCKS_MAX
    """Blocks of a former life that are announced in one step, within some 5 ms."""

    def __post_init__(self) -> None:
        """Assert that nothing waits without end for a bound of zero."""
        assert min(self.writes_max, self.reads_max, self.commits_max) > 0, self
        assert min(self.batch_blocks_max, self.batch_transfers_max) > 0, self
        assert min(self.pending_max, self.lease_ms, self.announced_blocks_max) > 0, self
        assert self.rewritten_slots_max > 0, self


@dataclass(frozen=True, slots=True)
class Means:
    """The limits, counters and way out that each part is given beside other parts."""

    limits: DiskTierLimits
    counts: Counter[str]
    """The counters that metrics show, by key."""
    emit: Emit


def limits_of(settings: Settings) -> DiskTierLimits:
    """Return what the configuration bounds; the rest by default."""
    return DiskTierLimits(
        writes_max=settings.max_concurrent_transfers,
        batch_blocks_max=settings.max_transfer_batch_size,
        batch_bytes=settings.max_transfer_batch_size * BATCH_UNIT_BYTES,
        lease_ms=settings.lease_ms,
        tenant_shares=settings.tenant_shares,
        history_entries=settings.history_entries,
    )
