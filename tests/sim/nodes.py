"""The services of the simulation: each real core, with effects carried out in the world.

What the shells do (deadlines, which failure is settled, when the arena is mapped) is repeated here
in a few lines each; everything that decides is the product's own code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, assert_never, cast

from kvbm_common.identity import SequenceHash, hash_to_hex, unpack_hashes
from kvbm_common.wire.engine_events import EngineBatch
from kvbm_common.wire.events import Event, Stored
from kvbm_common.wire.local import (
    Attach,
    Beat,
    Detach,
    Offered,
    from_consolidator,
    from_host_tier,
    to_consolidator,
    to_host_tier,
)
from kvbm_common.wire.verbs import (
    ErrorBody,
    FillReply,
    LeaseReply,
    Offer,
    OfferRun,
    ReleaseReply,
    ReleaseRequest,
    SnapshotReply,
)
from kvbm_connectors.consolidator import messages as con
from kvbm_connectors.consolidator.core import ConsolidatorCore
from kvbm_disk_tier import messages as disk
from kvbm_disk_tier.core import DiskTierCore
from kvbm_disk_tier.core import Limits as DiskLimits
from kvbm_disk_tier.frequency_filter import FrequencyFilter
from kvbm_disk_tier.journal import RECORD_BYTES, Record, Replay, encode_records, replay
from kvbm_host_tier import messages as host
from kvbm_host_tier.core import HostTierCore
from kvbm_host_tier.tier import ArenaInfo
from kvbm_host_tier.tier import Limits as HostLimits
from kvbm_index import messages as index
from kvbm_index.core import IndexCore

from tests.sim import invariants
from tests.sim.engine import EngineNode
from tests.sim.world import Bus, Done, Failure, Memory, Node, World, copy

HOST, HOST_TIER, DISK_TIER = "h", "host-tier-0", "disk-tier-0"
SLOT_BYTES = 4096
FILL_MARGIN_MS = 500
VERB_MS = 2_000
SNAPSHOT_MS = 5_000


class Service(Node):
    """A process on the bus."""

    def __init__(self, world: World, bus: Bus, name: str) -> None:
        super().__init__(world, name)
        self.bus = bus
        self.epoch = 0
        self.announced = invariants.Announced()

    def begin(self) -> None:
        """Enter the registry under our own name."""
        self.epoch = self.bus.registry.register(self.name, self)
        self.publisher = self.bus.publisher(self)

    def died(self) -> None:
        """Events that NATS has not got are lost."""
        self.publisher.died()

    def heard(self, event: object) -> None:
        """Write an input down."""
        if self.world.traced:
            self.world.note(f"{self.name} < {event}")

    def publish(self, event: Event) -> None:
        """Announce, under the eyes of the checkers."""
        if self.world.traced:
            self.world.note(f"{self.name} > {event}")
        self.announced.take(event)
        if isinstance(event, Stored):
            invariants.check_stored(event, self.contents())
        self.publisher.publish(event)

    def contents(self) -> Mapping[SequenceHash, bytes] | None:
        """What is truly in the place of each committed block; None: nobody can say."""
        return None


class HostTier(Service):
    """G2. Its arena dies with it."""

    core: HostTierCore
    arena: Memory

    def __init__(self, world: World, bus: Bus) -> None:
        super().__init__(world, bus, HOST_TIER)
        self.arenas: dict[int, Memory] = {}
        """By epoch: a mapping outlives the process that made it."""

    def boot(self) -> None:
        self.begin()
        plan = self.world.plan
        self.arena = self.arenas[self.epoch] = Memory(self.world, plan.host_slots)
        self.core = HostTierCore(
            host=HOST,
            instance="0",
            epoch=self.epoch,
            arena=ArenaInfo("arena", 4096, plan.host_slots * SLOT_BYTES, b"agent"),
            limits=HostLimits(batch_blocks_max=4, transfers_max=2),
            staging=plan.staging,
        )
        self._verbs: dict[int, Done] = {}
        self._carry_out(self.core.start())
        self.bus.registry.watch(self, self._registry)
        is_disk = DISK_TIER.__eq__
        self.bus.follow(self, lambda event: is_disk(event.source), self._disk_events, new=True)
        self.every(100, lambda: self.step(host.Tick()))

    def stop(self) -> None:
        """End in order: it works on while it says good-bye."""
        self._carry_out(self.core.stop())
        self.later(self.world.rng.uniform(0, 1_000), self._leave)

    def _leave(self) -> None:
        self.bus.registry.leave(self.name, self.epoch)
        self.kill()

    def step(self, event: host.Input) -> None:
        """One input."""
        self.heard(event)
        self._carry_out(self.core.step(event, self.world.now_ms))
        if self.due_check():
            self.core.check()

    def contents(self) -> Mapping[SequenceHash, bytes]:
        return invariants.contents(self.core.tier.table, self.arena)

    def from_engine(self, connection: bytes, data: bytes) -> None:
        """A frame on the ROUTER."""
        self.step(host.FromEngine(connection, to_host_tier.decode(data)))

    def _registry(self, source: str, _epoch: int, there: bool) -> None:
        if source == DISK_TIER:
            self.step(host.DiskSeen("0") if there else host.DiskLost("0"))

    def _disk_events(self, events: list[Event]) -> None:
        for event in events:
            self.step(host.DiskEvent("0", event))

    def ask(self, request: host.LeaseAsked | host.ReleaseAsked, done: Done) -> None:
        """A verb."""
        self._verbs[request.reply_to] = done
        self.step(request)

    # --- effects ----------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[host.Effect]) -> None:
        for effect in effects:
            match effect:
                case host.ToEngine(connection, message):
                    self._to_engine(connection, message)
                case host.AttachPeer(engine, rank):
                    # NIXL's name of an agent says which life of which engine it is.
                    done = host.PeerAttached(engine, rank, str(engine))
                    self.later(self.world.delay(2), lambda done=done: self.step(done))  # type: ignore[misc]
                case host.DetachPeer():
                    pass
                case host.StartPull():
                    self._pull(effect)
                case host.AskFill():
                    self._fill(effect)
                case host.AskDiskSnapshot():
                    self._disk_snapshot()
                case host.Answer(reply_to, reply):
                    self._verbs.pop(reply_to)(reply)
                case host.Publish(event):
                    self.publish(event)
                case host.TellHits(hits):
                    disk_tier = self.world.nodes[DISK_TIER]
                    told = disk.HitsTold("", hits)
                    self.bus.publish(
                        self, [disk_tier], lambda node: cast(DiskTier, node).step(told)
                    )  # noqa: B023 E501
                case _:
                    assert_never(effect)

    def _to_engine(self, connection: bytes, message: Any) -> None:
        engine = self.world.nodes[connection.decode().split(":")[0]]
        assert isinstance(engine, EngineNode)
        data = from_host_tier.encode(message)
        if engine.up:
            self.world.send(self.name, engine, lambda: engine.receive(connection, data))

    def _pull(self, effect: host.StartPull) -> None:
        """NIXL READ from an engine's device; fails when that engine's life is over."""
        engine = self.world.nodes[effect.parts[0].peer.split(":")[0]]
        assert isinstance(engine, EngineNode)
        if not engine.up or engine.incarnation != effect.parts[0].peer.split(":")[1]:
            failed = host.PullFailed(effect.pull, "peer_lost", settled=True)
            self.later(1, lambda: self.step(failed))
            return
        duration_ms = self.world.transfer_ms()
        device = engine.device
        copy(self, (device, effect.blocks), (self.arena, effect.slots), duration_ms)
        if duration_ms > effect.deadline_ms:
            # NIXL gives up, and the late bytes arrive all the same.
            failed = host.PullFailed(effect.pull, "transfer_timeout", settled=False)
            self.later(effect.deadline_ms, lambda: self.step(failed))
            self.world.marks["pull unsettled"] += 1
            if self.world.rng.random() < 0.8:
                self.later(duration_ms + 1, lambda: self.step(host.PullSettled(effect.pull)))
            return
        self.later(duration_ms, lambda: self._pulled(effect))

    def _pulled(self, effect: host.StartPull) -> None:
        sums = tuple(self.arena.checksum(slot) for slot in effect.slots)
        self.step(host.PullDone(effect.pull, sums))

    def _fill(self, effect: host.AskFill) -> None:
        disk_tier = cast(DiskTier, self.world.nodes[DISK_TIER])

        def done(reply: object) -> None:
            if isinstance(reply, FillReply):
                self.step(host.FillDone(effect.fill, reply))
                return
            assert isinstance(reply, ErrorBody | Failure)
            settled = reply.code not in ("deadline_exceeded", "bus_unavailable")
            self.world.marks["fill failed" if settled else "slots lent"] += 1
            self.step(host.FillFailed(effect.fill, reply.code, settled=settled))

        limit_ms = max(10, effect.request.until_ms - self.world.now_ms + FILL_MARGIN_MS)
        self.bus.request(
            self, disk_tier, lambda reply: disk_tier.fill(effect.request, reply), done, limit_ms
        )  # noqa: E501

    def _disk_snapshot(self) -> None:
        disk_tier = cast(DiskTier, self.world.nodes[DISK_TIER])

        def done(reply: object) -> None:
            good = reply if isinstance(reply, SnapshotReply) else None
            self.step(host.DiskSnapshot("0", good))

        self.bus.request(
            self, disk_tier, lambda reply: reply(disk_tier.core.snapshot()), done, SNAPSHOT_MS
        )  # noqa: E501


class Store:
    """The disk tier's directory: what is in the files, and what of it would survive a power cut."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.slot_bytes = 0
        self.file = Memory(world, world.plan.disk_slots)
        self.journal = bytearray()
        self.durable = 0
        """Bytes of the journal that are synchronised."""
        self.dirty: set[int] = set()
        self.journaled: set[SequenceHash] = set()

    def recover(self) -> disk.StoreOpened | None:
        """Open what a former life has left."""
        if not self.slot_bytes:
            return None
        del self.journal[len(self.journal) - len(self.journal) % RECORD_BYTES :]
        return self._opened(
            replay(bytes(self.journal), slot_count=len(self.file.slots), slot_bytes=self.slot_bytes)
        )  # noqa: E501

    def create(self, slot_bytes: int) -> disk.StoreOpened:
        """Make it anew."""
        self.slot_bytes, self.durable = slot_bytes, 0
        self.journal.clear()
        return self._opened(Replay(blocks={}, next_order=1, records=0, damaged=0))

    def _opened(self, found: Replay) -> disk.StoreOpened:
        return disk.StoreOpened(len(self.file.slots), self.slot_bytes, found)

    def append(self, records: tuple[Record, ...], *, commit: bool) -> None:
        """Write records; with `commit` data and journal are durable afterwards."""
        self.journal += encode_records(records)
        if commit:
            self.journaled.update(record.block.hash for record in records)
            self.durable = len(self.journal)
            self.dirty.clear()

    def power_cut(self) -> None:
        """What was not synchronised may be gone, whole or in part."""
        rng = self.world.rng
        del self.journal[rng.randint(self.durable, len(self.journal)) :]
        for slot in sorted(self.dirty):
            if rng.random() < 0.5:
                self.file.slots[slot] = self.file.garbage()
        self.dirty.clear()


