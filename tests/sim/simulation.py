"""One run: hosts with everything on them, faults for a while, then calm; and the final checks."""

from __future__ import annotations

import logging
from typing import Any

from tests.sim.ages import age_bus
from tests.sim.bucket import Bucket
from tests.sim.bus import Bus
from tests.sim.cluster import Cluster, Host
from tests.sim.consolidator import Consolidator
from tests.sim.disk_tier import DiskTier
from tests.sim.engine import PlainEngine
from tests.sim.engine_node import EngineNode
from tests.sim.faults import Faults, undrain
from tests.sim.host_tier import HostTier
from tests.sim.index import Index
from tests.sim.object_tier import ObjectTier
from tests.sim.rest import check_rest
from tests.sim.vllm_engine import VllmEngine
from tests.sim.world import CHECK_EVERY, World

FAULTS_MS = 12_000
SETTLE_MS = 2_000
"""After the faults requests go on for so long."""
CALM_MS = 25_000
"""Then everything comes to rest: the longest deadlines are the grace of a fill that was never
answered (2 s and 10 s), and the pause of the consolidator's probes (16 s)."""
REVIVE_EVERY_MS = 200
FORGIVE_MS = 10_000
"""By then blocks whose fills have failed before the calm are asked for again."""
REST_MS = 2_000
"""When no request has come for so long, processes look at the clock less often: nothing but
deadlines is left, and these are seconds long."""
REST_PACE = 5.0
REQUEST_EVERY_MS = 120.0
SETTLE_REQUEST_EVERY_MS = 300.0
"""Of an engine, after the faults: without them it answers much sooner."""
REQUESTS_MAX = 8
"""Of one engine at a time."""


class Simulation:
    """The world of one seed, ready to run; fields of its plan may be given."""

    def __init__(
        self, seed: int, *, traced: bool = False, check_every: int = CHECK_EVERY, **plan: Any
    ) -> None:
        for name in ("kvbm_connectors.client.link", "kvbm_connectors.vllm.scheduler_side"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.world = world = World(seed, traced=traced, check_every=check_every, **plan)
        self.bus, self.cluster = Bus(world), Cluster()
        self.requests_end_ms: float = FAULTS_MS + SETTLE_MS
        self.is_quiet = False
        """Users ask for nothing now."""
        self.cluster.bucket = Bucket(world)
        age_bus(self.bus, world)
        engine_count = 0
        for number, engines in enumerate(world.plan.engines):
            name = "hg"[number]
            host = Host(name, self.cluster.endpoint(world, f"{name}/front"))
            self.cluster.hosts[name] = host
            self._furnish(host)
            for place in range(engines):
                kind = VllmEngine if world.plan.vllm and not place else PlainEngine
                kind(world, self.cluster, host, f"sim-{engine_count}")
                engine_count += 1

    def _furnish(self, host: Host) -> None:
        """Put the services on a host; the index is on the first one."""
        world, plan = self.world, self.world.plan
        for instance in range(plan.host_tiers):
            HostTier(world, self.bus, self.cluster, host, str(instance))
        if plan.has_disk:
            DiskTier(world, self.bus, self.cluster, host)
        if plan.has_objects:
            ObjectTier(world, self.bus, self.cluster, host)
        if len(self.cluster.hosts) == 1:
            Index(world, self.bus, self.cluster, host)
        Consolidator(world, self.bus, self.cluster, host)

    def run(self) -> None:
        """Run everything, in order; raise AssertionError (a `Violation`, or a core's)."""
        world = self.world
        self._revive()
        for engine in self.cluster.engines:
            self._submit(engine)
        Faults(world, self.bus, self.cluster).start()
        self.trouble()
        calm_ms = world.now
        self.requests_end_ms = calm_ms + SETTLE_MS
        world.calm_down()
        self.cluster.bucket.is_up = True
        world.later(SETTLE_MS / 2, lambda: undrain(self.cluster.host_tiers))
        world.run_until(calm_ms + SETTLE_MS + REST_MS)
        world.pace = REST_PACE
        world.run_until(calm_ms + SETTLE_MS + CALM_MS)
        check_rest(self.cluster, world)
        self._ask_at_rest()

    def _ask_at_rest(self) -> None:
        """Have an engine ask for what its host's tiers have, in peace."""
        self.world.run_until(self.world.now + FORGIVE_MS)
        self.world.is_resting = True
        for tier in self.cluster.host_tiers:
            tier.lookups.forget()
        engines = [one for one in self.cluster.engines if isinstance(one, PlainEngine)]
        if engines:
            self.world.rng.choice(engines).ask_again()
        self.world.run_until(self.world.now + REST_MS)
        for tier in self.cluster.host_tiers:
            tier.lookups.check_idle()

    def trouble(self) -> None:
        """Let time go by with faults."""
        self.world.run_until(FAULTS_MS)

    def _revive(self) -> None:
        """Start now and then what is down. Services wait for NATS."""
        world = self.world
        for node in world.nodes.values():
            can_start = world.bus_up or isinstance(node, EngineNode)
            if not node.up and can_start and (world.calm or world.rng.random() < 0.2):
                node.start()
        world.later(REVIVE_EVERY_MS, self._revive)

    def _submit(self, engine: EngineNode) -> None:
        """Be the users of an engine, and its own troubles."""
        world = self.world

        def again() -> None:
            if world.now >= self.requests_end_ms:
                return
            if not self.is_quiet and engine.up and engine.request_count < REQUESTS_MAX:
                engine.submit()
            if engine.up and not world.calm:
                engine.disturb()
            every_ms = SETTLE_REQUEST_EVERY_MS if world.calm else REQUEST_EVERY_MS
            world.later(world.rng.expovariate(1 / every_ms), again)

        world.later(1_000, again)
