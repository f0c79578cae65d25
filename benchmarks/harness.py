"""The harness: medians, percentiles, and rows that carry their reference."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

RESAMPLED = 4_000


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


def paired_rate_row(
    name: str, pairs: Sequence[tuple[float, float]], *, unit: str, target: float, scale: float = 1.0
) -> Row:
    """Values, each beside the reference of its own minute: the median of the ratios, and where it
    is with a probability of 95 %. `scale`: of the reference."""
    values, references = zip(*pairs, strict=True)
    low, ratio, high = interval([a / (b * scale) for a, b in pairs], statistics.median)
    return Row(
        name=f"{name} (95 %: {low:.2f} to {high:.2f})", unit=unit,
        value=round(statistics.median(values), 3),
        reference=round(statistics.median(references) * scale, 3),
        ratio=round(ratio, 3), target=target, met=ratio >= target,
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


def info_row(name: str, value: float, *, unit: str, reference: float | None = None) -> Row:
    """A figure without a target: for scale."""
    return Row(
        name=name, unit=unit, value=round(value, 3),
        reference=None if reference is None else round(reference, 3),
        ratio=None if reference is None else round(value / reference, 3),
    )  # fmt: skip


def median_rate(measure: Callable[[], float], rounds: int) -> float:
    """The median of several measurements."""
    return statistics.median(measure() for _ in range(rounds))


def interval(
    values: Sequence[float], middle: Callable[[Sequence[float]], float]
) -> tuple[float, float, float]:
    """The middle between the ends of its 95 % interval, by drawing from the values anew."""
    drawn = random.Random(0)
    found = sorted(middle(drawn.choices(values, k=len(values))) for _ in range(RESAMPLED))
    return found[RESAMPLED // 40], middle(values), found[-(RESAMPLED // 40)]


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


async def ask_steadily(
    ask: Callable[[bytes], Awaitable[bytes]], asked: Sequence[bytes], *, count: int, per_s: float
) -> tuple[list[float], list[bytes]]:
    """Ask at a steady rate, whether or not the question before is answered; return the seconds of
    each question, and the answers."""
    seconds: list[float] = []
    answers: list[bytes] = []

    async def timed(payload: bytes) -> None:
        started_s = time.perf_counter()
        answers.append(await ask(payload))
        seconds.append(time.perf_counter() - started_s)

    begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            pause_s = begun_s + number / per_s - time.perf_counter()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            tasks.create_task(timed(asked[number % len(asked)]))
    return seconds, answers


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Another process stands still meanwhile; what it is sent waits for it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def processor_s(pid: int) -> float:
    """Processor time of another process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