class DiskTier(Service):
    """G3. Its store outlives it."""

    core: DiskTierCore
    compares = True
    """The mover compares checksums; a meta-test turns that off."""

    def __init__(self, world: World, bus: Bus) -> None:
        super().__init__(world, bus, DISK_TIER)
        self.store = Store(world)

    def boot(self) -> None:
        self.begin()
        self.core = DiskTierCore(
            host=HOST,
            instance="0",
            epoch=self.epoch,
            frequency_filter=FrequencyFilter(enabled=self.world.plan.filtered),
            limits=DiskLimits(batch_blocks_max=4, writes_max=2, reads_max=3),
        )
        self._arena: Memory | None = None
        self._recovered: set[SequenceHash] = set()
        self._verbs: dict[int, Done] = {}
        self._asked = 0
        self._store_free_at = 0.0
        self._carry_out(self.core.start())
        recovered = self.store.recover()
        if recovered is not None:
            self.world.marks["blocks recovered"] += len(recovered.replay.blocks)
            self.world.marks["records damaged"] += recovered.replay.damaged
            self._recovered = {block.hash for block in recovered.replay.blocks.values()}
            self.step(recovered)
        self.bus.registry.watch(self, self._registry)
        is_host = HOST_TIER.__eq__
        self.bus.follow(self, lambda event: is_host(event.source), self._host_events, new=True)
        self.every(1_000, lambda: self.step(disk.Tick()))

    def stop(self) -> None:
        """End in order: reads and writes fly on while it says good-bye."""
        self._carry_out(self.core.stop())
        self.later(self.world.rng.uniform(0, 1_000), self._leave)

    def _leave(self) -> None:
        self.bus.registry.leave(self.name, self.epoch)
        self.kill()

    def step(self, event: disk.Input) -> None:
        """One input."""
        self.heard(event)
        self._carry_out(self.core.step(event, self.world.now_ms))
        if self.due_check():
            self.core.check()

    def _registry(self, source: str, _epoch: int, there: bool) -> None:
        if source == HOST_TIER:
            self.step(disk.HostSeen("0") if there else disk.HostLost("0"))

    def _host_events(self, events: list[Event]) -> None:
        for event in events:
            self.step(disk.HostEvent("0", event))

    def contents(self) -> Mapping[SequenceHash, bytes]:
        """Trusting what the journal has said: after a crash only a read can tell."""
        found = invariants.contents(self.core.table, self.store.file)
        invariants.require(found.keys() <= self.store.journaled, "committed before it was durable")
        return found | {name: name for name in self._recovered & found.keys()}

    def fill(self, request: Any, done: Done) -> None:
        """The verb."""
        self._asked += 1
        self._verbs[self._asked] = done
        self.step(disk.FillAsked(self._asked, request))

    # --- effects ----------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[disk.Effect]) -> None:
        for effect in effects:
            match effect:
                case disk.OpenStore(slot_bytes):
                    self._in_store(lambda s=slot_bytes: self.step(self.store.create(s)))  # type: ignore[misc]
                case disk.RewriteJournal(records):
                    self._in_store(lambda r=records: self._rewrite(r))  # type: ignore[misc]
                case disk.AppendJournal():
                    self._in_store(lambda e=effect: self._append(e))  # type: ignore[misc]
                case disk.AskArena():
                    self._ask_host(lambda h: h.core.arena_reply(), self._arena_replied, VERB_MS)
                case disk.AskHostSnapshot():
                    self._ask_host(lambda h: h.core.snapshot(), self._host_snapshot, VERB_MS)
                case disk.LeaseHost():
                    self._lease(effect)
                case disk.ReleaseHost():
                    self._release(effect)
                case disk.WriteSlots():
                    self._write(effect)
                case disk.ReadSlots():
                    self._read(effect)
                case disk.Answer(reply_to, reply):
                    self._verbs.pop(reply_to)(reply)
                case disk.Publish(event):
                    self.publish(event)
                case _:
                    assert_never(effect)

    def _in_store(self, call: Any) -> None:
        """In the store's one thread: one after the other."""
        self._store_free_at = max(self._store_free_at, self.world.now) + self.world.delay(1)
        self.later(self._store_free_at - self.world.now, call)

    def _append(self, effect: disk.AppendJournal) -> None:
        self.store.append(effect.records, commit=effect.write is not None)
        if effect.write is not None:
            self.step(disk.Journaled(effect.write))

    def _rewrite(self, records: tuple[Record, ...]) -> None:
        self.store.journal.clear()
        self.store.append(records, commit=True)

    def _ask_host(self, answer: Any, done: Done, limit_ms: float) -> None:
        tier = cast(HostTier, self.world.nodes[HOST_TIER])
        self.bus.request(self, tier, lambda reply: reply(answer(tier)), done, limit_ms)

    def _arena_replied(self, reply: Any) -> None:
        if isinstance(reply, Failure):
            self.step(disk.ArenaFailed("0"))
            return
        if reply.slot_bytes:
            self._arena = cast(HostTier, self.world.nodes[HOST_TIER]).arenas[reply.epoch]
        self.step(disk.ArenaKnown(reply))

    def _host_snapshot(self, reply: object) -> None:
        if isinstance(reply, SnapshotReply):
            self.step(disk.HostSnapshot("0", reply))

    def _lease(self, effect: disk.LeaseHost) -> None:
        tier = cast(HostTier, self.world.nodes[HOST_TIER])

        def done(reply: object) -> None:
            if isinstance(reply, LeaseReply):
                self.step(disk.Leased(effect.write, reply))
            else:
                assert isinstance(reply, ErrorBody | Failure)
                self.step(disk.LeaseFailed(effect.write, reply.code))

        def serve(reply: Done) -> None:
            tier.ask(host.LeaseAsked(self.world.steps, effect.request), reply)

        self.bus.request(self, tier, serve, done, VERB_MS)

    def _release(self, effect: disk.ReleaseHost) -> None:
        tier = cast(HostTier, self.world.nodes[HOST_TIER])
        request = ReleaseRequest(lease=effect.lease)

        def done(reply: object) -> None:
            valid = isinstance(reply, ReleaseReply) and reply.valid
            self.step(disk.Released(effect.write, valid))

        def serve(reply: Done) -> None:
            tier.ask(host.ReleaseAsked(self.world.steps, request), reply)

        self.bus.request(self, tier, serve, done, VERB_MS)

    def _write(self, effect: disk.WriteSlots) -> None:
        assert self._arena is not None
        duration_ms = self.world.transfer_ms()
        self.store.dirty.update(effect.targets)
        copy(self, (self._arena, effect.sources), (self.store.file, effect.targets), duration_ms)
        failed = not self.world.calm and self.world.rng.random() < self.world.plan.loss
        ended = disk.WriteFailed(effect.write, "io") if failed else disk.Written(effect.write)
        self.later(duration_ms, lambda: self.step(ended))

    def _read(self, effect: disk.ReadSlots) -> None:
        """Bytes may be late, but nothing is reported before the last one is there."""
        assert self._arena is not None
        arena, left_ms = self._arena, effect.until_ms - self.world.now_ms
        duration_ms = self.world.transfer_ms()
        copy(self, (self.store.file, effect.sources), (arena, effect.targets), duration_ms)
        if duration_ms > left_ms:
            failed = disk.ReadFailed(effect.read, "transfer_timeout")
            self.world.marks["read late"] += 1
            self.later(duration_ms, lambda: self.step(failed))
            return
        self.later(duration_ms, lambda: self._read_ended(effect, arena))

    def _read_ended(self, effect: disk.ReadSlots, arena: Memory) -> None:
        sums = [arena.checksum(slot) for slot in effect.targets]
        intact = tuple(
            found == block.checksum or not self.compares
            for found, block in zip(sums, effect.blocks, strict=True)
        )
        self.world.marks["disk block corrupt"] += len(intact) - sum(intact)
        if arena is cast(HostTier, self.world.nodes[HOST_TIER]).arena:
            invariants.check_corrupt(
                [
                    arena.slots[slot]
                    for slot, block, ok in zip(effect.targets, effect.blocks, intact, strict=True)
                    if not ok and block.hash not in self._recovered
                ]
            )
        self.step(disk.ReadDone(effect.read, intact))


