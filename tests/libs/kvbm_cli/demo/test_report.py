"""The report: the keys that others read, the figures behind them, and when a run has failed."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from kvbm_cli.demo.check import Verdict
from kvbm_cli.demo.figures import Misses, TierFigures
from kvbm_cli.demo.printed import print_report
from kvbm_cli.demo.report import PATHS, Counted, Report, Tally, make_report
from kvbm_connectors.sim.control import Finished, Stats

BLOCK_BYTES = 1_000


def finished(**changes: Any) -> Finished:
    """A request of ten blocks: four on the device, three from host memory, one from disk."""
    fields: dict[str, Any] = {
        "request": "r", "ttft_ms": 1.0, "tokens": 160, "blocks": 10, "device_blocks": 4,
        "host_blocks": 3, "disk_blocks": 1, "verified": 4, "mismatches": 0, "failed_blocks": 0,
    }  # fmt: skip
    return Finished(**(fields | changes))


def counted(
    tiers: Mapping[str, Mapping[str, float]] | None = None,
    engines: Sequence[Stats] = (),
    *,
    is_shared: bool = False,
) -> Counted:
    """What a run has counted in two seconds, of which the last was for what still moved."""
    return Counted(
        seconds=1.0, moved_seconds=2.0, engines=engines, tiers=TierFigures(tiers or {}),
        is_shared=is_shared,
    )  # fmt: skip


NOTHING_MISSED = Misses(0, {})


def report_of(
    *requests: Finished,
    verdict: Verdict | None = None,
    disk_only: bool = False,
    is_shared: bool = False,
) -> Report:
    tally = Tally()
    for request in requests or (finished(),):
        tally.add(request)
    tally.pairs += [(1.0, 10.0), (2.0, 30.0), (9.0, 20.0)]
    tiers = {
        "host-tier": {"offload_blocks_d2h": 8e6, "offload_blocks_d2d": 6.0 * disk_only},
        "disk-tier": {"offload_blocks_h2d": 5e6, "fill_blocks": 2},
    }
    engine = Stats(
        idle=True, counts={"offload_blocks": 3}, load_seconds=0.5, load_bytes=4_000 * BLOCK_BYTES
    )
    return make_report(
        tally,
        verdict or Verdict(),
        counted=counted(tiers, [engine] * 2, is_shared=is_shared),
        misses=NOTHING_MISSED,
        block_bytes=BLOCK_BYTES,
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
    paths = {path: (f.blocks, f.gb_per_s) for path, f in report.paths.items()}
    assert paths == {
        "d2h": (8_000_000, 4.0),  # 8 GB in the two seconds until all had moved.
        "h2d": (8_000, 0.004),
        "h2disk": (5_000_000, 2.5),
        "disk2h": (2, 0.0),
        "d2disk": (0, 0.0),
    }
    assert all(f.bytes == f.blocks * BLOCK_BYTES for f in report.paths.values())
    assert (report.seconds, report.moved_seconds) == (1.0, 2.0)
    assert report.passed


def test_an_attached_run_counts_what_its_own_engines_moved() -> None:
    """The tiers' counts are of all engines: what cannot be told apart says so."""
    report = report_of(is_shared=True)
    assert report.paths["d2h"].blocks == 6, "three of each engine"
    assert report.paths["disk2h"].blocks == 1, "what its own requests had from disk"
    assert {path for path, f in report.paths.items() if f.of_all_engines} == {"h2disk", "d2disk"}
    written = json.loads(msgspec.json.encode(report))
    assert written["paths"]["h2disk"]["of_all_engines"] is True


def repeated(cached: Finished, recomputed: Finished) -> Report:
    """A workload of one request, and a pair at its end."""
    tally = Tally()
    tally.add(finished())
    tally.add_pair(cached, recomputed)
    return make_report(
        tally, Verdict(), counted=counted(), misses=NOTHING_MISSED, block_bytes=1,
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
        Tally(), Verdict(), counted=counted(), misses=NOTHING_MISSED, block_bytes=1,
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
    return make_report(
        Tally(), Verdict(), counted=counted(), misses=Misses(misses, reasons), block_bytes=1,
    )  # fmt: skip


def test_the_table_shows_the_paths_that_were_used() -> None:
    text = printed(report_of(verdict=Verdict(differences=["sim-0 holds 2 blocks"])))
    assert "device → host" in text
    assert "disk only" not in text
    assert "sim-0 holds 2 blocks" in text
    assert "passed" in printed(report_of())


def printed(report: Report) -> str:
    """Return the table as text, as in a pipe."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        print_report(report)
    return output.getvalue()
