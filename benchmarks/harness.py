"""The harness: medians, rows that carry their reference, a table and a file of results."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure beside what it is measured against, in the same run.

    `ratio` is value / reference; `target` is a bound on the ratio where there is a reference, on
    the value where there is none. For times, less is better, and `target` is an upper bound.
    """

    name: str
    unit: str
    value: float
    reference: float | None = None
    ratio: float | None = None
    target: float | None = None
    met: bool | None = None


def rate_row(
    name: str, value: float, *, unit: str, reference: float | None = None, target: float
) -> Row:
    """A row where more is better: `target` is a lower bound of the ratio (or of the value)."""
    ratio = value / reference if reference else None
    met = (ratio if ratio is not None else value) >= target
    return Row(
        name=name, unit=unit, value=round(value, 3),
        reference=round(reference, 3) if reference else None,
        ratio=round(ratio, 3) if ratio is not None else None, target=target, met=met,
    )  # fmt: skip


def time_row(name: str, value: float, *, unit: str, target: float) -> Row:
    """A row where less is better: `target` is an upper bound of the value."""
    return Row(name=name, unit=unit, value=round(value, 3), target=target, met=value <= target)


def info_row(name: str, value: float, *, unit: str) -> Row:
    """A figure without a target: for scale."""
    return Row(name=name, unit=unit, value=round(value, 3))


def median_rate(measure: Callable[[], float], rounds: int) -> float:
    """The median of several measurements."""
    return statistics.median(measure() for _ in range(rounds))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def report(name: str, rows: Sequence[Row], console: Console) -> bool:
    """Print a table and write `results/<name>.json`; returns whether every target was met."""
    RESULTS.mkdir(exist_ok=True)
    document = msgspec.json.encode(rows)
    (RESULTS / f"{name}.json").write_bytes(msgspec.json.format(document, indent=2) + b"\n")
    table = Table(title=f"{name} ({machine()}, {datetime.now(UTC):%Y-%m-%d})", title_justify="left")
    for column in ("what", "value", "reference", "ratio", "target", "met"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        table.add_row(
            row.name, f"{row.value:g} {row.unit}",
            "" if row.reference is None else f"{row.reference:g} {row.unit}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.target is None else f"{row.target:g}",
            "" if row.met is None else ("yes" if row.met else "NO"),
        )  # fmt: skip
    console.print(table)
    return all(row.met is not False for row in rows)


def machine() -> str:
    """The machine, in words."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{len_cores()} cores, {model}, Linux {platform.release().split('-')[0]}"


def len_cores() -> int:
    """Cores that this process may use."""
    import os

    return len(os.sched_getaffinity(0))


def wait_for(condition: Callable[[], bool], *, deadline_s: float, what: str) -> None:
    """Look at a condition every half millisecond until it holds; raises TimeoutError."""
    give_up_s = time.perf_counter() + deadline_s
    while not condition():
        if time.perf_counter() > give_up_s:
            raise TimeoutError(f"{what} took more than {deadline_s} s")
        time.sleep(0.0005)
