"""Where figures go: a table on the terminal, results/NAME.json, and docs/benchmarks.md."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Row

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
MET = {True: "yes", False: "NO", None: "open"}
COLUMNS = ("what", "value", "reference", "ratio", "target", "met")


def report(name: str, rows: Sequence[Row], console: Console) -> bool:
    """Show and keep the figures of a run; returns whether every target was met."""
    RESULTS.mkdir(exist_ok=True)
    results = msgspec.json.format(msgspec.json.encode(rows), indent=2)
    (RESULTS / f"{name}.json").write_bytes(results + b"\n")
    title = f"{datetime.now(UTC):%Y-%m-%d}, {machine()}"
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(
        with_table(text, name, markdown(f"`make bench ARGS={name}`, {title}", rows))
    )
    table = Table(title=f"{name} ({title})", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    return all(row.met is not False for row in rows)


def cells(row: Row) -> list[str]:
    """A row as text, one for each of COLUMNS."""
    return [
        row.name,
        f"{row.value:g} {row.unit}",
        "" if row.reference is None else f"{row.reference:g} {row.unit}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.target is None else f"{row.target:g}",
        MET[row.met] if row.met is not None or row.target is not None else "",
    ]


def markdown(title: str, rows: Sequence[Row]) -> str:
    """A table for the document."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(cells(row) for row in rows)]
    return f"{title}:\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(text: str, name: str, table: str) -> str:
    """The document with another table between the marks of this benchmark."""
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    new, count = marked.subn(lambda found: f"{found[1]}{table}{found[2]}", text)
    assert count == 1, f"docs/benchmarks.md has no place for {name}"
    return new


def machine() -> str:
    """The machine, in words."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {model}, Linux {platform.release().split('-')[0]}"
