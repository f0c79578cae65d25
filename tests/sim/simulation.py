"""One run: a host with everything on it, faults for a while, then calm; and the final checks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tests.sim import invariants
from tests.sim.engine import EngineNode
from tests.sim.invariants import require
from tests.sim.nodes import Consolidator, DiskTier, HostTier, Index, snapshot_of
from tests.sim.world import Bus, Memory, Node, World

FAULTS_MS = 12_000
SETTLE_MS = 5_000
"""After the faults requests go on for so long."""
CALM_MS = 25_000
"""Then everything comes to rest: the longest deadlines are the grace of a fill that was never
answered (2 s and 10 s), and the pause of the consolidator's probes (16 s)."""
REQUEST_EVERY_MS = 120.0


@dataclass(slots=True)
class Simulation:
    """The world of one seed, ready to run."""

    world: World
    bus: Bus
    host: HostTier
    disk: DiskTier
    index: Index
    consolidator: Consolidator
    engines: list[EngineNode]

    def run(self) -> None:
        """Everything, in order; raises AssertionError (an `invariants.Violation`, or a core's)."""
        world = self.world
        self._revive()
        for engine in self.engines:
            self._submit(engine, until_ms=FAULTS_MS + SETTLE_MS)
        if world.plan.faults:
            self._strike()
        world.run_until(FAULTS_MS)
        self._calm_down()
        world.run_until(FAULTS_MS + SETTLE_MS)
        world.run_until(FAULTS_MS + SETTLE_MS + CALM_MS)
        self.check_rest()

    # --- the load and the faults ------------------------------------------------------------

    def _submit(self, engine: EngineNode, *, until_ms: float) -> None:
        world = self.world

        def again() -> None:
            if world.now >= until_ms:
                return
            if engine.up and len(engine.requests()) < 8:
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

    def _strike(self) -> None:
        world = self.world

        def again() -> None:
            if not world.calm:
                self._fault(world.rng.choice(world.plan.faults))
                world.later(world.rng.expovariate(1 / world.plan.fault_every_ms), again)

        world.later(2_000, again)

    def _fault(self, fault: str) -> None:
        world, rng = self.world, self.world.rng
        world.note(f"fault: {fault}")
        world.marks[f"fault: {fault}"] += 1
        match fault.split():
            case ["kill", "engine"]:
                self._kill(rng.choice(self.engines))
            case ["kill", what]:
                self._kill(getattr(self, what))
            case ["stop", what]:
                node = getattr(self, what)
                if node.up:
                    node.stop()
            case ["power"]:
                for node in world.nodes.values():
                    self._kill(node)
                self.disk.store.power_cut()
            case ["outage"]:
                self.bus.outage(rng.choice((100.0, 1_000.0, 6_000.0)), stream_lost=False)
            case ["stream", "lost"]:
                self.bus.outage(rng.uniform(100, 2_000), stream_lost=True)
            case ["cut"]:
                self._cut()
            case ["rot", "disk"]:
                self._rot(self.disk.store.file)
            case ["rot", "arena"]:
                if self.host.up:
                    self._rot(self.host.arena)

    def _kill(self, node: Node) -> None:
        if node.up:
            node.kill()

    def _revive(self) -> None:
        """Whoever is down is started again, now and then. Services wait for NATS."""
        world = self.world
        for node in world.nodes.values():
            needs_bus = not isinstance(node, EngineNode)
            if not node.up and (world.calm or world.rng.random() < 0.2):
                if self.bus.up or not needs_bus:
                    node.start()
        world.later(200, self._revive)

    def _cut(self) -> None:
        """Messages from one process to another are lost for a while; the other way is free."""
        world = self.world
        engine = world.rng.choice(self.engines).name
        near = [(engine, "host-tier-0"), ("host-tier-0", engine), (engine, "consolidator"),
                ("host-tier-0", "disk-tier-0"), ("disk-tier-0", "host-tier-0"),
                ("index", "host-tier-0"), ("consolidator", "host-tier-0")]  # fmt: skip
        way = world.rng.choice(near)
        world.cut.add(way)
        world.later(world.rng.uniform(200, 8_000), lambda: world.cut.discard(way))

    def _rot(self, memory: Memory) -> None:
        for slot in self.world.rng.sample(range(len(memory.slots)), 4):
            memory.rot(slot)

    def _calm_down(self) -> None:
        self.world.note("calm")
        self.world.calm = True
        self.world.cut.clear()

    # --- the end ----------------------------------------------------------------------------

    def check_rest(self) -> None:
        """No work is left, nothing has leaked, and all views are the same."""
        for engine in self.engines:
            self._check_engine(engine)
        self._check_host()
        self._check_disk()
        for source in (self.host.name, self.disk.name, *(engine.name for engine in self.engines)):
            self._check_index(source)

    def _check_engine(self, engine: EngineNode) -> None:
        engine.core.check()
        engine.pool.check()
        left = [request.name for request in engine.requests()]
        require(not left, f"{engine.name} has not finished {left}")
        require(engine.core.idle() and not engine.offered, f"{engine.name}: lookups or offers left")
        free, total = engine.pool.free_count, engine.pool.block_count
        require(free == total, f"{engine.name}: {total - free} blocks are still held")
        require(engine.core.epoch == self.host.epoch, f"{engine.name} is not attached")
        held = {name for _, _, name in self.consolidator.core.held(engine.name)}
        names = set(engine.pool.names())
        gave_up = self.consolidator.core.statistics().drops.get("replay_failed", 0)
        complete = self.world.plan.replay_batches > 1_000 and not gave_up
        require(held == names if complete else held <= names,
                f"{engine.name}: consolidator differs by {len(held ^ names)} blocks")  # fmt: skip

    def _check_host(self) -> None:
        core, tier = self.host.core, self.host.core.tier
        core.check()
        counts = tier.table.counts()
        unsettled = core.offload.unsettled_count
        require(len(tier.leases) == 0, f"leases left: {tier.leases.all()}")
        require(counts["active"] == 0, f"pinned slots left: {counts}")
        require(counts["staged"] == unsettled, f"staged slots left: {counts}, {unsettled} lost")
        require(len(core.offload) == 0, "offers left")
        require(len(core.onboard) == 0, "lookups left")
        invariants.check_contents(self.host.contents(), "arena")

    def _check_disk(self) -> None:
        core = self.disk.core
        core.check()
        require(core.idle(), "the disk tier is not idle")
        invariants.check_contents(self.disk.contents(), "file")

    def _check_index(self, source: str) -> None:
        truth = snapshot_of(self.world, source)
        require(truth is not None, f"{source} has no snapshot")
        assert truth is not None
        held = {text for part in truth.parts for run in part.runs for text in run.hashes}
        dumps = self.index.core.dump(source)
        known = {text for dump in dumps for text in dump.hashes}
        places = {key.source: at for key, at in self.index.core.positions().items()}
        position = places.get(source)
        require(position == (truth.epoch, truth.seq),
                f"index is at {position} of {source}, which is at {truth.epoch}/{truth.seq}")  # fmt: skip
        require(known == held, f"index differs from {source} by {sorted(known ^ held)}")


def make(seed: int, *, traced: bool = False, check_every: int = 8) -> Simulation:
    """The simulation of a seed."""
    logging.getLogger("kvbm_connectors.link").setLevel(logging.CRITICAL)
    world = World(seed, traced=traced, check_every=check_every)
    bus = Bus(world)
    host, disk = HostTier(world, bus), DiskTier(world, bus)
    index, consolidator = Index(world, bus, "index"), Consolidator(world, bus, "consolidator")
    engines = [EngineNode(world, f"sim-{n}", host.arenas) for n in range(world.plan.engines)]
    return Simulation(world, bus, host, disk, index, consolidator, engines)
