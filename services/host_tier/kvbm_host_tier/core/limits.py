"""The limits of the host tier's core, and the means that every part of it is given."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvbm_host_tier.core.messages import Emit

COUNTS_MAX = 512
"""Counters of one host tier: some hundred are known, and a peer may invent reasons."""


@dataclass(frozen=True, slots=True)
class HostTierLimits:
    """Every bound of the core, from the configuration."""

    slot_count: int | None = None
    """DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS: the arena is made when a block's size is known.
    None: as many as fit into the arena that there is."""
    slab_bytes: int = 0
    """The length of the arena's slabs; 0: by the arena's size (`layout.slab_slots_of`)."""
    transfers_max: int = 4
    batch_blocks_max: int = 16
    batch_bytes: int = 0
    """Fills from disk, pulls, and batches from peers have more blocks when they are small:
    `blocks.batch_blocks`."""
    copied_least: int = 64
    """Slots that a copier may pin in any arena: what the disk tier has in flight."""
    offers_max: int = 1024
    """Offers waiting or in flight; more are dropped and counted, never queued without end."""
    lookups_max: int = 4096
    beat_ms: int = 1000
    engine_lost_ms: int = 5000
    pull_deadline_ms: int = 5000
    move_ms: int = 5000
    """The time in which an engine that another host tier serves may finish its open work here."""
    confirm_ms: int = 2000
    """The time that an engine may take to confirm a pull."""
    peer_pulls_max: int = 4
    """Batches that are read from other hosts at the same time; 0: no block is read from them."""
    peer_deadline_ms: int = 1000
    """The time that a batch from another host may take from its start."""
    explain_requests: int = 100_000
    """Lookups whose explanation is kept (KVBM_EXPLAIN_REQUESTS)."""
    history_entries: int | None = None
    """Departures of each tier, and first blocks, that are kept (KVBM_HISTORY_ENTRIES); None: by
    the slots."""
    recompute_tokens_per_s: float = 0.0
    """The speed of computing (KVBM_RECOMPUTE_TOKENS_PER_S); 0: what connectors have measured."""
    load_or_compute: bool = True
    """Loads are weighed against what connectors have measured (KVBM_LOAD_OR_COMPUTE)."""
    stretch_blocks: int = 64
    """Blocks of a run that are remembered together, when they were looked up (`known_runs.py`)."""
    disk_bytes: int = 0
    """The size of this host's disk tier (DYN_KVBM_DISK_CACHE_GB)."""
    disk_blocks: int | None = None
    """Its blocks, where they are chosen (DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS); 0 means by
    size, as in the disk tier."""
    object_blocks: int = 0
    """The blocks of its object tier (DYN_KVBM_OBJECT_NUM_BLOCKS); 0: no object tier."""
    miss_filter: bool = False
    """Engines read which names a lookup may find (KVBM_MISS_FILTER)."""
    filter_names_least: int = 4_096
    """Names that a filter has room for at least: 48 KiB."""
    filter_slice: int = 8_192
    """Names that one step writes into a filter that is being made: some 3 ms."""
    below_piece: int = 8_192
    """Blocks of lower tiers that one step takes in or forgets, where there are more: some 5 ms."""
    traces: bool = False
    """Onboards are traced (KVBM_OTLP_ENDPOINT)."""
    scrub_cpu_percent: float = 0.0
    """The share of one core that compares idle blocks with checksums (KVBM_SCRUB_CPU_PERCENT)."""
    scrub_round_ms: int = 0
    """The least time between two beginnings of a round of the scrubber (KVBM_SCRUB_ROUND_S)."""
    tenant_shares: str = ""
    """The weights by which tenants share the arena (KVBM_TENANT_SHARES)."""
    hint_pin_percent: float = 40.0
    """The percentage of its tenant's share that sessions may pin (KVBM_HINT_PIN_PERCENT)."""
    hit_window: int = 1000
    """Requests over which the hit rates are taken (DYN_KVBM_CACHE_STATS_MAX_REQUESTS)."""

    def below_count(self, slot_bytes: int) -> int:
        """Return how many blocks of this size the tiers below have room for."""
        assert slot_bytes > 0, f"slots of {slot_bytes} bytes"
        return (self.disk_blocks or self.disk_bytes // slot_bytes) + self.object_blocks


@dataclass(frozen=True, slots=True)
class Means:
    """The limits, counters and way out that each part is given beside other parts."""

    limits: HostTierLimits
    counts: Counter[str]
    """The counters that metrics show, by key."""
    emit: Emit


def reason_key(counts: Counter[str], family: str, reason: str) -> str:
    """Return the counter of a reason that a peer has given: beyond COUNTS_MAX one for all."""
    key = f"{family}_{reason}"
    return key if key in counts or len(counts) < COUNTS_MAX else f"{family}_other"
