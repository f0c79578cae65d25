"""What seeds have had and met: a feature or an event that never happens proves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from tests.sim.plan import ALL_FAULTS, Plan
from tests.sim.world import World

FEATURES: Mapping[str, Callable[[Plan], bool]] = {
    "two hosts": lambda plan: plan.hosts > 1,
    "two host tiers on one host": lambda plan: plan.host_tiers > 1,
    "two ranks": lambda plan: plan.ranks > 1,
    "two ranks that verify": lambda plan: plan.ranks > 1 and plan.verified,
    "disk tier only": lambda plan: plan.below == "disk",
    "object tier only": lambda plan: plan.below == "object",
    "disk and object tier": lambda plan: plan.below == "both",
    "vLLM's scheduler side": lambda plan: plan.vllm,
    "… with overlapping steps": lambda plan: plan.vllm and plan.overlaps,
    "… with synchronous loads": lambda plan: plan.vllm and plan.sync_loads,
    "late takes": lambda plan: plan.dawdles > 0,
    "crossed fills": lambda plan: plan.crossed > 0,
    "listings that lag": lambda plan: plan.has_objects and plan.listing_lag_ms > 0,
    "objects that expire": lambda plan: plan.has_objects and plan.object_ttl_ms > 0,
    "staging arena": lambda plan: plan.staging,
}
"""What a world can have."""


class Statistics:
    """Sums over seeds."""

    def __init__(self) -> None:
        self._seeds = 0
        self._features: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._met: Counter[str] = Counter()

    def add(self, world: World) -> None:
        """Count what a seed had and met."""
        self._seeds += 1
        self._features.update(name for name, has in FEATURES.items() if has(world.plan))
        marks = +world.marks
        self._events.update(marks)
        self._met.update(marks.keys())

    def lines(self) -> list[str]:
        """Return a table for people; what has never happened is in it, too."""
        names = sorted({*self._events, *(f"fault: {fault}" for fault in ALL_FAULTS)})
        return [
            f"{'feature':44}{'seeds':>8}  of {self._seeds}",
            *(f"{name:44}{self._features[name]:8}" for name in FEATURES),
            f"{'event':44}{'seeds':>8}{'times':>10}",
            *(f"{name:44}{self._met[name]:8}{self._events[name]:10}" for name in names),
        ]
