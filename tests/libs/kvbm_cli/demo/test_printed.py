"""The table of a run: its legend, what stands out, and README's recorded run in its form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_cli.demo.pairs import Comparison
from kvbm_cli.demo.printed import LEGEND, print_report
from kvbm_cli.demo.report import PATHS, PathFigures, Report
from kvbm_common.tier.reasons import MEANINGS

README = Path(__file__).parents[4] / "README.md"
FASTER = Comparison(pairs=24, ratio=0.6, ratio_low=0.55, ratio_high=0.64)


def report(**changes: Any) -> Report:
    """Return the report of a run that used host and disk."""
    found = Report(
        requests=9, failed_requests=0, seconds=1.0, moved_seconds=1.5, blocks_asked=10,
        blocks_verified=4, mismatches=0, failed_blocks=0, leases_left=0, staged_left=0,
        views_consistent=True, differences=[],
        hit_rate={"device": 0.1, "host": 0.2, "disk": 0.3},
        ttft_ms={"cached": 6.0, "recomputed": 10.0}, comparison=FASTER,
        paths={path: PathFigures(8 * (path != "d2disk"), 8_000_000, 0.25) for path in PATHS},
        missed={"filtered": 2, "evicted": 1},
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


def printed(capsys: pytest.CaptureFixture[str], **changes: Any) -> list[str]:
    """Return the lines of a report, as in a pipe."""
    print_report(report(**changes))
    return capsys.readouterr().out.splitlines()


def labels(lines: list[str]) -> list[str]:
    """Return what stands at the beginning of lines: their first column."""
    return [re.split(r"\s{2,}", line.strip())[0] for line in lines if line.strip()]


def test_the_legend_says_what_each_figure_and_reason_means(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "\n".join(printed(capsys))
    assert all(meaning in text for meaning in LEGEND.values())
    assert MEANINGS["filtered"] in text
    assert "wanted once only" in MEANINGS["filtered"]
    assert MEANINGS["corrupt"] not in text, "no block was missed for it"


def test_a_wait_that_was_given_up_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert any("; every block had moved after 1.5 s" in line for line in printed(capsys))
    given_up = printed(capsys, has_moved=False)
    assert any("; NOT every block had moved after 1.5 s" in line for line in given_up)


def test_a_cache_that_makes_requests_slower_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    slower = Comparison(pairs=24, ratio=1.3, ratio_low=1.2, ratio_high=1.4)
    assert any("30% SLOWER with the cache" in line for line in printed(capsys, comparison=slower))
    assert any("40% faster with the cache" in line for line in printed(capsys))


def test_paths_of_an_attached_run_say_what_is_of_all_engines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = report().paths | {"h2disk": PathFigures(8, 8, 0.25, of_all_engines=True)}
    lines = printed(capsys, paths=paths)
    [line] = [line for line in lines if "(of all engines)" in line]
    assert line.startswith("host → disk")


def test_texts_of_services_cannot_colour_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, troubles=["disk-tier-0: \x1b[2J [bold]no room"])
    [line] = [line for line in lines if line.startswith("not ready")]
    assert "\\x1b[2J [bold]no room" in line
    assert all(line == line.rstrip() for line in lines), "a pipe has no padding"


def test_the_run_in_the_readme_has_the_form_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: the rows of README's table, its legend and its end are those that a run prints."""
    recorded = README.read_text().split("    KVBM demo\n", maxsplit=1)[1]
    block = recorded[: recorded.index("\n     passed\n")]
    starts = [line for line in block.splitlines() if re.match(r" {5,7}\S", line)]
    reasons = re.findall(
        r"([a-z_]+)\s+\d+", block[block.index("blocks missed") :].split("of them")[0]
    )
    run = labels(printed(capsys, missed=dict.fromkeys(reasons, 1)))
    faster = [one for one in run if "faster" in one]
    assert labels(starts) == [one for one in run[1:-1] if one not in faster]
