"""The harness: medians, percentiles, and rows that carry their reference."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec


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


def time_row(
    name: str, value: float, *, unit: str, target: float, reference: float | None = None
) -> Row:
    """A row where less is better: `target` is an upper bound of the ratio (or of the value)."""
    ratio = value / reference if reference else None
    met = (ratio if ratio is not None else value) <= target
    return Row(
        name=name, unit=unit, value=round(value, 3),
        reference=round(reference, 3) if reference else None,
        ratio=round(ratio, 3) if ratio is not None else None, target=target, met=met,
    )  # fmt: skip


def bound_row(name: str, value: float, *, low: float, high: float, unit: str, target: float) -> Row:
    """A row where less is better, known to be between two ends: between them `met` is open."""
    met = True if high <= target else False if low > target else None
    return Row(name=name, unit=unit, value=round(value, 3), target=target, met=met)


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


def wait_for(condition: Callable[[], bool], *, deadline_s: float, what: str) -> None:
    """Look at a condition every half millisecond until it holds; raises TimeoutError."""
    give_up_s = time.perf_counter() + deadline_s
    while not condition():
        if time.perf_counter() > give_up_s:
            raise TimeoutError(f"{what} took more than {deadline_s} s")
        time.sleep(0.0005)


def processor_s(pid: int) -> float:
    """Processor time of another process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
