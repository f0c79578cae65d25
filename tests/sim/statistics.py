"""What seeds have had and met: a feature or an event that never happens proves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from tests.sim.plan import ALL_FAULTS, Plan
from tests.sim.world import World

FEATURES: Mapping[str, Callable[[Plan], bool]] = {
    "two hosts": lambda plan: plan.hosts > 1,
    "two host tiers on one host": lambda plan: plan.host_tiers > 1,
    "a part for each rank": lambda plan: plan.cut.name == "ranks",
    "shapes that differ": lambda plan: plan.cut.name == "mixed",
    "… and verify": lambda plan: plan.cut.name == "mixed" and plan.verified,
    "replicas": lambda plan: plan.cut.name == "replicas",
    "disk tier only": lambda plan: plan.below == "disk",
    "object tier only": lambda plan: plan.below == "object",
    "disk and object tier": lambda plan: plan.below == "both",
    "vLLM's scheduler side": lambda plan: plan.vllm,
    "… with overlapping steps": lambda plan: plan.vllm and plan.overlapped,
    "late takes": lambda plan: plan.dawdles > 0,
    "crossed fills": lambda plan: plan.crossed > 0,
    "listings that lag": lambda plan: plan.has_objects and plan.listing_lag_ms > 0,
    "objects that expire": lambda plan: plan.has_objects and plan.object_ttl_ms > 0,
    "staging arena": lambda plan: plan.staging,
    "hints of agents": lambda plan: plan.hints,
    "copiers with few slots": lambda plan: plan.copied_least < 64,
    "several KV groups": lambda plan: len(plan.groups) > 1,
    "a window alone": lambda plan: len(plan.groups) == 1 and plan.groups[0].window_blocks > 0,
}
"""What a world can have."""


class Statistics(msgspec.Struct):
    """Sums over seeds."""

    seeds: int = 0
    features: dict[str, int] = msgspec.field(default_factory=dict)
    """Feature → seeds that had it."""
    met: dict[str, int] = msgspec.field(default_factory=dict)
    """Event → seeds that met it."""
    events: dict[str, int] = msgspec.field(default_factory=dict)
    """Event → how often it was met."""

    @classmethod
    def of(cls, world: World) -> Statistics:
        """Return what one seed had and met."""
        marks = +world.marks
        features = {name: 1 for name, has in FEATURES.items() if has(world.plan)}
        return cls(1, features, dict.fromkeys(marks, 1), dict(marks))

    def add(self, other: Statistics) -> None:
        """Take in what other seeds had and met."""
        self.seeds += other.seeds
        self.features = dict(Counter(self.features) + Counter(other.features))
        self.met = dict(Counter(self.met) + Counter(other.met))
        self.events = dict(Counter(self.events) + Counter(other.events))

    def lines(self) -> list[str]:
        """Return a table for people; what has never happened is in it, too."""
        names = sorted({*self.events, *(f"fault: {fault}" for fault in ALL_FAULTS)})
        return [
            f"{'feature':44}{'seeds':>8}  of {self.seeds}",
            *(f"{name:44}{self.features.get(name, 0):8}" for name in FEATURES),
            f"{'event':44}{'seeds':>8}{'times':>10}",
            *(f"{name:44}{self.met.get(name, 0):8}{self.events.get(name, 0):10}" for name in names),
        ]
