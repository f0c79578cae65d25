"""All processes of the simulated host. They reach each other by the bus, sockets and NIXL only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.consolidator import Consolidator
    from tests.sim.disk_tier import DiskTier
    from tests.sim.engine import EngineNode
    from tests.sim.host_tier import HostTier
    from tests.sim.index import Index
    from tests.sim.service import Service


@dataclass(slots=True)
class Peers:
    """One of each service, and engines by name. Each node enters itself."""

    host_tier: HostTier = field(init=False)
    disk_tier: DiskTier = field(init=False)
    index: Index = field(init=False)
    consolidator: Consolidator = field(init=False)
    engines: dict[str, EngineNode] = field(default_factory=dict)

    def source(self, name: str) -> Service:
        """The process that speaks for a source of events."""
        tiers: dict[str, Service] = {
            self.host_tier.name: self.host_tier,
            self.disk_tier.name: self.disk_tier,
        }
        return tiers.get(name, self.consolidator)
