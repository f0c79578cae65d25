"""The table of `make bench-peers`: figures of all arms beside each other, and what each arm was.

An arm's figures are kept in `results/peers/ARM.json`, a visit of a round each.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

OURS, ALONE = "kvbm", "alone"
TARGET = 1.0
NO_FIGURE = "–"
Figures = Mapping[str, float]


class Sizes(msgspec.Struct, frozen=True):
    """How much is measured."""

    rounds: int
    samples: int
    """Prompts of each length in a visit."""
    batches: int
    turns: int
    rest_s: float
    """Until what the work left behind has ended, too."""
    idle_s: float


class Kept(msgspec.Struct):
    """What is known of one arm."""

    name: str
    title: str
    caches: bool
    sizes: Sizes
    machine: str
    versions: str = ""
    commands: list[str] = []
    visits: list[dict[str, float]] = []
    """The medians of each round's visit."""
    times: list[str] = []
    """When each visit began."""
    failed: str = ""
    """Why there are no more visits."""

    def wants(self, number: int) -> bool:
        """Is the visit of this round still to be made?"""
        return not self.failed and len(self.visits) <= number


@dataclass(frozen=True, slots=True)
class Measure:
    """One row."""

    key: str
    title: str
    unit: str
    more_is_better: bool = False

    def times_better(self, ours: float, other: float) -> float:
        """How many times better ours is."""
        return ours / other if self.more_is_better else other / ours


def rounds_of(kept: Kept, key: str) -> dict[int, float]:
    """A figure by the round in which it was measured."""
    return {number: one[key] for number, one in enumerate(kept.visits) if key in one}


def median_of(kept: Kept, key: str) -> float | None:
    """The median of the rounds' figures."""
    found = rounds_of(kept, key)
    return statistics.median(found.values()) if found else None


def beside(measure: Measure, ours: Kept, other: Kept) -> float | None:
    """How many times better ours is, the median over the rounds that both have seen."""
    mine, theirs = rounds_of(ours, measure.key), rounds_of(other, measure.key)
    pairs = [(mine[number], theirs[number]) for number in mine.keys() & theirs.keys()]
    ratios = [measure.times_better(a, b) for a, b in pairs if a > 0 and b > 0]
    return statistics.median(ratios) if ratios else None


def best_peer(measure: Measure, arms: Sequence[Kept]) -> tuple[str, float] | None:
    """The peer that leaves us the smallest ratio, and that ratio."""
    ours = next(arm for arm in arms if arm.name == OURS)
    ratios = [
        (ratio, arm.title)
        for arm in arms
        if arm.caches and arm.name != OURS
        and (ratio := beside(measure, ours, arm)) is not None
    ]  # fmt: skip
    if not ratios:
        return None
    ratio, title = min(ratios)
    return title, ratio


def row(measure: Measure, arms: Sequence[Kept]) -> list[str]:
    """The cells of one row."""
    ours = next(arm for arm in arms if arm.name == OURS)
    alone = next(arm for arm in arms if arm.name == ALONE)
    figures = [median_of(arm, measure.key) for arm in arms]
    cells = [NO_FIGURE if one is None else f"{one:.4g}" for one in figures]
    without = beside(measure, ours, alone)
    best = best_peer(measure, arms)
    return [
        f"{measure.title}, {measure.unit}",
        *cells,
        "" if without is None else f"{without:.2f}",
        "" if best is None else f"{best[1]:.2f}",
        "" if best is None else ("yes" if best[1] >= TARGET else "NO"),
    ]


def markdown(title: str, measures: Sequence[Measure], arms: Sequence[Kept]) -> str:
    """Both tables for the document."""
    head = ["what", *(arm.title for arm in arms), "KVBM beside vLLM alone",
            "KVBM beside the best peer", "met"]  # fmt: skip
    rows = [row(measure, arms) for measure in measures]
    about = [[arm.title, arm.versions, _when(arm), _what(arm)] for arm in arms]
    return (
        f"{title}:\n\n{_table(head, rows)}\n"
        f"{_table(['arm', 'versions', 'visits', 'processes, or the reason for none'], about)}"
    )


def _when(arm: Kept) -> str:
    return f"{len(arm.visits)}, {arm.times[0]} to {arm.times[-1]}" if arm.times else "0"


def _what(arm: Kept) -> str:
    lines = [f"`{command}`" for command in arm.commands]
    if arm.failed:
        lines.insert(0, f"ended: `{arm.failed.replace('`', chr(39))}`")
    return "<br>".join(lines).replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def missed(measures: Sequence[Measure], arms: Sequence[Kept]) -> Iterator[str]:
    """The rows in which a peer is better."""
    for measure in measures:
        best = best_peer(measure, arms)
        if best is not None and best[1] < TARGET:
            yield measure.title
