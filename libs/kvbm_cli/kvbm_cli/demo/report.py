"""The report of a demo run: the figures, as JSON and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from kvbm_common.tier.reasons import UNEXPLAINED
from kvbm_connectors.sim.control import Finished, Stats
from rich.console import Console
from rich.table import Table

from kvbm_cli.demo.check import Verdict
from kvbm_cli.demo.figures import TierFigures

PATHS = {
    "d2h": "device → host",
    "h2d": "host → device",
    "h2disk": "host → disk",
    "disk2h": "disk → host",
    "d2disk": "device → disk (disk only)",
}

UNEXPLAINED_MAX = 0.01
"""The part of the missed blocks that may be without a reason."""


class PathFigures(msgspec.Struct, frozen=True):
    """What went over one path. `gb_per_s` is bytes over the sum of the transfers' own times."""

    blocks: int
    bytes: int
    gb_per_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes to its file."""

    requests: int
    """Of the workload. What is repeated at the end is verified, and can fail, but is not here."""
    failed_requests: int
    seconds: float
    blocks_asked: int
    blocks_verified: int
    mismatches: int
    failed_blocks: int
    leases_left: int
    staged_left: int
    views_consistent: bool
    differences: list[str]
    hit_rate: dict[str, float]
    """Of the full blocks of all prompts, by the tier that had them."""
    ttft_ms: dict[str, float]
    """Medians over the same requests, once with the cache and once recomputed."""
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


@dataclass(slots=True)
class Tally:
    """Results as they come in."""

    finished: list[Finished] = field(default_factory=list)
    """Of the workload."""
    repeated: list[Finished] = field(default_factory=list)
    """Of the pairs: verified as the others are, and no part of the workload's figures."""
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
    seconds: float,
    block_bytes: int,
    engines: list[Stats],
    tiers: TierFigures,
) -> Report:
    """Put all figures together."""
    blocks, verified = tally.blocks, tally.verified
    asked = blocks["asked"] or 1
    host = tiers.of("host-tier")
    missed = _missed(host)
    cached, recomputed = zip(*tally.pairs, strict=True) if tally.pairs else ((0.0,), (0.0,))
    return Report(
        requests=len(tally.finished),
        failed_requests=sum(bool(f.error) for f in verified),
        seconds=round(seconds, 2),
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
        paths=_paths(block_bytes, engines, tiers),
        missed=missed,
        unexplained=_unexplained(missed, host.get("lookup_blocks.miss", 0)),
    )


def _missed(figures: Mapping[str, float]) -> dict[str, int]:
    prefix = "missed_blocks."
    found = {name.removeprefix(prefix): int(count) for name, count in figures.items()
             if name.startswith(prefix)}  # fmt: skip
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _unexplained(missed: Mapping[str, int], all_missed: float) -> float:
    """Return the share of missed blocks with an unknown reason; no reason counts as unknown."""
    without = max(0.0, all_missed - sum(missed.values()))
    unknown = sum(count for reason, count in missed.items() if reason in UNEXPLAINED)
    total = without + sum(missed.values())
    return (without + unknown) / total if total else 0.0


def _paths(block_bytes: int, engines: list[Stats], tiers: TierFigures) -> dict[str, PathFigures]:
    host, disk = tiers.of("host-tier"), tiers.of("disk-tier")
    blocks = {
        "d2h": host.get("offload_blocks_d2h", 0),
        "h2disk": disk.get("offload_blocks_h2d", 0),
        "disk2h": disk.get("fill_blocks", 0),
        "d2disk": host.get("offload_blocks_d2d", 0),
    }
    rates = tiers.gb_per_s()
    rates["d2disk"] = rates.get("h2disk", 0.0) if blocks["d2disk"] else 0.0
    paths = {
        path: PathFigures(int(count), int(count) * block_bytes, round(rates.get(path, 0.0), 3))
        for path, count in blocks.items()
    }
    loaded = sum(engine.load_bytes for engine in engines)
    seconds = sum(engine.load_seconds for engine in engines)
    rate = round(loaded / seconds / 1e9, 3) if seconds else 0.0
    paths["h2d"] = PathFigures(loaded // block_bytes, loaded, rate)
    return {path: paths[path] for path in PATHS}


def print_report(report: Report, console: Console) -> None:
    """Print the report as a table, at the end of the demo."""
    table = Table(title="KVBM demo", title_justify="left", show_header=False, box=None)
    table.add_row("requests", f"{report.requests} in {report.seconds:.1f} s")
    rates = report.hit_rate
    table.add_row(
        "prompt blocks from",
        f"device {rates['device']:.1%}, host {rates['host']:.1%}, disk {rates['disk']:.1%}",
    )
    ttft = report.ttft_ms
    table.add_row(
        "time to first token",
        f"{ttft['cached']:.1f} ms with the cache, {ttft['recomputed']:.1f} ms recomputed "
        "(medians, same requests)"
        if ttft["recomputed"]
        else "no request found anything outside its device",
    )
    for path, title in PATHS.items():
        figures = report.paths[path]
        if figures.blocks:
            size = figures.bytes / 1e6
            table.add_row(
                title, f"{figures.blocks} blocks, {size:,.0f} MB, {figures.gb_per_s:.2f} GB/s"
            )
    table.add_row(
        "onboarded blocks compared", f"{report.blocks_verified}, {report.mismatches} mismatches"
    )
    if report.missed:
        reasons = ", ".join(f"{reason} {count}" for reason, count in report.missed.items())
        table.add_row("blocks missed", reasons)
        table.add_row("of them unexplained", f"{report.unexplained:.2%}")
    table.add_row("leases left over", str(report.leases_left))
    table.add_row("index = tiers = engines", "yes" if report.views_consistent else "NO")
    for difference in report.differences:
        table.add_row("", difference)
    for trouble in report.troubles:
        table.add_row("not ready", trouble)
    console.print(table)
    console.print("[bold green]passed[/]" if report.passed else "[bold red]FAILED[/]")
