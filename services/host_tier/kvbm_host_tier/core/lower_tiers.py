"""The lower tiers: what the disk tiers and object tiers of this host have, the nearest first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Tier

from kvbm_host_tier.core.lower_tier_view import LowerTierView

LOWER: tuple[Tier, ...] = ("disk", "object")
"""A block that several have comes from the first of them."""


class LowerTiers:
    """One view per medium."""

    def __init__(self) -> None:
        self.views: Mapping[Tier, LowerTierView] = {tier: LowerTierView(tier) for tier in LOWER}
        self._nearest_first = list(self.views.items())

    def __contains__(self, name: SequenceHash) -> bool:
        return any(name in view for view in self.views.values())

    def medium_of(self, name: SequenceHash) -> Tier | None:
        """Return the nearest tier that has a block, whether it can be asked now or not."""
        return next((tier for tier, view in self._nearest_first if name in view), None)

    def instances(self) -> list[tuple[Tier, str]]:
        """Return every instance below that has joined, the nearest first."""
        return [(tier, one) for tier, view in self.views.items() for one in view.instances]

    def missing(self, names: Iterable[SequenceHash]) -> list[SequenceHash]:
        """Return those names that some present tier does not have; all if no tier is present."""
        views = [view for view in self.views.values() if view.is_followed]
        if len(views) == 1:
            return views[0].missing(names)
        return [name for name in names if not views or any(name not in view for view in views)]

    def usable(self, name: SequenceHash, now_ms: int) -> bool:
        """Return whether it is worth while to ask for this block now."""
        return self.source(name, now_ms) is not None

    def source(self, name: SequenceHash, now_ms: int) -> tuple[Tier, str] | None:
        """Return the tier and the instance to ask for a block now; None: it is not worth while."""
        for tier, view in self._nearest_first:
            instance = view.source(name, now_ms)
            if instance is not None:
                return tier, instance
        return None

    def check(self) -> None:
        """Assert every invariant, in O(instances)."""
        for view in self.views.values():
            view.check()


def tier_of(source: str) -> tuple[Tier, str] | None:
    """Return the lower tier that a source is an instance of: ("disk", "0").

    None: it is an instance of no lower tier.
    """
    for tier in LOWER:
        if source.startswith(f"{tier}-tier-"):
            return tier, source.removeprefix(f"{tier}-tier-")
    return None
