"""The view: what the outside may ask of a core, for metrics, status, snapshots and explanations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.admin import pins_of, pins_usage
from kvbm_common.tier.size_figures import NO_SIZES, size_figures, waste_percent
from kvbm_common.wire.bounds import Usage
from kvbm_common.wire.explain import FateEntry, FatesReply
from kvbm_common.wire.tier_stats import TenantStats
from kvbm_common.wire.verbs import SnapshotReply, StatsReply

if TYPE_CHECKING:
    from kvbm_disk_tier.core.core import DiskTierCore


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Questions to a core: each is answered as of the last step, and changes nothing."""

    instance: str
    _core: DiskTierCore
    extra: Callable[[], Mapping[str, float]] = dict
    """Figures of a core that is built on this one."""

    def slot_count(self) -> int:
        """Return how many slots the store has; 0: it is not open yet."""
        layout = self._core.store.layout
        return layout.slot_count if layout is not None else 0

    def counts(self) -> Mapping[str, int]:
        """Return a copy of all counters."""
        return dict(self._core.counts)

    def gauges(self) -> dict[str, float]:
        """Return the figures of now that are worth a curve."""
        counts = self._core.counts
        payload = counts["bytes.payload"]
        on_disk = counts["bytes.written"] + counts["bytes.journal"]
        return {
            "disk_bypassed": float(not self._core.health.writes),
            "disk_read_depth_blocks": float(self._core.store.read_blocks_max),
            "journal_due_seconds": self._core.inventory.journal.due_ms / 1000,
            "disk_write_depth_blocks": float(self._core.store.write_blocks_max),
            "write_amplification": on_disk / payload if payload else 1.0,
            "write_budget_bytes": self._core.pending.budget.level,
            "writers": float(len(self._core.pending.admission.shards.instances)),
        }

    def usages(self, now_ms: int) -> dict[str, Usage]:
        """Return how full each queue, table and history is; a bucket has no journal."""
        inventory, pending, reads = self._core.inventory, self._core.pending, self._core.reads
        counts, limits, sights = self._core.counts, self._core.limits, pending.admission.filter
        usages = {
            "departures": inventory.departures.usage(now_ms),
            "pinned": pins_usage(inventory.table, inventory.leases),
            "waiting_writes": Usage(
                len(pending.waiting), limits.pending_max, counts["dropped.write_pending_full"]
            ),
            "waiting_reads": Usage(
                reads.waiting_count, limits.reads_waiting_max, counts["dropped.fill_busy"]
            ),
            "sights": Usage(len(sights), sights.entries_max),
            "diary": inventory.diary.usage(),
        }
        if self._core.store.kind.sized and self._core.store.layout is not None:
            usages["journal"] = inventory.journal.usage()
        return usages

    def statistics(self) -> StatsReply:
        """Return the figures for the admin API."""
        kind, inventory = self._core.store.kind, self._core.inventory
        announcer = inventory.announcer
        frequency = self._core.pending.admission.filter
        store = self._core.store
        problems = (store.problem, store.keeps, self._core.health.problem)
        reasons = [problem for problem in problems if problem]
        figures = {name: float(value) for name, value in self._core.counts.items()}
        figures["writes"] = float(len(self._core.writes.in_flight.by_id))
        figures["writes_pending"] = float(len(self._core.pending.waiting))
        figures["reads"] = float(len(self._core.reads.in_flight) + self._core.reads.waiting_count)
        figures["filter_entries"] = float(len(frequency))
        figures["filter_enabled"] = float(frequency.enabled)
        figures["filter_pass_count"] = float(frequency.pass_count)
        figures["pins"] = float(len(pins_of(inventory.leases)))
        figures["draining"] = float(inventory.draining)
        figures["waste_percent"] = waste_percent(inventory.table)
        return StatsReply(
            kind=kind.service,
            host=announcer.host,
            instance=self.instance,
            epoch=announcer.epoch,
            ready=not reasons,
            reasons=reasons,
            seq=announcer.seq,
            tier=kind.tier,
            slots=inventory.table.counts(),
            slot_bytes=self._core.store.slot_bytes,
            **(size_figures(inventory.table) if kind.sized else NO_SIZES),
            tenants=self._tenants(),
            block_bytes=inventory.table.block_bytes,
            policy=inventory.policy_name,
            leases=len(inventory.leases),
            figures=figures | self.gauges() | dict(self.extra()),
        )

    def _tenants(self) -> list[TenantStats]:
        """Return what each tenant has here, and what of it waits to be written."""
        figures = self._core.inventory.table.tenant_figures()
        waiting = self._core.pending.waiting.count_of
        return [msgspec.structs.replace(one, waiting=waiting(one.name)) for one in figures]

    def snapshot(self) -> SnapshotReply:
        """Return everything that is committed and announced, as of the last event."""
        return self._core.inventory.announcer.snapshot(self._core.inventory.announced_blocks())

    def snapshot_pages(self) -> Sequence[Callable[[], SnapshotReply]]:
        """Return the snapshot in pages, made later: each request is answered by one page."""
        pages = self._core.inventory.announcer.moment(self._core.inventory.announced_parts())
        assert pages, "an empty tier has one page, too"
        return pages

    def fates(self, names: Sequence[SequenceHash], now_ms: int) -> FatesReply:
        """Return what became of blocks that a host tier misses, as this tier knows it.

        The entry is empty for what another instance of this kind writes.
        """
        owned = set(self._core.pending.admission.shards.owned(names))
        found = [self._fate_of(name, now_ms, owned=name in owned) for name in names]
        assert len(found) == len(names), f"{len(found)} entries for {len(names)} blocks"
        return FatesReply(fates=found)

    def idle(self) -> bool:
        """Tell whether nothing is being written, read or waiting: a quiet point."""
        in_flight = self._core.writes.in_flight.by_id or self._core.reads.in_flight
        return not (in_flight or self._core.pending.waiting or self._core.reads.waiting_count)

    def _fate_of(self, name: SequenceHash, now_ms: int, *, owned: bool) -> FateEntry:
        if self._core.inventory.table.find(name) is not None:
            return FateEntry(why="held")
        if self._core.writes.is_waiting(name):
            return FateEntry(why="waiting", detail=self._why_it_waits())
        left = self._core.inventory.departures.get(name)
        if left is not None:
            return FateEntry(why=left.why, ago_ms=max(0, now_ms - left.at_ms), detail=left.detail)
        if owned and self._core.pending.admission.filter.enabled and not self._core.arenas.staging:
            return FateEntry(why="filtered", detail=self._sights(name, now_ms))
        return FateEntry(why="")

    def _why_it_waits(self) -> str:
        budget = self._core.pending.budget
        if self._core.store.problem:
            return f"the store: {self._core.store.problem}"
        if self._core.health.problem:
            return self._core.health.problem
        if budget.bytes_per_day and budget.level <= 0:
            return "the write budget is used up"
        return "its write had not begun or ended"

    def _sights(self, name: SequenceHash, now_ms: int) -> str:
        frequency = self._core.pending.admission.filter
        count = frequency.count(name, now_ms)
        if not count:
            return "was wanted too long ago to count"
        return f"count {count} of {frequency.pass_count}"
