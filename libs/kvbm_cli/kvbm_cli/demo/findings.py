"""Findings of the looks at a stack: what is left over, and where two views differ.

On a stack that others use, too, one look proves nothing: their blocks come and go between two
questions. There a finding counts only while every look has it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace

from kvbm_common.wire.verbs import StatsReply

UNDER_WAY = ("offers", "lookups_waiting", "writes", "reads")
RESTS_MIN = 3
"""Some work is in none of these figures: one look may find it, several hardly."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Blocks of one source that only the source has, or only the index."""

    own_count: int
    indexed_count: int
    unknown: Set[str]
    """Names that the index does not know."""
    gone: Set[str]
    """Names that only the index has."""

    def __bool__(self) -> bool:
        return bool(self.unknown or self.gone)

    def narrowed(self, before: Difference) -> Difference:
        """Return what differed before, too, in the same direction."""
        unknown, gone = self.unknown & before.unknown, self.gone & before.gone
        return replace(self, unknown=unknown, gone=gone)


def difference_of(own: Set[str], indexed: Set[str]) -> Difference:
    """Compare the names of a source with those that the index has of it."""
    return Difference(len(own), len(indexed), own - indexed, indexed - own)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Leases and staged slots of one tier that a run may have left."""

    leases: int
    staged: int
    rests: int
    """Looks at the tier when it had no work under way: else staged slots may be those of work."""

    def __bool__(self) -> bool:
        return bool(self.leases or self.staged)

    def narrowed(self, before: Leftovers) -> Leftovers:
        """Return the least of both looks; of staged slots, of those that were at rest."""
        if bool(self.rests) == bool(before.rests):
            staged = min(self.staged, before.staged)
        else:
            staged = (self if self.rests else before).staged
        return Leftovers(min(self.leases, before.leases), staged, self.rests + before.rests)


def leftovers_of(stats: StatsReply, engines: Collection[str] | None) -> Leftovers:
    """Return what one tier has left: with `engines`, of leases only those of these engines.

    A tier below the host tiers has leases for operators' pins alone, which no run leaves.
    """
    staged = stats.slots.get("staged", 0)
    if engines is None:
        return Leftovers(leases_but_pins(stats), staged, rests=1)
    leases = sum(stats.figures.get(f"engine_leases.{engine}", 0.0) for engine in engines)
    return Leftovers(int(leases), staged, rests=int(not is_under_way(stats)))


def leases_but_pins(stats: StatsReply) -> int:
    """Count the leases of a tier that a run could have left: an operator's pin is meant to stay."""
    return stats.leases - int(stats.figures.get("pins", 0))


def is_under_way(stats: StatsReply) -> bool:
    """Tell whether a tier has work under way, or waits to begin it."""
    pending = ["writes_pending"] if stats.ready else []  # Else blocks wait until it is.
    return any(stats.figures.get(name) for name in [*UNDER_WAY, *pending])


@dataclass(slots=True)
class Findings:
    """Results of all looks so far, by source."""

    lasting: bool
    """True: a finding counts only if every look since its source has joined has it."""
    is_complete: bool = False
    """The last look has asked everything; False: it has failed on the way."""
    leftovers: Mapping[str, Leftovers] = field(default_factory=dict)
    differences: Mapping[str, Difference] = field(default_factory=dict)

    def take_leftovers(self, look: Mapping[str, Leftovers]) -> None:
        """Add a look at what the tiers have left."""
        before = self.leftovers if self.lasting else {}
        self.leftovers = {
            source: one.narrowed(before[source]) if source in before else one
            for source, one in look.items()
        }

    def take_differences(self, look: Mapping[str, Difference]) -> None:
        """Add a look at views that may differ."""
        before = self.differences if self.lasting else {}
        self.differences = {
            source: one.narrowed(before[source]) if source in before else one
            for source, one in look.items()
        }

    @property
    def leases_left(self) -> int:
        """The leases of all tiers that count."""
        return sum(one.leases for one in self.leftovers.values())

    @property
    def staged_left(self) -> int:
        """The staged slots that count: beside others, of a tier that was seen at rest often."""
        least = RESTS_MIN if self.lasting else 1
        return sum(one.staged for one in self.leftovers.values() if one.rests >= least)

    def texts(self) -> list[str]:
        """Return a sentence for each source whose views differ."""
        return [
            f"{source} holds {one.own_count} blocks, the index {one.indexed_count}: "
            f"{len(one.unknown)} unknown to it, {len(one.gone)} gone"
            + (", in every look" if self.lasting else "")
            for source, one in self.differences.items()
            if one
        ]
