"""What the tiers count during a run: at its end, less what they had counted before it began.

The tiers of an attached stack may have lived for weeks, and a verdict is of one run. What engines
of others do meanwhile counts, too: a tier does not know them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from kvbm_common.config.settings import Settings
from kvbm_common.nats.bus import Bus
from kvbm_common.wire.metrics import MetricsSnapshot
from kvbm_common.wire.verbs import verb_subject

from kvbm_cli.demo.check import StackView, wait_until

DEADLINE_S = 5.0
SUMS = ("kvbm_transfer_seconds", "kvbm_transfer_bytes")
KINDS = ("host-tier", "disk-tier")


Sums = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class TierFigures:
    """The sums over all tiers of each kind."""

    counts: Sums
    """By kind, what its tiers count."""
    transfers: Sums = field(default_factory=dict)
    """By metric (`SUMS`), seconds and bytes of the transfers over each path."""

    def since(self, before: TierFigures) -> TierFigures:
        """Return what was counted after `before`; a tier that began a new life counts from 0."""
        return TierFigures(
            _less(self.counts, before.counts), _less(self.transfers, before.transfers)
        )

    def of(self, kind: str) -> Mapping[str, float]:
        """Return what the tiers of this kind count, nothing where the kind has no tier."""
        return self.counts.get(kind, {})

    def gb_per_s(self) -> dict[str, float]:
        """Return bytes over the sum of the transfers' own times, by path."""
        seconds, sizes = (self.transfers.get(name, {}) for name in SUMS)
        return {
            path: total / seconds[path] / 1e9 for path, total in sizes.items() if seconds.get(path)
        }


async def figures_of(view: StackView, bus: Bus, settings: Settings) -> TierFigures:
    """Ask every tier of the view, again where one has left; raises DeadlineExceeded."""
    found: list[TierFigures] = []

    async def look() -> bool:
        found.append(await _ask_tiers(view, bus, settings))
        return True

    await wait_until(look, "the tiers do not answer")
    return found[0]


async def _ask_tiers(view: StackView, bus: Bus, settings: Settings) -> TierFigures:
    counts: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    snapshots: list[MetricsSnapshot] = []
    for kind, instance in await view.instances(*KINDS):
        for name, count in (await view.stats(kind, instance)).figures.items():
            counts[kind][name] = counts[kind].get(name, 0.0) + count
        subject = verb_subject(kind, "metrics", host=settings.host, instance=instance)
        payload = await bus.request(subject, b"{}", deadline_s=DEADLINE_S)
        snapshots.append(msgspec.json.decode(payload, type=MetricsSnapshot))
    return TierFigures(counts, transfers_of(snapshots))


def transfers_of(snapshots: Iterable[MetricsSnapshot]) -> Sums:
    """Return the sums of the tiers' transfer histograms, by metric and path."""
    sums: dict[str, dict[str, float]] = {name: {} for name in SUMS}
    for snapshot in snapshots:
        for family in snapshot.families:
            for sample in family.samples if family.name in sums else []:
                totals, path = sums[family.name], sample.labels["path"]
                totals[path] = totals.get(path, 0.0) + sample.value
    return sums


def _less(now: Sums, before: Sums) -> Sums:
    return {
        name: {
            key: max(value - before.get(name, {}).get(key, 0.0), 0.0)
            for key, value in figures.items()
        }
        for name, figures in now.items()
    }
