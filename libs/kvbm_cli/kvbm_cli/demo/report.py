"""The report of a demo run: its figures, and whether it has passed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from kvbm_common.tier.reasons import UNEXPLAINED
from kvbm_connectors.sim.control import Finished, Stats

from kvbm_cli.demo.check import Verdict
from kvbm_cli.demo.figures import Misses, TierFigures
from kvbm_cli.demo.pairs import Comparison, compare

PATHS = {
    "d2h": "device → host",
    "h2d": "host → device",
    "h2disk": "host → disk",
    "disk2h": "disk → host",
    "d2disk": "device → disk (disk only)",
}

KNOWN_TOGETHER = ("h2disk", "d2disk")
"""Paths that tiers count without the engine."""

UNEXPLAINED_MAX = 0.01
"""The part of the missed blocks that may be without a reason."""


class PathFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """The traffic of one path. `gb_per_s` is bytes over `moved_seconds`, the wall time."""

    blocks: int
    bytes: int
    gb_per_s: float
    of_all_engines: bool = False
    """Engines of others are in it: the tier does not know them apart."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report that `--json` writes to its file."""

    requests: int
    """Requests of the workload, without those that are repeated at the end to be compared."""
    failed_requests: int
    seconds: float
    """From the first request until the last was answered."""
    moved_seconds: float = 0.0
    """From the first request until every block was where it goes, or the wait was given up."""
    has_moved: bool = True
    """True if every block was where it goes by then."""
    blocks_asked: int
    blocks_verified: int
    mismatches: int
    failed_blocks: int
    leases_left: int
    staged_left: int
    views_consistent: bool
    differences: list[str]
    hit_rate: dict[str, float]
    """Tier → its part of the full blocks of all prompts."""
    ttft_ms: dict[str, float]
    """Medians over the same requests, once with the cache and once recomputed."""
    comparison: Comparison | None = None
    """The comparison of the pairs; None: no request found anything outside its device."""
    paths: dict[str, PathFigures]
    missed: dict[str, int] = {}
    """Blocks that a lookup missed, by reason, the most frequent first."""
    unexplained: float = 0.0
    """The part of them without a known reason."""
    troubles: list[str] = []
    """Tiers that were not ready at the end, and why."""

    @property
    def passed(self) -> bool:
        return (
            self.mismatches == 0
            and self.failed_requests == 0
            and self.leases_left == 0
            and self.staged_left == 0
            and self.views_consistent
            and self.unexplained < UNEXPLAINED_MAX
            and not self.troubles
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The counts of engines and tiers from the first request until every block had moved."""

    seconds: float
    moved_seconds: float
    has_moved: bool = True
    """False: they had not when the wait was given up."""
    engines: Sequence[Stats]
    tiers: TierFigures
    is_shared: bool = False
    """Engines of others use the tiers, too."""


@dataclass(slots=True)
class Tally:
    """Results as they come in."""

    finished: list[Finished] = field(default_factory=list)
    """The requests of the workload."""
    repeated: list[Finished] = field(default_factory=list)
    """The requests of the pairs: verified like the others, and not in the workload's figures."""
    pairs: list[tuple[float, float]] = field(default_factory=list)
    """TTFT of a request with the cache, and of the same one recomputed; ms."""

    def add(self, finished: Finished) -> None:
        """Count a request of the workload that is done."""
        self.finished.append(finished)

    def add_pair(self, cached: Finished, recomputed: Finished) -> None:
        """Count a request that was repeated, once with the cache and once without."""
        self.repeated += [cached, recomputed]
        if cached.host_blocks + cached.disk_blocks > 0:
            self.pairs.append((cached.ttft_ms, recomputed.ttft_ms))

    @property
    def verified(self) -> list[Finished]:
        """Every request, of the workload and of the pairs."""
        return self.finished + self.repeated

    @property
    def blocks(self) -> dict[str, int]:
        """Full prompt blocks, by where they came from."""
        return {
            "device": sum(f.device_blocks for f in self.finished),
            "host": sum(f.host_blocks for f in self.finished),
            "disk": sum(f.disk_blocks for f in self.finished),
            "asked": sum(f.blocks for f in self.finished),
        }


def make_report(
    tally: Tally,
    verdict: Verdict,
    *,
    counted: Counted,
    misses: Misses,
    block_bytes: int,
) -> Report:
    """Put all figures together."""
    blocks, verified = tally.blocks, tally.verified
    asked = blocks["asked"] or 1
    missed = dict(sorted(misses.by_reason.items(), key=lambda one: -one[1]))
    cached, recomputed = zip(*tally.pairs, strict=True) if tally.pairs else ((0.0,), (0.0,))
    return Report(
        requests=len(tally.finished),
        failed_requests=sum(bool(f.error) for f in verified),
        seconds=round(counted.seconds, 2),
        moved_seconds=round(counted.moved_seconds, 2),
        has_moved=counted.has_moved,
        blocks_asked=blocks["asked"],
        blocks_verified=sum(f.verified for f in verified),
        mismatches=sum(f.mismatches for f in verified),
        failed_blocks=sum(f.failed_blocks for f in verified),
        leases_left=verdict.leases_left,
        staged_left=verdict.staged_left,
        views_consistent=verdict.views_consistent,
        differences=verdict.differences,
        troubles=verdict.troubles,
        hit_rate={tier: round(blocks[tier] / asked, 4) for tier in ("device", "host", "disk")},
        ttft_ms={
            "cached": round(statistics.median(cached), 2),
            "recomputed": round(statistics.median(recomputed), 2),
        },
        comparison=compare(tally.pairs),
        paths=_paths(block_bytes, tally, counted),
        missed=missed,
        unexplained=_unexplained(missed, misses.blocks),
    )


def _unexplained(missed: Mapping[str, int], all_missed: int) -> float:
    """Return the share of missed blocks with an unknown reason; no reason counts as unknown."""
    without = max(0.0, all_missed - sum(missed.values()))
    unknown = sum(count for reason, count in missed.items() if reason in UNEXPLAINED)
    total = without + sum(missed.values())
    return (without + unknown) / total if total else 0.0


def _paths(block_bytes: int, tally: Tally, counted: Counted) -> dict[str, PathFigures]:
    host, disk = counted.tiers.of("host-tier"), counted.tiers.of("disk-tier")
    blocks = {
        "d2h": host.get("offload_blocks_d2h", 0),
        "h2d": sum(engine.load_bytes for engine in counted.engines) // block_bytes,
        "h2disk": disk.get("offload_blocks_h2d", 0),
        "disk2h": disk.get("fill_blocks", 0),
        "d2disk": host.get("offload_blocks_d2d", 0),
    }
    if counted.is_shared:
        blocks["d2h"] = sum(engine.counts.get("offload_blocks", 0) for engine in counted.engines)
        blocks["disk2h"] = tally.blocks["disk"]
    return {
        path: PathFigures(
            int(blocks[path]),
            int(blocks[path]) * block_bytes,
            _gb_per_s(int(blocks[path]) * block_bytes, counted.moved_seconds),
            of_all_engines=counted.is_shared and path in KNOWN_TOGETHER,
        )
        for path in PATHS
    }


def _gb_per_s(size: int, seconds: float) -> float:
    return round(size / seconds / 1e9, 3) if seconds else 0.0
