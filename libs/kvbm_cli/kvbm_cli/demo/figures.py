"""Figures of a run: what the tiers count at its end, less what they had counted before it.

The tiers of an attached stack may have lived for weeks, and a verdict is of one run. What engines
of others do meanwhile counts, too, in most figures: a tier knows only lookups apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvbm_common.wire.explain import Explanation

from kvbm_cli.demo.check import StackView, wait_until

KINDS = ("host-tier", "disk-tier")
MISSED = "missed_blocks."

Answer = TypeVar("Answer")
Counts = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class TierFigures:
    """The sums over all tiers of each kind."""

    counts: Counts
    """Kind → the counts of its tiers."""

    def since(self, before: TierFigures) -> TierFigures:
        """Return what was counted after `before`; a tier that began a new life counts from 0."""
        return TierFigures(
            {
                kind: {
                    name: max(count - before.of(kind).get(name, 0.0), 0.0)
                    for name, count in counts.items()
                }
                for kind, counts in self.counts.items()
            }
        )

    def of(self, kind: str) -> Mapping[str, float]:
        """Return what the tiers of this kind count, nothing where the kind has no tier."""
        return self.counts.get(kind, {})


@dataclass(frozen=True, slots=True)
class Misses:
    """Blocks that lookups missed: all of them, and those that have a reason."""

    blocks: int
    by_reason: Mapping[str, int]


def misses_of_tiers(figures: TierFigures) -> Misses:
    """Return what the lookups of all engines missed."""
    host = figures.of("host-tier")
    found = {
        name.removeprefix(MISSED): int(count)
        for name, count in host.items()
        if name.startswith(MISSED)
    }
    return Misses(int(host.get("lookup_blocks.miss", 0)), found)


def misses_of(explanations: Iterable[Explanation]) -> Misses:
    """Return what these lookups missed."""
    found: Counter[str] = Counter()
    blocks = 0
    for one in explanations:
        blocks += one.blocks - one.hit_blocks
        for part in one.segments:
            if part.reason:
                found[part.reason] += part.blocks
    return Misses(blocks, dict(found))


async def figures_of(view: StackView) -> TierFigures:
    """Ask every tier of the view, again where one has left; raises DeadlineExceeded."""
    return await _answered(lambda: _ask_tiers(view))


async def misses_of_engines(view: StackView, engines: Iterable[str]) -> Misses:
    """Ask the host tiers for the lookups of these engines alone; raises DeadlineExceeded."""
    names = tuple(engines)
    return misses_of(await _answered(lambda: _ask_explanations(view, names)))


async def _answered(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    found: list[Answer] = []

    async def look() -> bool:
        found.append(await ask())
        return True

    await wait_until(look, "the tiers do not answer")
    return found[0]


async def _ask_tiers(view: StackView) -> TierFigures:
    counts: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for kind, instance in await view.instances(*KINDS):
        for name, count in (await view.stats(kind, instance)).figures.items():
            counts[kind][name] = counts[kind].get(name, 0.0) + count
    return TierFigures(counts)


async def _ask_explanations(view: StackView, engines: Sequence[str]) -> list[Explanation]:
    return [
        one
        for kind, instance in await view.instances("host-tier")
        for engine in engines
        for one in await view.explanations(kind, instance, engine)
    ]
