"""What must hold when everything has come to rest: nothing leaks, and all views are the same."""

from __future__ import annotations

from kvbm_common.identity import SequenceHash, hash_from_hex
from kvbm_connectors.consolidator.router_stream import short_hash

from tests.sim.disk_tier import DiskTier
from tests.sim.engine import EngineNode
from tests.sim.host_tier import HostTier
from tests.sim.invariants import check_contents, require
from tests.sim.peers import Peers

ALL_BATCHES = 1_000
"""An engine whose replay buffer holds more has everything that it has ever published."""


def check_rest(peers: Peers) -> None:
    """Check every process against itself and against the others; raises `Violation`."""
    for engine in peers.engines.values():
        _check_engine(engine, peers)
    _check_host_tier(peers.host_tier)
    _check_disk_tier(peers.disk_tier)
    for source in (peers.host_tier.name, peers.disk_tier.name, *peers.engines):
        _check_index(source, peers)


def _check_engine(engine: EngineNode, peers: Peers) -> None:
    engine.core.check()
    engine.pool.check()
    left = [request.name for request in engine.requests()]
    require(not left, f"{engine.name} has not finished {left}")
    require(engine.core.idle(), f"{engine.name}: lookups or offers left")
    require(not engine.offered, f"{engine.name}: blocks of {engine.offered} are still held")
    held = engine.pool.block_count - engine.pool.free_count
    require(held == 0, f"{engine.name}: {held} blocks are still held")
    require(engine.core.epoch == peers.host_tier.epoch, f"{engine.name} is not attached")
    _check_consolidator(engine, peers)
    _check_consolidated(engine, peers)


def _check_consolidator(engine: EngineNode, peers: Peers) -> None:
    """Batches that nobody can replay are lost, and only those."""
    core = peers.consolidator.core
    held = {name for _, _, name in core.held(engine.name)}
    names = set(engine.pool.names())
    gave_up = core.statistics().drops.get("replay_failed", 0)
    complete = engine.world.plan.replay_batches > ALL_BATCHES and not gave_up
    require(held <= names, f"{engine.name}: consolidator has {len(held - names)} blocks too many")
    missing = len(names - held)
    require(not (complete and missing), f"{engine.name}: consolidator misses {missing} blocks")


def _check_consolidated(engine: EngineNode, peers: Peers) -> None:
    """It is told of what its device has, and of what lies in the host's tiers."""
    node = peers.consolidator
    shared = set[SequenceHash]()
    for tier in (peers.host_tier, peers.disk_tier):
        truth = tier.snapshot(tier.name)
        assert truth is not None, f"{tier.name} has no snapshot"
        shared |= {
            hash_from_hex(t) for part in truth.parts for run in part.runs for t in run.hashes
        }
    # Ranks of the simulation are those of one model, not of several: there is one stream.
    wanted = shared | {name for _, _, name in node.core.held(engine.name)}
    said = node.readers[engine.name].blocks()
    differing = sorted(name.hex() for name in said ^ wanted)
    require(not differing, f"{engine.name}: consolidated differs by {differing}")
    router = node.routers.get((engine.name, 0))
    told = {block for _, block in router.held} if router is not None else set()
    stray = told - {short_hash(name) for name in said}
    require(not stray, f"{engine.name}: routers are told {len(stray)} too many")


def _check_host_tier(node: HostTier) -> None:
    core, tier = node.core, node.core.tier
    core.check()
    counts, unsettled = tier.table.counts(), core.offload.unsettled_count
    require(len(tier.leases) == 0, f"leases left: {tier.leases.all()}")
    require(counts["active"] == 0, f"pinned slots left: {counts}")
    require(counts["staged"] == unsettled, f"staged slots left: {counts}, {unsettled} unsettled")
    require(len(core.offload) == 0, "offers left")
    require(len(core.onboard) == 0, "lookups left")
    check_contents(node.contents(), "arena")


def _check_disk_tier(node: DiskTier) -> None:
    core = node.core
    core.check()
    counts = core.table.counts()
    require(core.idle(), "the disk tier is not idle")
    require(counts["active"] == 0, f"pinned slots left on disk: {counts}")
    require(counts["staged"] == 0, f"staged slots left on disk: {counts}")
    check_contents(node.contents(), "file")


def _check_index(source: str, peers: Peers) -> None:
    truth = peers.source(source).snapshot(source)
    assert truth is not None, f"{source} has no snapshot"
    held = {text for part in truth.parts for run in part.runs for text in run.hashes}
    core = peers.index.core
    known = {text for dump in core.dump(source) for text in dump.hashes}
    position = {key.source: at for key, at in core.positions().items()}.get(source)
    at = (truth.epoch, truth.seq)
    require(position == at, f"index is at {position} of {source}, which is at {at}")
    require(known == held, f"index differs from {source} by {sorted(known ^ held)}")
