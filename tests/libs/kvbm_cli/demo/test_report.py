"""The report: the keys that others read, the figures behind them, and when a run has failed."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest
from kvbm_cli.demo.check import Verdict
from kvbm_cli.demo.figures import TierFigures, transfers_of
from kvbm_cli.demo.report import PATHS, Report, Tally, make_report, print_report
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.metrics import MetricsSnapshot
from kvbm_connectors.sim.control import Finished, Stats
from rich.console import Console

BLOCK_BYTES = 1_000


def finished(**changes: Any) -> Finished:
    """A request of ten blocks: four on the device, three from host memory, one from disk."""
    fields: dict[str, Any] = {
        "request": "r", "ttft_ms": 1.0, "tokens": 160, "blocks": 10, "device_blocks": 4,
        "host_blocks": 3, "disk_blocks": 1, "verified": 4, "mismatches": 0, "failed_blocks": 0,
    }  # fmt: skip
    return Finished(**(fields | changes))


def snapshot(**rates: tuple[float, float]) -> MetricsSnapshot:
    """Histograms of one service: path → (bytes, seconds), as two transfers of half of each."""
    counters = Metrics()
    moved = counters.histogram("kvbm_transfer_bytes", "Bytes.", labels=("path",))
    took = counters.histogram("kvbm_transfer_seconds", "Seconds.", labels=("path",))
    for path, (size, seconds) in rates.items():
        for _ in range(2):
            moved.labels(path).observe(size / 2)
            took.labels(path).observe(seconds / 2)
    return MetricsSnapshot(
        kind="host-tier", host="h", instance="0", epoch=1, families=counters.families()
    )


def report_of(
    *requests: Finished, verdict: Verdict | None = None, disk_only: bool = False
) -> Report:
    tally = Tally()
    for request in requests or (finished(),):
        tally.add(request)
    tally.pairs += [(1.0, 10.0), (2.0, 30.0), (9.0, 20.0)]
    host = {"offload_blocks_d2h": 8.0, "offload_blocks_d2d": 6.0 * disk_only}
    return make_report(
        tally,
        verdict or Verdict(),
        seconds=2.0,
        block_bytes=BLOCK_BYTES,
        engines=[Stats(idle=True, counts={}, load_seconds=0.5, load_bytes=4_000)] * 2,
        tiers=TierFigures(
            {"host-tier": host, "disk-tier": {"offload_blocks_h2d": 5, "fill_blocks": 2}},
            transfers_of(
                [snapshot(d2h=(8e9, 2.0)), snapshot(h2disk=(1e9, 1.0), disk2h=(3e9, 1.0))]
            ),
        ),
    )


def test_the_keys_are_those_that_others_read() -> None:
    """The issue names them; there may be more."""
    written = json.loads(msgspec.json.encode(report_of()))
    expected = {
        "requests", "blocks_verified", "mismatches", "leases_left", "views_consistent", "hit_rate",
        "ttft_ms", "paths",
    }  # fmt: skip
    assert expected <= written.keys()
    assert written["hit_rate"].keys() == {"device", "host", "disk"}
    assert written["ttft_ms"].keys() == {"cached", "recomputed"}
    assert written["paths"].keys() == {"d2h", "h2d", "h2disk", "disk2h", "d2disk"} == PATHS.keys()
    for path in written["paths"].values():
        assert path.keys() == {"blocks", "bytes", "gb_per_s"}


def test_the_figures_are_right() -> None:
    report = report_of(finished(), finished(device_blocks=0, host_blocks=0, disk_blocks=0))
    assert (report.requests, report.blocks_asked, report.blocks_verified) == (2, 20, 8)
    assert report.hit_rate == {"device": 0.2, "host": 0.15, "disk": 0.05}
    assert report.ttft_ms == {"cached": 2.0, "recomputed": 20.0}
    paths = {path: (f.blocks, f.bytes, f.gb_per_s) for path, f in report.paths.items()}
    assert paths == {
        "d2h": (8, 8_000, 4.0),
        "h2d": (8, 8_000, 0.0),  # 8 kB in a second.
        "h2disk": (5, 5_000, 1.0),
        "disk2h": (2, 2_000, 3.0),
        "d2disk": (0, 0, 0.0),
    }
    assert report.passed


def repeated(cached: Finished, recomputed: Finished) -> Report:
    """A workload of one request, and a pair at its end."""
    tally = Tally()
    tally.add(finished())
    tally.add_pair(cached, recomputed)
    return make_report(
        tally, Verdict(), seconds=0.0, block_bytes=1, engines=[], tiers=TierFigures({}),
    )  # fmt: skip


def test_pairs_are_verified_and_are_no_requests_of_the_workload() -> None:
    """Its requests and hits are the workload's alone; what was compared is of all."""
    alone = finished(device_blocks=0, host_blocks=7, verified=8, ttft_ms=2.0)
    report = repeated(alone, finished(host_blocks=0, disk_blocks=0, verified=0, ttft_ms=20.0))
    assert (report.requests, report.blocks_asked, report.blocks_verified) == (1, 10, 12)
    assert report.hit_rate == {"device": 0.4, "host": 0.3, "disk": 0.1}
    assert report.ttft_ms == {"cached": 2.0, "recomputed": 20.0}
    assert report.passed


