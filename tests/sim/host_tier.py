"""The host tier of the simulation: the real core, an arena, and NIXL pulls that may be late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import assert_never

from kvbm_common.identity import SequenceHash, hashes_from_hex
from kvbm_common.wire.events import Event
from kvbm_common.wire.local import FromHostTier, from_host_tier, to_host_tier
from kvbm_common.wire.verbs import ErrorBody, FillReply, Hits, SnapshotReply
from kvbm_disk_tier import messages as disk
from kvbm_host_tier import messages as host
from kvbm_host_tier.core import HostTierCore
from kvbm_host_tier.peer_messages import AskHolders, OpenDoor, PullFromPeer, ReleaseAtPeer
from kvbm_host_tier.shard_messages import HandedOver, SayPlace
from kvbm_host_tier.tier import Limits

from tests.sim import invariants
from tests.sim.bus import Bus, Done, Failure
from tests.sim.memory import Memory, copy
from tests.sim.peers import Peers
from tests.sim.service import DISK_TIER, HOST, HOST_TIER, SNAPSHOT_MS, Service
from tests.sim.world import World

SLOT_BYTES = 4096
FILL_MARGIN_MS = 500
"""The shell waits so much longer for a fill than the disk tier has time for it."""


class HostTier(Service):
    """G2. Its arena dies with it."""

    core: HostTierCore
    arena: Memory

    def __init__(self, world: World, bus: Bus, peers: Peers) -> None:
        super().__init__(world, bus, peers, HOST_TIER)
        peers.host_tier = self
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
            arena=host.NO_ARENA if plan.counted else _arena(plan.host_slots * SLOT_BYTES),
            limits=Limits(
                slot_count=plan.host_slots if plan.counted else None,
                batch_blocks_max=4,
                transfers_max=2,
            ),
            staging=plan.staging,
        )
        self._verbs: dict[int, Done] = {}
        self._carry_out(self.core.start())
        self.bus.registry.watch(self, self._registry)
        self.bus.stream.follow(self, _is_disk, self._disk_events, new=True)
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

    def snapshot(self, _source: str) -> SnapshotReply:
        return self.core.snapshot()

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
                    attached = host.PeerAttached(engine, rank, str(engine))
                    self.later(self.world.delay(2), partial(self.step, attached))
                case host.DetachPeer():
                    pass
                case host.StartPull():
                    self._pull(effect)
                case host.AskFill():
                    self._fill(effect)
                case host.AskDiskSnapshot():
                    self._disk_snapshot()
                case host.AskFates():
                    self._fates(effect)
                case host.MakeArena(size_bytes):
                    self._make_arena(size_bytes)
                case host.Answer(reply_to, reply):
                    self._verbs.pop(reply_to)(reply)
                case host.Publish(event):
                    self.publish(event)
                case host.TellHits(hits):
                    self._tell_hits(hits)
                case AskHolders() | PullFromPeer() | ReleaseAtPeer() | OpenDoor():
                    raise AssertionError("here is one host: who should be its peer?")
                case SayPlace() | HandedOver():
                    raise AssertionError("here is one host tier: whom should it tell?")
                case _:
                    assert_never(effect)

    def _fates(self, effect: host.AskFates) -> None:
        """A question that nobody waits for: lost, or late, or of a life that has ended."""
        disk_tier = self.peers.disk_tier
        names = hashes_from_hex(effect.request.hashes)
        reply = disk_tier.core.fates(names, self.world.now_ms) if disk_tier.up else None
        told = host.FatesTold(effect.question, effect.instance, reply)
        self.later(self.world.delay(5), partial(self.step, told))

    def _make_arena(self, size_bytes: int) -> None:
        refused = not self.world.calm and self.world.rng.random() < self.world.plan.loss
        made = host.ArenaMade(_arena(size_bytes))
        outcome = host.ArenaRefused("no room") if refused else made
        self.later(self.world.delay(50), partial(self.step, outcome))

    def _tell_hits(self, hits: Hits) -> None:
        disk_tier, told = self.peers.disk_tier, disk.HitsTold("", hits)
        self.bus.publish(self, disk_tier, lambda: disk_tier.step(told))

    def _to_engine(self, connection: bytes, message: FromHostTier) -> None:
        engine = self.peers.engines[connection.decode().split(":")[0]]
        data = from_host_tier.encode(message)
        if engine.up:
            self.world.send(self.name, engine, lambda: engine.receive(connection, data))

    def _pull(self, effect: host.StartPull) -> None:
        """NIXL READ from an engine's device; fails when that engine's life is over."""
        name, incarnation = effect.parts[0].peer.split(":")
        engine = self.peers.engines[name]
        if not engine.up or engine.incarnation != incarnation:
            failed = host.PullFailed(effect.pull, "peer_lost", settled=True)
            self.later(1, lambda: self.step(failed))
            return
        duration_ms = self.world.transfer_ms("pull")
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
        disk_tier = self.peers.disk_tier

        def serve(reply: Done) -> None:
            disk_tier.fill(effect.request, reply)

        def done(reply: object) -> None:
            if isinstance(reply, FillReply):
                self.step(host.FillDone(effect.fill, reply))
                return
            assert isinstance(reply, ErrorBody | Failure)
            settled = reply.code not in ("deadline_exceeded", "bus_unavailable")
            self.world.marks["fill failed" if settled else "slots lent"] += 1
            self.step(host.FillFailed(effect.fill, reply.code, settled=settled))

        limit_ms = max(10, effect.request.until_ms - self.world.now_ms + FILL_MARGIN_MS)
        self.bus.request(self, disk_tier, serve, done, limit_ms=limit_ms)

    def _disk_snapshot(self) -> None:
        disk_tier = self.peers.disk_tier

        def serve(reply: Done) -> None:
            reply(disk_tier.core.snapshot())

        def done(reply: object) -> None:
            good = reply if isinstance(reply, SnapshotReply) else None
            self.step(host.DiskSnapshot("0", good))

        self.bus.request(self, disk_tier, serve, done, limit_ms=SNAPSHOT_MS)


def _arena(size_bytes: int) -> host.ArenaInfo:
    return host.ArenaInfo("arena", 4096, size_bytes, b"agent")


def _is_disk(event: Event) -> bool:
    return event.source == DISK_TIER
