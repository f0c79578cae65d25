"""The lower tiers of this host, disk tiers and object tiers: a view of each medium."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.former_blocks import FormerBlocks
from kvbm_common.wire.events import Tier

from kvbm_host_tier.core.findable import Findable
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.lower_tier_view import ANY, LowerTierView, Namespaces
from kvbm_host_tier.core.messages import AskLowerTierSnapshot

LOWER: tuple[Tier, ...] = ("disk", "object")
"""The media below, the nearest first: a block in both is read from the first one."""
NO_NAMES = frozenset[SequenceHash]()


class LowerTiers:
    """The views of all media below."""

    def __init__(
        self,
        former: FormerBlocks | None = None,
        findable: Findable | None = None,
        limits: HostTierLimits | None = None,
    ) -> None:
        """Start without instances; see LowerTierView."""
        self.views: Mapping[Tier, LowerTierView] = {
            tier: LowerTierView(tier, former, findable, limits) for tier in LOWER
        }
        self._nearest_first = list(self.views.items())

    def size_for(self, slot_count: int) -> None:
        """Keep as many departures of blocks below as host memory with so many slots needs."""
        for view in self.views.values():
            view.departures.size_for(slot_count)

    def __contains__(self, name: SequenceHash) -> bool:
        return any(name in view for view in self.views.values())

    def tester(self) -> Callable[[SequenceHash], bool]:
        """Return a fast test whether some tier has a block, valid until the next event."""
        filled = [view for view in self.views.values() if view]
        if len(filled) > 1:
            return self.__contains__
        return filled[0].tester() if filled else NO_NAMES.__contains__

    def medium_of(self, name: SequenceHash) -> Tier | None:
        """Return the nearest tier that has a block, whether it can be asked now or not."""
        return next((tier for tier, view in self._nearest_first if name in view), None)

    def others(self, name: SequenceHash, own: Namespaces) -> Tier | None:
        """Return the nearest tier that has a block in none of these namespaces."""
        return next((tier for tier, v in self._nearest_first if v.is_others(name, own)), None)

    def instances(self) -> list[tuple[Tier, str]]:
        """Return every instance below that has joined, the nearest first."""
        return [(tier, one) for tier, view in self.views.items() for one in view.instances]

    def missing(self, names: Iterable[SequenceHash]) -> list[SequenceHash]:
        """Return those names that some present tier does not have; all if no tier is present."""
        views = [view for view in self.views.values() if view.is_followed]
        if len(views) == 1:
            return views[0].missing(names)
        return [name for name in names if not views or any(name not in view for view in views)]

    def usable(self, name: SequenceHash, now_ms: int, own: Namespaces = ANY) -> bool:
        """Return whether some tier can be asked for this block now, for these namespaces."""
        return self.source(name, now_ms, own) is not None

    def has_none_of(self, names: Sequence[SequenceHash]) -> bool:
        """Return whether no lower tier has any of these blocks."""
        return all(not view or view.has_none_of(names) for view in self.views.values())

    def source(
        self, name: SequenceHash, now_ms: int, own: Namespaces = ANY
    ) -> tuple[Tier, str] | None:
        """Return the tier and the instance to ask for a block now; None: no tier can be asked."""
        for tier, view in self._nearest_first:
            instance = view.source(name, now_ms, own)
            if instance is not None:
                return tier, instance
        return None

    def block_bytes(self, name: SequenceHash, own: Namespaces = ANY) -> int:
        """Return the size of a block in the nearest tier that has it for these namespaces.

        0: it is not known.
        """
        views = (v for v in self.views.values() if name in v and not v.is_others(name, own))
        return next((view.block_bytes(name) for view in views), 0)

    def events_lost(self, now_ms: int) -> list[AskLowerTierSnapshot]:
        """Ask every instance for a snapshot: events may be lost, and leave no gap."""
        return [asked for view in self.views.values() for asked in view.events_lost(now_ms)]

    def tick(self, now_ms: int) -> list[AskLowerTierSnapshot]:
        """Do the next part of the work, and return the questions that are due again."""
        return [question for view in self.views.values() for question in view.tick(now_ms)]

    def check(self) -> None:
        """Assert every invariant, in O(instances)."""
        for view in self.views.values():
            view.check()


def tier_of(source: str) -> tuple[Tier, str] | None:
    """Return the lower tier that a source is an instance of: ("disk", "0").

    None: it is an instance of no lower tier.
    """
    for tier in LOWER:
        instance = source.removeprefix(f"{tier}-tier-")
        if instance and instance != source:
            return tier, instance
    return None
