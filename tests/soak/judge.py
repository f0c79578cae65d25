"""The verdict of a soak: what may not grow, by how much it may seem to, and what must stay alike.

Growth is a slope over the engines that have come: the median of the slopes of all pairs of samples
(Theil-Sen), so that a single sample decides nothing. Of entries it is the lower quarter instead.
Each life of a process is judged for itself: its slope times the engines that it has met. Their sum
is the growth: a restart hides nothing, and what a new life fills counts once, not as if every life
had filled it all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, pairwise
from operator import attrgetter
from statistics import median, quantiles

import msgspec

MIB = 1 << 20
PAIRS_MIN = 10
ENGINES_MIN = 150
"""Where fewer have come, the machine was too busy for a verdict."""


class Point(msgspec.Struct, frozen=True):
    """One sample of one series."""

    at_s: float
    engines: int
    """Engines that have come until then."""
    life: int
    """The process, or 0 for what outlives processes."""
    value: float
    returns: int = 0
    """Times that NATS has come back until then."""


class Bound(msgspec.Struct, frozen=True):
    """How much a series may grow: a fixed noise, and a part for each engine."""

    noise: float
    per_engine: float = 0.0
    part: float = 0.5
    """How many of the slopes of all pairs may be below the one that counts: half for the median."""
    steps: float = 0.0
    """How many times the median step between two samples is no growth yet."""

    def allows(self, engines: int) -> float:
        """Return the growth that may be seen while so many engines come."""
        return self.noise + self.per_engine * engines


class Finding(msgspec.Struct, frozen=True):
    """One line of the table."""

    what: str
    first: float
    last: float
    growth: float
    allowed: float
    engines: int
    is_red: bool


BOUNDS = {
    "memory": Bound(16.0 * MIB),
    "python blocks": Bound(60_000, 2.0),
    "descriptors": Bound(2.5),
    "threads": Bound(2.0),
    "shm bytes": Bound(0.5 * MIB),
    "runtime files": Bound(6.0),
    "series": Bound(120.0),
    "registry messages": Bound(8.0, 2.2),
    "state beside streams": Bound(24.0 * MIB),
    "entries": Bound(16.0, 0.2, part=0.25, steps=2.0),
}
"""By quantity. A leak of one entry for an engine is some blocks of Python for each engine. Of some
thousand places many are queues. With the median of slopes, chance makes one of 20 red whose lengths
are up to 1,000. What leaks has one pace in all pairs, so that the lower quarter finds it as well,
and needs more than two steps.

