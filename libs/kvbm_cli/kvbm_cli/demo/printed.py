"""Printed result of a demo run: a table, with a legend of what its rows mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvbm_common.tier.reasons import MEANINGS

from kvbm_cli.demo.report import PATHS, PathFigures, Report
from kvbm_cli.printing import Cell, print_table

LEGEND: Mapping[str, str] = {
    "prompt blocks from": "full blocks of all prompts, by the tier that had them; the rest was "
    "computed",
    "time to first token": "medians over pairs: the same request, once with the cache and once "
    "recomputed, alone on its engine",
    "GB/s": "bytes over wall time, from the first request until every block was where it goes",
    "onboarded blocks compared": "blocks that came from a tier, each compared with what its name "
    "says, those of the pairs included",
    "blocks missed": "blocks that a lookup did not find, by reason:",
}
"""Name of a row, or a word in it → the explanation in the legend."""


def print_report(report: Report) -> None:
    """Print the report as a table, its legend, and whether the run has passed."""
    rows = list(_rows(report))
    print_table(("KVBM demo", ""), rows, whole_first=True)
    print()
    print_table(("what the rows mean", ""), list(_legend(report)), whole_first=True)
    print("\npassed" if report.passed else "\nFAILED")


def _rows(report: Report) -> Iterator[Sequence[Cell]]:
    how_many = "every block" if report.has_moved else "NOT every block"
    yield ["requests", f"{report.requests} in {report.seconds:.1f} s; "
           f"{how_many} had moved after {report.moved_seconds:.1f} s"]  # fmt: skip
    if report.failed_requests:
        yield ["requests failed", (str(report.failed_requests), "bold red")]
    rates = ", ".join(f"{tier} {rate:.1%}" for tier, rate in report.hit_rate.items())
    yield ["prompt blocks from", rates]
    yield from _times(report)
    for path, title in PATHS.items():
        if report.paths[path].blocks:
            yield [title, _moved(report.paths[path])]
    compared = f"{report.blocks_verified}, {report.mismatches} mismatches"
    yield ["onboarded blocks compared", compared]
    if report.missed:
        reasons = ", ".join(f"{reason} {count}" for reason, count in report.missed.items())
        yield ["blocks missed", reasons]
        yield ["of them unexplained", f"{report.unexplained:.2%}"]
    yield ["leases left over", str(report.leases_left)]
    yield ["index = tiers = engines", "yes" if report.views_consistent else ("NO", "bold red")]
    yield from (["", difference] for difference in report.differences)
    for trouble in report.troubles:
        yield ["not ready", (trouble, "bold red")]


def _times(report: Report) -> Iterator[Sequence[Cell]]:
    """Return the rows of the pairs; one that is slower with the cache stands out."""
    if (found := report.comparison) is None:
        yield ["time to first token", "no request found anything outside its device"]
        return
    ttft = report.ttft_ms
    medians = f"{ttft['cached']:.1f} ms with the cache, {ttft['recomputed']:.1f} ms recomputed"
    yield ["time to first token", medians]
    yield ["", (found.words, "bold red" if found.ratio_low > 1 else "")]


def _moved(path: PathFigures) -> str:
    text = f"{path.blocks} blocks, {path.bytes / 1e6:,.0f} MB, {path.gb_per_s:.2f} GB/s"
    return f"{text} (of all engines)" if path.of_all_engines else text


def _legend(report: Report) -> Iterator[Sequence[Cell]]:
    shown = {"prompt blocks from", "onboarded blocks compared"}
    if report.comparison is not None:
        shown.add("time to first token")
    if any(path.blocks for path in report.paths.values()):
        shown.add("GB/s")
    if report.missed:
        shown.add("blocks missed")
    yield from ([row, meaning] for row, meaning in LEGEND.items() if row in shown)
    for reason in report.missed:
        yield [f"  {reason}", MEANINGS.get(reason, "")]
