"""The view: what the outside may ask of a core, for metrics, status, snapshots and explanations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.breaker import Breaker, BreakerState
from kvbm_common.wire.explain import FatesReply
from kvbm_common.wire.verbs import SnapshotReply, StatsReply

from kvbm_disk_tier.core.admission import Admission
from kvbm_disk_tier.core.announcements import Announcements
from kvbm_disk_tier.core.departures import Explainer
from kvbm_disk_tier.core.inventory import Inventory
from kvbm_disk_tier.core.reads import Reads
from kvbm_disk_tier.core.store import Store
from kvbm_disk_tier.core.writes import Writes


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Questions to a core: each is answered as of the last step, and changes nothing."""

    instance: str
    store: Store
    breaker: Breaker
    admission: Admission
    inventory: Inventory
    announcements: Announcements
    writes: Writes
    reads: Reads
    explainer: Explainer
    tallies: Counter[str]
    extra: Callable[[], Mapping[str, float]] = dict
    """Figures of a core that is built on this one."""

    def counts(self) -> Mapping[str, int]:
        """Return a copy of all counters."""
        return dict(self.tallies)

    def gauges(self) -> dict[str, float]:
        """Return the figures of now that are worth a curve."""
        counts, writes = self.tallies, self.writes
        payload = counts["bytes.payload"]
        on_disk = counts["bytes.written"] + counts["bytes.journal"]
        return {
            "disk_bypassed": float(self.breaker.state is not BreakerState.CLOSED),
            "disk_read_depth_blocks": float(self.store.read_blocks_max),
            "disk_write_depth_blocks": float(self.store.write_blocks_max),
            "write_amplification": on_disk / payload if payload else 1.0,
            "write_budget_bytes": writes.budget.level,
            "writers": float(len(self.admission.shards.instances)),
        }

    def statistics(self) -> StatsReply:
        """Return the figures for the admin API."""
        kind, announcer, inventory = self.store.kind, self.announcements.announcer, self.inventory
        problem, frequency = self.store.problem, self.admission.filter
        figures = {name: float(value) for name, value in self.tallies.items()}
        figures["writes"] = float(len(self.writes.flying.by_id))
        figures["writes_pending"] = float(len(self.writes.pending.waiting))
        figures["reads"] = float(len(self.reads.flying) + len(self.reads.waiting))
        figures["filter_entries"] = float(len(frequency))
        figures["filter_enabled"] = float(frequency.enabled)
        figures["filter_pass_count"] = float(frequency.pass_count)
        figures["draining"] = float(inventory.draining)
        return StatsReply(
            kind=kind.service,
            host=announcer.host,
            instance=self.instance,
            epoch=announcer.epoch,
            ready=not problem,
            reasons=[problem] if problem else [],
            seq=announcer.seq,
            tier=kind.tier,
            slots=inventory.table.counts(),
            slot_bytes=self.store.slot_bytes,
            block_bytes=inventory.table.block_bytes,
            policy=inventory.policy_name,
            leases=len(inventory.leases),
            figures=figures | self.gauges() | dict(self.extra()),
        )

    def snapshot(self) -> SnapshotReply:
        """Return everything that is committed and announced, as of the last event."""
        return self.announcements.snapshot(self.inventory.told_blocks())

    def snapshot_pages(self) -> Sequence[Callable[[], SnapshotReply]]:
        """Return the snapshot in pages, made later: each request is answered by one page."""
        pages = self.announcements.pages(self.inventory.told_blocks())
        assert pages, "an empty tier has one page, too"
        return pages

    def fates(self, names: Sequence[SequenceHash], now_ms: int) -> FatesReply:
        """Return what became of blocks that a host tier misses."""
        return FatesReply(fates=self.explainer.explain(names, now_ms))

    def idle(self) -> bool:
        """Tell whether nothing is being written, read or waiting: a quiet point."""
        flying = self.writes.flying.by_id or self.reads.flying
        return not (flying or self.writes.pending.waiting or self.reads.waiting)