class Index(Service):
    """The index: reads all events from the first on, asks the sources for what it missed."""

    core: IndexCore

    def boot(self) -> None:
        self.begin()
        self.core = IndexCore()
        self.bus.registry.watch(self, self._registry)
        self.bus.follow(self, lambda _: True, self._events, new=False)
        self.later(self.world.delay(50), lambda: self.step(index.RegistryRead()))
        self.every(200, lambda: self.step(index.Tick()))

    def step(self, event: index.Input) -> None:
        """One input."""
        self.heard(event)
        for effect in self.core.step(event, self.world.now_ms):
            self._ask_snapshot(effect.key)
        if self.due_check():
            self.core.check()

    def _registry(self, source: str, epoch: int, there: bool) -> None:
        key = index.SourceKey(HOST, source)
        if source not in ("index", "consolidator"):
            self.step(index.SourceSeen(key, epoch) if there else index.SourceLost(key, epoch))

    def _events(self, events: list[Event]) -> None:
        self.step(index.EventsReceived(tuple(events)))

    def _ask_snapshot(self, key: index.SourceKey) -> None:
        self.world.marks["index asked for a snapshot"] += 1
        is_tier = key.source in (HOST_TIER, DISK_TIER)
        target = self.world.nodes[key.source if is_tier else "consolidator"]

        def serve(reply: Done) -> None:
            found = snapshot_of(self.world, key.source)
            reply(found or ErrorBody(code="unknown_source", message=""))

        def done(reply: object) -> None:
            if isinstance(reply, SnapshotReply):
                self.step(index.SnapshotReceived(reply))
            else:
                self.step(index.SnapshotFailed(key, str(reply)))

        self.bus.request(self, target, serve, done, SNAPSHOT_MS)


