"""One run: a host with everything on it, faults for a while, then calm; and the final checks."""

from __future__ import annotations

import logging
from typing import Any

from tests.sim.bus import Bus
from tests.sim.consolidator import Consolidator
from tests.sim.disk_tier import DiskTier
from tests.sim.engine import EngineNode
from tests.sim.faults import Faults
from tests.sim.host_tier import HostTier
from tests.sim.index import Index
from tests.sim.peers import Peers
from tests.sim.rest import check_rest
from tests.sim.world import World

FAULTS_MS = 12_000
SETTLE_MS = 5_000
"""After the faults requests go on for so long."""
CALM_MS = 25_000
"""Then everything comes to rest: the longest deadlines are the grace of a fill that was never
answered (2 s and 10 s), and the pause of the consolidator's probes (16 s)."""
REVIVE_EVERY_MS = 200
REQUEST_EVERY_MS = 120.0
REQUESTS_MAX = 8
"""Of one engine at a time."""


class Simulation:
    """The world of one seed, ready to run; fields of its plan may be given."""

    def __init__(
        self, seed: int, *, traced: bool = False, check_every: int = 8, **plan: Any
    ) -> None:
        logging.getLogger("kvbm_connectors.link").setLevel(logging.CRITICAL)
        self.world = world = World(seed, traced=traced, check_every=check_every, **plan)
        self.bus, self.peers = Bus(world), Peers()
        HostTier(world, self.bus, self.peers)
        DiskTier(world, self.bus, self.peers)
        Index(world, self.bus, self.peers)
        Consolidator(world, self.bus, self.peers)
        for number in range(world.plan.engines):
            EngineNode(world, self.peers, f"sim-{number}")

    def run(self) -> None:
        """Everything, in order; raises AssertionError (an `invariants.Violation`, or a core's)."""
        world = self.world
        self._revive()
        for engine in self.peers.engines.values():
            self._submit(engine)
        Faults(world, self.bus, self.peers).start()
        world.run_until(FAULTS_MS)
        world.calm_down()
        world.run_until(FAULTS_MS + SETTLE_MS + CALM_MS)
        check_rest(self.peers)

    def _revive(self) -> None:
        """Whoever is down is started again, now and then. Services wait for NATS."""
        world = self.world
        for node in world.nodes.values():
            can_start = world.bus_up or isinstance(node, EngineNode)
            if not node.up and can_start and (world.calm or world.rng.random() < 0.2):
                node.start()
        world.later(REVIVE_EVERY_MS, self._revive)

    def _submit(self, engine: EngineNode) -> None:
        """The users of an engine, and its own troubles."""
        world = self.world

        def again() -> None:
            if world.now >= FAULTS_MS + SETTLE_MS:
                return
            if engine.up and len(engine.requests()) < REQUESTS_MAX:
                engine.submit()
            if engine.up and not world.calm:
                self._disturb(engine)
            world.later(world.rng.expovariate(1 / REQUEST_EVERY_MS), again)

        world.later(1_000, again)

    def _disturb(self, engine: EngineNode) -> None:
        rng = self.world.rng
        if engine.offered and rng.random() < 0.05:
            engine.revoke(rng.choice(list(engine.offered)))
        if engine.computing and rng.random() < 0.05:
            engine.preempt(rng.choice(engine.computing))
        requests = [request for request in engine.requests() if not request.aborted]
        if requests and rng.random() < 0.05:
            engine.abort(rng.choice(requests))
