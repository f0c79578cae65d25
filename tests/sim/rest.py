"""What must hold when everything has come to rest: nothing leaks, and all views are the same."""

from __future__ import annotations

from collections.abc import Iterable

from kvbm_common.identity import SequenceHash, hash_from_hex
from kvbm_common.wire.events import Removed, Stored
from kvbm_common.wire.index_verbs import DumpRequest
from kvbm_common.wire.verbs import SnapshotReply
from kvbm_connectors.consolidator.core.router_stream import short_hash

from tests.sim.bucket import block_of, name_of
from tests.sim.cluster import Cluster
from tests.sim.engine_node import EngineNode
from tests.sim.host_tier import HostTier
from tests.sim.invariants import check_contents, require
from tests.sim.lower_tier import LowerTier
from tests.sim.object_tier import ObjectTier
from tests.sim.service import Service
from tests.sim.world import World

ALL_BATCHES = 1_000
"""An engine whose replay buffer holds more has everything that it has ever published."""


def check_rest(cluster: Cluster, world: World) -> None:
    """Check every process against itself and against the others; raise `Violation`."""
    for node in world.nodes.values():
        node.check()
    for engine in cluster.engines:
        _check_engine(engine, world)
    for host in cluster.hosts.values():
        for tier in host.host_tiers.values():
            _check_host_tier(tier)
        _check_map(list(host.host_tiers.values()))
        for lower in host.lower:
            _check_lower_tier(lower, arenas=_cut_arenas(host.host_tiers.values()))
            if isinstance(lower, ObjectTier):
                _check_listed(lower)
        for service in host.tiers:
            _check_index(service, service.source, cluster)
        for engine in host.engines.values():
            _check_index(host.consolidator, engine.name_alone, cluster)
    _check_bucket(cluster)


def _check_engine(engine: EngineNode, world: World) -> None:
    engine.check_idle()
    require(engine.core.view.idle, f"{engine.name}: lookups or offers left")
    held = engine.pool.block_count - engine.pool.free_count
    require(held == 0, f"{engine.name}: {held} blocks are still held")
    require(all(not worker.loading for worker in engine.workers), f"{engine.name}: loads left")
    _check_place(engine)
    _check_consolidator(engine, world)
    _check_consolidated(engine)


def _check_place(engine: EngineNode) -> None:
    """All halves are with the host tier that the map names."""
    tiers = engine.host.host_tiers
    owner = tiers["0"].core.view.shard_map.owner(engine.name_alone)
    assert owner is not None, "there is no map"
    epoch = engine.core.view.epoch
    where = next((name for name, tier in tiers.items() if tier.epoch == epoch), None)
    require(where == owner, f"{engine.name} is attached to {where}, not {owner}")
    for worker in engine.workers:
        require(worker.access(epoch).value == "ready", f"{worker.rank} cannot read {epoch}")


def _check_map(tiers: list[HostTier]) -> None:
    """All host tiers of a host go by the same map, and everything of it serves."""
    maps = {tier.core.view.shard_map.version for tier in tiers}
    require(len(maps) == 1, f"host tiers go by maps {maps}")
    named = set(tiers[0].core.view.shard_map.endpoints)
    require(named == {tier.instance for tier in tiers}, f"the map names {named}")


def _check_consolidator(engine: EngineNode, world: World) -> None:
    """Batches that nothing can replay are lost, and only those."""
    core = engine.host.consolidator.core
    snapshot = engine.host.consolidator.snapshot(engine.name_alone)
    _check_groups(engine, snapshot)
    held = _blocks_of(snapshot)
    names = set(engine.pool.names())
    gave_up = core.statistics().drops.get("replay_failed", 0)
    complete = world.plan.replay_batches > ALL_BATCHES and not gave_up
    require(held <= names, f"{engine.name}: consolidator has {len(held - names)} blocks too many")
    missing = sum(map(engine.must_be_known, names - held))
    require(not (complete and missing), f"{engine.name}: consolidator misses {missing} blocks")


def _check_groups(engine: EngineNode, snapshot: SnapshotReply | None) -> None:
    """Every block is said under the namespace and the number of its KV group."""
    groups = {one.digest.hex(): one.group for one in engine.namespaces}
    for part in () if snapshot is None else snapshot.parts:
        told = groups.get(part.namespace)
        require(told == part.group, f"{engine.name}: group {told} is said to be {part.group}")
        names = {hash_from_hex(text) for run in part.runs for text in run.hashes}
        strange = sum(engine.group_of(name) != told for name in names)
        require(not strange, f"{engine.name}: {strange} blocks are said of group {told}")
    for event in engine.host.consolidator.readers[engine.name_alone].events:
        if isinstance(event, Stored | Removed):
            told = groups.get(event.namespace)
            require(told == event.group, f"{engine.name}: an event says {event.group} of {told}")