@pytest.mark.parametrize("trouble", [{"mismatches": 1}, {"error": "died"}])
@pytest.mark.parametrize("number", [0, 1])
def test_a_pair_that_goes_wrong_fails_the_run(trouble: dict[str, Any], number: int) -> None:
    pair = [finished(), finished()]
    pair[number] = finished(**trouble)
    assert not repeated(*pair).passed


def test_a_pair_that_found_nothing_is_not_compared() -> None:
    """It was evicted meanwhile: both were computed."""
    report = repeated(finished(host_blocks=0, disk_blocks=0), finished())
    assert report.ttft_ms == {"cached": 0.0, "recomputed": 0.0}


def test_a_disk_only_run_counts_its_own_path() -> None:
    assert report_of(disk_only=True).paths["d2disk"].blocks == 6


@pytest.mark.parametrize(
    ("request_", "verdict"),
    [
        (finished(mismatches=1), Verdict()),
        (finished(error="died"), Verdict()),
        (finished(), Verdict(leases_left=1)),
        (finished(), Verdict(staged_left=1)),
        (finished(), Verdict(differences=["the index holds one block more"])),
        (finished(), Verdict(troubles=["disk-tier-0: the disk takes no blocks"])),
    ],
)
def test_a_run_fails_by_each_of_these(request_: Finished, verdict: Verdict) -> None:
    report = report_of(request_, verdict=verdict)
    assert not report.passed
    assert all(trouble in printed(report) for trouble in verdict.troubles)
    assert "FAILED" in printed(report)


def test_a_run_without_requests_divides_by_nothing() -> None:
    """And so does one without a disk."""
    report = make_report(
        Tally(), Verdict(), seconds=0.0, block_bytes=1, engines=[], tiers=TierFigures({}),
    )  # fmt: skip
    assert report.passed
    assert report.hit_rate == {"device": 0.0, "host": 0.0, "disk": 0.0}


def test_misses_are_told_by_reason_and_a_run_that_cannot_explain_them_fails() -> None:
    """1. 98 % known: shown, failed. 2. All known: passed. 3. One block has no reason at all."""
    report = missing({"never_stored": 97, "evicted": 1, "unknown": 2}, misses=100)
    assert report.missed == {"never_stored": 97, "unknown": 2, "evicted": 1}
    assert (report.unexplained, report.passed) == (0.02, False)
    assert "never_stored 97, unknown 2, evicted 1" in printed(report)
    assert "2.00%" in printed(report)
    report = missing({"never_stored": 97, "evicted": 1, "not_remembered": 2}, misses=100)
    assert (report.unexplained, report.passed) == (0.0, True)
    report = missing({"never_stored": 9}, misses=10)
    assert (report.unexplained, report.passed) == (0.1, False)


def missing(reasons: dict[str, int], *, misses: int) -> Report:
    """A run whose lookups have missed blocks."""
    figures = {f"missed_blocks.{reason}": float(count) for reason, count in reasons.items()}
    figures["lookup_blocks.miss"] = float(misses)
    return make_report(
        Tally(), Verdict(), seconds=0.0, block_bytes=1, engines=[],
        tiers=TierFigures({"host-tier": figures}),
    )  # fmt: skip


def test_the_table_shows_the_paths_that_were_used() -> None:
    text = printed(report_of(verdict=Verdict(differences=["sim-0 holds 2 blocks"])))
    assert "device → host" in text
    assert "disk only" not in text
    assert "sim-0 holds 2 blocks" in text
    assert "passed" in printed(report_of())


def printed(report: Report) -> str:
    """The table as text."""
    console = Console(file=io.StringIO(), width=120)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