A counter of troubles is a new series when its trouble is met first: there are so many. The registry
keeps two messages of each engine for an hour, which a soak may not reach.
"""
OF_ONE = {
    ("nats", "memory"): Bound(128.0 * MIB),
    ("host-tier", "descriptors"): Bound(16.0, 0.01),
    ("consolidator", "descriptors"): Bound(16.0),
    ("object-tier", "descriptors"): Bound(24.0),
}
"""The server's collector lets its heap double, and it knows the events of two minutes. Host tier
and consolidator have connections to the engines of now, which are not always as many. NIXL keeps a
socket for each mover of the host tier where an engine was dead when it was added. The object tier
keeps as many connections to its bucket as had work at once: 14 to 46 descriptors in four minutes
of one seed."""


def bound_of(whose: str, quantity: str, *, has_bucket: bool) -> Bound | None:
    """Return how much a series may grow; None: it is not judged. A directory that hosts share takes
    no connections of the object tier."""
    if whose == "object-tier" and not has_bucket:
        return BOUNDS.get(quantity)
    return OF_ONE.get((whose, quantity), BOUNDS.get(quantity))


BY_FAULT = ("descriptors",)
"""What a fault may leak as well as an engine: judged once more for the time with faults alone."""
BY_RETURN = ("descriptors",)
"""What a reconnection may leak: judged once more by how often NATS has come back."""
RETURN_SETTLE_S = 10.0
"""A service that has just started opens its connections: no history fills with descriptors."""

Measure = Callable[[Point], int]
engines_of: Measure = attrgetter("engines")
returns_of: Measure = attrgetter("returns")


def growth(
    points: Sequence[Point],
    *,
    after_s: float,
    settle_s: float,
    of: Measure = engines_of,
    part: float = 0.5,
) -> float | None:
    """Return by how much a series has grown after `after_s`; None: too little was seen.

    The first `settle_s` of each life are left out. What fills grows ever slower, and what leaks
    does not: of the paces of all samples and of their later half, the smaller counts.
    """
    lives: dict[int, list[Point]] = {}
    for point in points:
        lives.setdefault(point.life, []).append(point)
    grown = [
        growth_of_life(
            [
                point
                for point in life
                if point.at_s >= max(after_s, life[0].at_s + settle_s * bool(number))
            ],
            of,
            part,
        )
        for number, life in lives.items()
    ]
    known = [one for one in grown if one is not None]
    return sum(known) if known else None


def growth_of_life(judged: Sequence[Point], of: Measure, part: float) -> float | None:
    """Return by how much a series has grown in one life; None: there are too few samples."""
    whole, late = slope(judged, of, part), slope(judged[len(judged) // 2 :], of, part)
    if whole is None:
        return None
    pace = whole if late is None else min(whole, late)
    return pace * (of(judged[-1]) - of(judged[0]))


def slope(points: Sequence[Point], of: Measure, part: float) -> float | None:
    """Return the slope, over engines or returns, below which so many pairs are; None: too few."""
    slopes = [
        (b.value - a.value) / (of(b) - of(a)) for a, b in combinations(points, 2) if of(a) < of(b)
    ]
    if len(slopes) < PAIRS_MIN:
        return None
    return median(slopes) if part == 0.5 else sorted(slopes)[int(part * len(slopes))]


def judge(
    what: str,
    bound: Bound,
    points: Sequence[Point],
    *,
    after_s: float,
    settle_s: float,
    faults_end_s: float | None = None,
) -> Finding | None:
    """Compare the growth of one series with its bound; None: too little was seen of it.

    What leaks at a fault is flat in the quiet time after it, which would hide it: with
    `faults_end_s` the growth until then counts where it is larger.
    """
    spans = [points]
    if faults_end_s is not None:
        spans.append([point for point in points if point.at_s <= faults_end_s])
    found = [growth(span, after_s=after_s, settle_s=settle_s, part=bound.part) for span in spans]
    grown = max((one for one in found if one is not None), default=None)
    if grown is None:
        return None
    return _finding(what, bound, [p for p in points if p.at_s >= after_s], grown)


def judge_returns(
    what: str, bound: Bound, points: Sequence[Point], *, after_s: float
) -> Finding | None:
    """Compare what the returns of NATS have left of one series with its bound."""
    left = growth(points, after_s=after_s, settle_s=RETURN_SETTLE_S, of=returns_of)
    if left is None:
        return None
    return _finding(f"{what} by NATS's returns", bound, points, left)


def _finding(what: str, bound: Bound, judged: Sequence[Point], grown: float) -> Finding:
    engines = judged[-1].engines - judged[0].engines
    allowed = bound.allows(engines) + bound.steps * _step(judged)
    edge = max(1, len(judged) // 10)
    first, last = (median(p.value for p in part) for part in (judged[:edge], judged[-edge:]))
    return Finding(what, first, last, grown, allowed, engines, grown > allowed)


def _step(points: Sequence[Point]) -> float:
    """Return the median of how far a value goes from one sample of a life to the next."""
    steps = [abs(b.value - a.value) for a, b in pairwise(points) if a.life == b.life]
    return median(steps) if steps else 0.0


def pace(samples: Sequence[tuple[float, float]]) -> float:
    """Return the median of how fast the second figure grows with the first; 0: too few samples."""
    paces = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(samples, 2) if a[0] < b[0]]
    return median(paces) if len(paces) >= PAIRS_MIN else 0.0


class Tenth(msgspec.Struct, frozen=True):
    """What a quiet tenth of the run was like."""

    requests: int
    hit_rate: float
    lookup_p50_ms: float
    lookup_p99_ms: float
    ping_p50_ms: float
    """What the machine took for the least that a lookup needs: a byte to a process and back."""
    ping_p99_ms: float
    cpu_ms_per_request: float
    cpu_ms_by_service: dict[str, float]
    work_us: float
    """Processor time that the machine took for the same work of Python."""
    log_lines_per_hour: float


class Alike(msgspec.Struct, frozen=True):
    """How far the last tenth may be from the second: a factor and a floor below the noise."""

    factor: float
    floor: float


ALIKE = {
    "hit_rate": Alike(1.10, 0.02),
    "lookup_p50_ms": Alike(1.25, 0.3),
    "lookup_p99_ms": Alike(2.0, 10.0),
    "cpu_ms_per_request": Alike(1.25, 2.0),
    "log_lines_per_hour": Alike(1.5, 600.0),
}
"""The scheduler of two busy cores moves medians by a fifth, and the hundredth lookup by more."""
SHORT_TENTH_S = 120
ALIKE_OF_SHORT = {"lookup_p50_ms": Alike(1.75, 0.8)}
"""Medians of tenths of 24 seconds were between 1.6 and 2.4 ms in one run, up and down."""
ALIKE_ON_SAME_MACHINE = {"cpu_ms_per_request": Alike(1.10, 2.0)}
"""For long tenths between which the machine has not changed. A busy one wakes services for more
messages at once, which costs half as much for each."""
SAME_MACHINE = 1.25
"""How far the machine's own figures may be apart then, up or down."""
LOWER_IS_WORSE = ("hit_rate",)
MACHINE = {
    "lookup_p50_ms": "ping_p50_ms",
    "lookup_p99_ms": "ping_p99_ms",
    "cpu_ms_per_request": "work_us",
}
"""A machine that others use more is slower: a figure may be larger by the same factor."""


def compare(second: Tenth, last: Tenth, tenth_s: float) -> list[Finding]:
    """Return a line for each figure that must be the same in both tenths, each of `tenth_s`."""
    found: list[Finding] = []
    rules = ALIKE
    if tenth_s < SHORT_TENTH_S:
        rules = ALIKE | ALIKE_OF_SHORT
    elif _on_same_machine(second, last):
        rules = ALIKE | ALIKE_ON_SAME_MACHINE
    for name, alike in rules.items():
        before, after = getattr(second, name), getattr(last, name)
        worse = before - after if name in LOWER_IS_WORSE else after - before
        slower = 1.0
        if name in MACHINE:
            machine = [getattr(tenth, MACHINE[name]) for tenth in (second, last)]
            slower = max(1.0, machine[1] / max(machine[0], 0.001))
        allowed = max(before * (alike.factor * slower - 1), alike.floor)
        found.append(Finding(name, before, after, worse, allowed, 0, worse > allowed))
    return found


def _on_same_machine(second: Tenth, last: Tenth) -> bool:
    """Tell whether the machine took about as long in both tenths for what is not KVBM's."""
    ratios = [
        getattr(last, name) / max(getattr(second, name), 0.001)
        for name in ("ping_p50_ms", "work_us")
    ]
    return all(1 / SAME_MACHINE <= ratio <= SAME_MACHINE for ratio in ratios)


def percentile(values: Iterable[float], percent: int) -> float:
    """Return a percentile, 0 for nothing."""
    known = list(values)
    return quantiles(known, n=100, method="inclusive")[percent - 1] if len(known) > 1 else 0.0
