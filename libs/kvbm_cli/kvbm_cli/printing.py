"""Printing of figures and tables: units, short counts, and whole lines where output is piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvbm_cli.command_line import printable

SHORT_FROM = 10_000
"""A count below is printed in full."""
SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
ALIGNED_CHARS = 60
"""In a pipe, a longer cell does not widen the others of its column."""
Cell = str | tuple[str, str]
"""A text, or a text and its style on a terminal."""


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[Cell]], *, whole_first: bool = False
) -> None:
    """Print rows below their headings; in a pipe each is a line, whatever is in its cells.

    On a terminal, `whole_first` keeps the first column from being wrapped.
    """
    shown = [[(one, "") if isinstance(one, str) else one for one in row] for row in rows]
    styled = [[(printable(text), style) for text, style in row] for row in shown]
    named = [printable(heading) for heading in headings]
    if sys.stdout.isatty():
        _print_on_terminal(named, styled, whole_first=whole_first)
    else:
        for line in lines_of([named, *([text for text, _ in row] for row in styled)]):
            print(line)


def lines_of(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with the cells of a column below each other.

    >>> lines_of([["tier", "blocks"], ["host", "3"], ["disk-tier", ""]])
    ['tier       blocks', 'host       3', 'disk-tier']
    """
    cells = [cell for row in rows for cell in enumerate(row)]
    widths = {
        column: max(min(len(text), ALIGNED_CHARS) for number, text in cells if number == column)
        for column, _ in cells
    }
    return [
        "  ".join(text.ljust(widths[column]) for column, text in enumerate(row)).rstrip()
        for row in rows
    ]


def _print_on_terminal(
    headings: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]], *, whole_first: bool
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # `Text`: what services say is not markup.
    table = Table(box=None)
    for number, heading in enumerate(headings):
        table.add_column(Text(heading), overflow="fold", no_wrap=whole_first and not number)
    for row in rows:
        table.add_row(*(Text(text, style=style) for text, style in row))
    Console().print(table)


def count(value: float) -> str:
    """Format a number of things.

    >>> count(12_230), count(9_999), count(2.5), count(999_999), count(0.00004)
    ('12.2 k', '9999', '2.5', '1.0 M', '0')
    """
    if abs(value) < SHORT_FROM:
        return f"{value:.3f}".rstrip("0").rstrip(".") if value % 1 else str(int(value))
    return _scaled(value)


def size(value: float) -> str:
    """Format a number of bytes; a GB is 10⁹ of them, as in the settings.

    >>> size(1_500_000_000), size(131_072), size(12)
    ('1.5 GB', '131.1 kB', '12 B')
    """
    return f"{_scaled(value)}B" if abs(value) >= 1000 else f"{count(value)} B"


def rate(value: float) -> str:
    """Format things per second.

    >>> rate(12_230.4)
    '12.2 k/s'
    """
    return f"{count(value)}/s"


def byte_rate(value: float) -> str:
    """Format bytes per second.

    >>> byte_rate(1.55e9)
    '1.6 GB/s'
    """
    return f"{size(value)}/s"


def percent(part: float) -> str:
    """Format a part of one.

    >>> percent(0.293)
    '29.3 %'
    """
    return f"{100 * part:.1f} %"


def seconds(value_ms: float) -> str:
    """Format a span of milliseconds.

    >>> seconds(1_230)
    '1.2 s'
    """
    return f"{value_ms / 1000:.1f} s"


def clock(at_ms: int) -> str:
    """Format a time of day, in the time zone of this machine."""
    text = time.strftime("%H:%M:%S", time.localtime(at_ms / 1000))
    return f"{text}.{at_ms % 1000:03d}"


def date_and_clock(at_ms: int) -> str:
    """Format a point in time, in the time zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1000))


def cell(name: str, value: Any) -> str:
    """Format a value of an answer by the name of its field.

    >>> cell("bytes_used", 5_000_000), cell("pid", 12_345), cell("ready", True), cell("host", None)
    ('5.0 MB', '12345', 'yes', '')
    """
    match value:
        case bool():
            return "yes" if value else "no"
        case int() | float() if name in UNITS:
            return UNITS[name](value)
        case float():
            return count(value)
        case list():
            return ", ".join(map(str, value))
        case None:
            return ""
        case _:
            return str(value)


UNITS: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(
        ("bytes", "bytes_used", "bytes_total", "block_bytes", "slot_bytes", "slab_bytes",
         "share_bytes", "memory_bytes", "memory_bound_bytes", "queued_bytes"), size
    ),
    **dict.fromkeys(("occupancy", "fragmentation", "hit_rate"), percent),
    **dict.fromkeys(
        ("blocks", "slots", "slots_used", "slots_total", "slabs", "leases", "hit_blocks",
         "missed_blocks", "missed", "unused", "removed", "kept", "pinned", "matched_blocks"), count
    ),
    "waste_percent": lambda value: percent(value / 100),
    "seen_ms_ago": seconds,
    "left_ms": seconds,
    "ts_ms": date_and_clock,
}  # fmt: skip
"""Fields whose figures have a unit, or are counts. Others are names: pids, epochs, sequences."""


def _scaled(value: float) -> str:
    for scale, name in SCALES:
        if abs(value) >= 0.99995 * scale:
            return f"{value / scale:.1f} {name}"
    return count(value)