class Consolidator(Service):
    """The consolidator of the host: engines' streams in, events out; it passes offers on."""

    core: ConsolidatorCore

    def boot(self) -> None:
        self.begin()
        self.core = ConsolidatorCore(HOST)
        self.every(100, lambda: self.step(con.Tick()))

    def step(self, event: con.Input) -> None:
        """One input."""
        self.heard(event)
        for effect in self.core.step(event, self.world.now_ms):
            self._carry_out(effect)
        if self.due_check():
            self.core.check()

    def from_engine(self, connection: bytes, data: bytes) -> None:
        """A frame on the ROUTER."""
        match to_consolidator.decode(data):
            case Attach() as attach:
                self.step(con.StreamAttached(attach, connection))
            case Detach(engine=engine, incarnation=incarnation):
                self.step(con.EngineDetached(engine, incarnation))
            case Beat(engine=engine, incarnation=incarnation):
                self.step(con.BeatReceived(engine, incarnation, connection))
            case Offered() as offered:
                offer = _offer_of(offered)
                tier = self.world.nodes[HOST_TIER]
                received = host.OfferReceived(offer)
                self.bus.publish(self, [tier], lambda node: cast(HostTier, node).step(received))

    def batch(self, key: con.StreamKey, seq: int, batch: EngineBatch) -> None:
        """A message on an engine's PUB."""
        self.step(con.EngineBatchReceived(key, seq, batch))

    def died(self) -> None:
        super().died()
        for node in self.world.nodes.values():
            if isinstance(node, EngineNode) and node.up:
                node.subscribers.discard(self.name)

    def _carry_out(self, effect: con.Effect) -> None:
        match effect:
            case con.Publish(event):
                self.publish(event)
            case con.Subscribe(key):
                self.later(self.world.delay(10), lambda: self._subscribe(key))
            case con.Unsubscribe(key):
                if self._engine(key).incarnation == key.incarnation:
                    self._engine(key).subscribers.discard(self.name)
            case con.RequestReplay():
                self._replay(effect)
            case con.AskEpoch(engine, incarnation):
                self.later(self.world.delay(2), lambda: self._register(engine, incarnation))
            case con.RevokeEpoch(engine):
                registry = self.bus.registry
                registry.leave(engine, registry.entries.get(engine, 0))
            case con.Describe():
                pass
            case con.Reply(peer, message):
                node = self.world.nodes[peer.decode().split(":")[0]]
                data = from_consolidator.encode(message)
                self.world.send(self.name, node, lambda: cast(EngineNode, node).receive(peer, data))
            case _:
                assert_never(effect)

    def _engine(self, key: con.StreamKey) -> EngineNode:
        return cast(EngineNode, self.world.nodes[key.engine])

    def _subscribe(self, key: con.StreamKey) -> None:
        engine = self._engine(key)
        if engine.up and engine.incarnation == key.incarnation:
            engine.subscribers.add(self.name)

    def _register(self, engine: str, incarnation: str) -> None:
        if not self.bus.up:
            self.step(con.EpochFailed(engine, incarnation, "bus_unavailable"))
            return
        epoch = self.bus.registry.register(
            engine, self, lambda lost: self.step(con.EngineLost(engine, lost, "superseded"))
        )
        self.step(con.EpochGranted(engine, incarnation, epoch))

    def _replay(self, effect: con.RequestReplay) -> None:
        """Ask the engine's ROUTER: all that is still in its buffer, then the end."""
        engine, key, number = self._engine(effect.key), effect.key, effect.replay
        alive = engine.up and engine.incarnation == key.incarnation
        if not alive or self.world.loses(self.name, engine.name):
            self.later(500, lambda: self.step(con.ReplayFailed(key, number, "silent")))
            return
        for seq, batch in list(engine.buffer):
            if seq >= effect.from_seq:
                got = con.EngineBatchReceived(key, seq, batch, number)
                self.later(self.world.queue("replay", self.name), lambda got=got: self.step(got))  # type: ignore[misc]  # noqa: E501
        self.later(
            self.world.queue("replay", self.name), lambda: self.step(con.ReplayDone(key, number))
        )  # noqa: E501


def _offer_of(offered: Offered) -> Offer:
    runs = [
        OfferRun(
            parent=run.parent.hex(),
            hashes=[hash_to_hex(name) for name in unpack_hashes(run.hashes)],
            blocks=run.blocks,
        )
        for run in offered.runs
    ]
    return Offer(
        host=HOST, engine=offered.engine, incarnation=offered.incarnation, offer=offered.offer,
        namespace=offered.namespace.hex(), deadline_ms=offered.deadline_ms, runs=runs,
    )  # fmt: skip


def snapshot_of(world: World, source: str) -> SnapshotReply | None:
    """What a source says that it holds."""
    match world.nodes["consolidator" if source.startswith("sim-") else source]:
        case HostTier(core=core) | DiskTier(core=core):
            return cast("HostTierCore | DiskTierCore", core).snapshot()
        case Consolidator(core=core):
            return cast(ConsolidatorCore, core).snapshot(source)
    return None