def _blocks_of(snapshot: SnapshotReply | None, namespace: str = "") -> set[SequenceHash]:
    """Return the blocks of a snapshot, of one namespace if that is given."""
    parts = [] if snapshot is None else snapshot.parts
    runs = [run for part in parts if namespace in ("", part.namespace) for run in part.runs]
    return {hash_from_hex(text) for run in runs for text in run.hashes}


def _check_consolidated(engine: EngineNode) -> None:
    """The stream tells of what the engine's device has, and of what lies in the host's tiers."""
    node, shared = engine.host.consolidator, set[SequenceHash]()
    for tier in engine.host.tiers:
        truth = tier.snapshot(tier.source)
        assert truth is not None, f"{tier.name} has no snapshot"
        for namespace in engine.namespaces:
            shared |= _blocks_of(truth, namespace=namespace.digest.hex())
    # Ranks of the simulation are those of one model, not of several: there is one stream.
    wanted = shared | _blocks_of(node.snapshot(engine.name_alone))
    said = node.readers[engine.name_alone].blocks()
    differing = sorted(name.hex() for name in said ^ wanted)
    require(not differing, f"{engine.name}: consolidated differs by {differing}")
    router = node.routers.get((engine.name_alone, 0))
    told = {block for _, block in router.held} if router is not None else set()
    stray = told - {short_hash(name) for name in said}
    require(not stray, f"{engine.name}: routers are told {len(stray)} too many")


def _check_host_tier(node: HostTier) -> None:
    statistics = node.statistics()
    counts, figures = statistics.slots, statistics.figures
    unsettled = int(figures["slots_unsettled"])
    require(statistics.leases == 0, f"leases left: {statistics.leases}")
    require(counts["active"] == 0, f"pinned slots left: {counts}")
    require(counts["staged"] == unsettled, f"staged slots left: {counts}, {unsettled} unsettled")
    require(figures["offers"] == 0, "offers left")
    require(figures["lookups_waiting"] == 0, "lookups left")
    check_contents(node.contents(), "arena")


def _cut_arenas(tiers: Iterable[HostTier]) -> bool:
    """Tell whether every arena has slots: a host tier that no engine has joined has none."""
    return all(tier.core.view.layout is not None for tier in tiers)


def _check_lower_tier(node: LowerTier, *, arenas: bool) -> None:
    core = node.core
    counts = core.inventory.table.counts()
    # Writes out of an arena that is not cut yet wait until it is.
    busy = len(core.writes.in_flight.by_id) + len(core.reads.in_flight) + core.reads.waiting_count
    require(core.view.idle() or not (arenas or busy), f"{node.name} is not idle")
    require(counts["active"] == 0, f"pinned slots left in {node.name}: {counts}")
    require(counts["staged"] == 0, f"staged slots left in {node.name}: {counts}")
    found = node.contents()
    assert found is not None
    check_contents(found, node.name)


def _check_bucket(cluster: Cluster) -> None:
    """Every object is what its name says, and every object tier has listed what there is."""
    found = {}
    for name, stored in cluster.bucket.objects.items():
        block = block_of(name)
        assert block is not None, name
        found[block.hash] = stored.content
    check_contents(found, "bucket")


def _check_listed(node: ObjectTier) -> None:
    """The table is what the bucket has, as far as there is room for its names."""
    table, bucket = node.core.inventory.table, node.bucket.objects
    known = {name_of(block) for block in table.blocks()}
    gone = known - bucket.keys()
    require(not gone, f"{node.name} names {len(gone)} objects that are gone")
    unknown = bucket.keys() - known - node.deleting
    is_full = len(bucket) > table.slot_count
    require(is_full or not unknown, f"{node.name} does not know {len(unknown)} objects")


def _check_index(service: Service, source: str, cluster: Cluster) -> None:
    truth = service.snapshot(source)
    assert truth is not None, f"{source} has no snapshot"
    held = {text for part in truth.parts for run in part.runs for text in run.hashes}
    core, host = cluster.index.core, service.host.name
    dumps = [dump for dump in core.dump(DumpRequest(source=source)).holders if dump.host == host]
    known = {text for dump in dumps for text in dump.hashes}
    positions = {(key.host, key.source): at for key, at in core.positions().items()}
    position, at = positions.get((host, source)), (truth.epoch, truth.seq)
    require(position == at, f"index is at {position} of {source}, which is at {at}")
    require(known == held, f"index differs from {source} by {sorted(known ^ held)}")
