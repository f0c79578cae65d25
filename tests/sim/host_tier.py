"""The host tier of the simulation: the real core, an arena, and NIXL pulls that may be late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import assert_never

import msgspec
from kvbm_common.identity import SequenceHash, hash_from_hex, hashes_from_hex
from kvbm_common.tenant_tag import tenant_tag
from kvbm_common.tier.layout import UNIT_BYTES
from kvbm_common.wire.events import Event, Removed, Tier
from kvbm_common.wire.local import Found, FromHostTier, Lookup, from_host_tier, to_host_tier
from kvbm_common.wire.slot_entries import FilledSlot
from kvbm_common.wire.verbs import ErrorBody, FillReply, Hits, SnapshotReply, StatsReply
from kvbm_disk_tier.core import messages as disk
from kvbm_host_tier.core import messages as host
from kvbm_host_tier.core.core import HostTierCore
from kvbm_host_tier.core.filter_messages import MakeFilter, NamesChanged, SwitchFilter, UseFilter
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.lower_snapshot import LowerSnapshot
from kvbm_host_tier.core.peer_messages import (
    AskHolders,
    OpenPeerReader,
    PeerEffect,
    PeerId,
    PullFromPeer,
    ReleaseAtPeer,
)
from kvbm_host_tier.core.scrub_messages import ScrubDone, ScrubFound, ScrubSlots
from kvbm_host_tier.core.shard_map import HandedOver, SayPlace, ShardEffect

from tests.sim import invariants
from tests.sim.ages import aged_host_tier
from tests.sim.bus import Bus, Done, Failure
from tests.sim.cluster import Cluster, Host
from tests.sim.host_lookups import HostLookups
from tests.sim.host_peers import HostPeers
from tests.sim.host_siblings import HostSiblings
from tests.sim.lower_tier import LowerTier
from tests.sim.memory import Memory, copy, right_cells, sums_of, units_of
from tests.sim.miss_filter import HostFilter
from tests.sim.registry import News
from tests.sim.service import SNAPSHOT_MS, Service
from tests.sim.world import World

SCRUB_MS = 150
"""A batch of the scrubber takes so long on a busy machine, and is not pinned."""
FILL_MARGIN_MS = 500
"""The shell waits so much longer for a fill than the lower tier has time for it."""
LOWER: tuple[Tier, ...] = ("disk", "object")


class HostTier(Service):
    """G2. Its arena dies with it."""

    core: HostTierCore
    arena: Memory
    peers: HostPeers
    siblings: HostSiblings

    def __init__(self, world: World, bus: Bus, cluster: Cluster, host: Host, instance: str) -> None:
        super().__init__(world, bus, cluster, host, f"host-tier-{instance}")
        self.instance = instance
        host.host_tiers[instance] = self

    def boot(self) -> None:
        self.begin()
        plan = self.world.plan
        units = plan.units(plan.host_slots)
        # A number of blocks is one of the first engine's blocks, however long these are.
        made = units * max(plan.sizes) if plan.counted else units
        self.arena = Memory(self.world, made, parts=plan.part_count)
        self.cluster.arenas[self.epoch] = self.arena
        self.core = HostTierCore(
            host=self.host.name,
            instance=self.instance,
            epoch=self.epoch,
            arena=host.NO_ARENA if plan.counted else _arena(units * UNIT_BYTES),
            limits=HostTierLimits(
                slot_count=units if plan.counted else None,
                slab_bytes=plan.slab_units * UNIT_BYTES,
                batch_blocks_max=4,
                copied_least=plan.copied_least,
                transfers_max=2,
                peer_pulls_max=2,
                scrub_cpu_percent=1.0,
                confirm_ms=plan.confirm_ms,
                miss_filter=plan.filters,
                filter_names_least=2,
                filter_slice=3,
                below_piece=4,
                stretch_blocks=2,
            ),
            staging=plan.staging,
        )
        self._verbs: dict[int, Done] = {}
        self._asked = 0
        self._scrubbing: dict[SequenceHash, tuple[bytes, ...]] = {}
        """What the scrubber has read last."""
        self._step_count = 0
        self.peers, self.siblings = HostPeers(self), HostSiblings(self)
        self._filter, self.lookups = HostFilter(self), HostLookups(self)
        self._carry_out(aged_host_tier(self.core, self.announced, self.world))
        self.siblings.start()
        self.bus.registry.watch(self, self._registry)
        lost = partial(self.step, host.LowerEventsLost())
        self.bus.stream.follow(self, self._is_lower, self._lower_events, new=True, lost=lost)
        self.every(100, lambda: self.step(host.Tick()))

    def stop(self) -> None:
        """End in order: engines go elsewhere first, if they can."""
        self.siblings.hand_over()

    def say_goodbye(self) -> None:
        """Say the last words, and work on meanwhile."""
        self._carry_out(self.core.stop())
        self.later(self.world.rng.uniform(0, 1_000), self.leave)

    def step(self, event: host.Input) -> None:
        """Take one input."""
        self.heard(event)
        self._carry_out(self.core.step(event, self.world.now_ms))
        self._step_count += 1
        if self._step_count % 4:  # Else another input has waited already.
            self._carry_out(self.core.settle())
        self.stepped()

    def check(self) -> None:
        """Check the core, and the checksums in its table."""
        self.core.check()
        blocks = self.core.view.blocks().values()
        invariants.check_sums(blocks, self.world.plan.part_count, self.name)
        if len({tenant_tag(block.namespace) for block in blocks}) > 1:
            self.world.marks["tenants share a tier"] += 1

    def contents(self) -> Mapping[SequenceHash, tuple[bytes, ...]]:
        return invariants.contents(self.core.view.blocks(), self.arena)

    def statistics(self) -> StatsReply:
        """Return the figures that the tier shows of itself."""
        return self.core.view.statistics(self.world.now_ms)

    def snapshot(self, _source: str) -> SnapshotReply:
        return self.core.view.snapshot()

    def from_engine(self, connection: bytes, data: bytes) -> None:
        """Take a frame on the ROUTER."""
        message = to_host_tier.decode(data)
        if isinstance(message, Lookup):
            self.lookups.asked(connection, message)
        self.step(host.FromEngine(connection, message))

    def _registry(self, news: News) -> None:
        source = news.name.partition("/")[2]
        is_ours = news.name.startswith(f"{self.host.name}/")
        if source.startswith("host-tier-"):
            if is_ours:
                self.siblings.heard(news)
            if news.name != self.name:
                peer = PeerId(news.name.partition("/")[0], source.removeprefix("host-tier-"))
                self.peers.changed(peer, news)
            return
        tier = next((tier for tier in LOWER if source == f"{tier}-tier-0"), None)
        if not is_ours or tier is None:
            return
        self.step(
            host.LowerTierJoined("0", tier, news.epoch)
            if news.is_there
            else host.LowerTierLeft("0", tier, news.epoch)
        )

    def _is_lower(self, event: Event) -> bool:
        return event.host == self.host.name and event.tier in LOWER

    def _lower_events(self, events: list[Event]) -> None:
        for event in events:
            self.step(host.LowerTierEvent("0", event, event.tier))

    def next_verb(self) -> int:
        """Return a number for a question to the core."""
        self._asked += 1
        return self._asked

    def ask(
        self, request: host.LeaseAsked | host.ReleaseAsked | host.AdminAsked, done: Done
    ) -> None:
        """Ask the core, for a verb."""
        self._verbs[request.reply_to] = done
        self.step(request)

    # --- effects ----------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[host.Effect]) -> None:
        gone: set[str] = set()
        if len(effects) > 1:
            events = [one.event for one in effects if isinstance(one, host.Publish)]
            gone = {text for event in events if isinstance(event, Removed) for text in event.hashes}
        for effect in effects:
            match effect:
                case host.ToEngine(connection, message):
                    self._to_engine(connection, message)
                case host.AttachPeer(engine, rank):
                    # NIXL's name of an agent says which life of which engine it is.
                    attached = host.PeerAttached(engine, rank, f"{engine}:{rank}")
                    self.later(self.world.delay(2), partial(self.step, attached))
                case host.DetachPeer():
                    pass
                case host.StartPull():
                    self._pull(effect)
                case host.AskFill():
                    self._fill(effect)
                case host.AskLowerTierSnapshot(_, tier):
                    self._lower_snapshot(self._lower(tier))
                case host.AskDepartures():
                    self._fates(effect)
                case host.MakeArena(size_bytes):
                    self._make_arena(size_bytes)
                case host.Answer(reply_to, reply):
                    self._verbs.pop(reply_to)(reply)
                case host.Publish(event):
                    self.publish(event, gone)
                case host.TellHits(hits):
                    self._tell_hits(hits)
                case ScrubSlots():
                    self.later(SCRUB_MS, partial(self._scrubbed, effect))
                case ScrubFound(names):
                    self._found_rot(names)
                case MakeFilter() | NamesChanged() | UseFilter() | SwitchFilter():
                    self._filter.carry_out(effect)
                case _:
                    self._carry_to_others(effect)

    def _carry_to_others(self, effect: PeerEffect | ShardEffect) -> None:
        match effect:
            case AskHolders():
                self.peers.holders(effect)
            case PullFromPeer():
                self.peers.pull(effect)
            case ReleaseAtPeer(peer, lease):
                self.peers.release(peer, lease)
            case OpenPeerReader():
                self.peers.open_door()
            case SayPlace():
                self.siblings.say(effect)
            case HandedOver():
                self.siblings.handed_over()
            case _:
                assert_never(effect)

    def _lower(self, tier: Tier) -> LowerTier:
        return next(one for one in self.host.lower if one.tier == tier)

    def _fates(self, effect: host.AskDepartures) -> None:
        """Ask what nothing waits for: lost, or late, or of a life that has ended."""
        lower = self._lower(effect.tier)
        names = hashes_from_hex(effect.request.hashes)
        reply = lower.core.view.fates(names, self.world.now_ms) if lower.up else None
        told = host.DeparturesTold(effect.question, effect.instance, reply, effect.tier)
        self.later(self.world.delay(5), partial(self.step, told))

    def _make_arena(self, size_bytes: int) -> None:
        refused = not self.world.calm and self.world.rng.random() < self.world.plan.loss
        made = host.ArenaMade(_arena(size_bytes))
        outcome = host.ArenaRefused("no room") if refused else made
        self.later(self.world.delay(50), partial(self.step, outcome))

    def _tell_hits(self, hits: Hits) -> None:
        told = disk.HitsTold(self.instance, hits)
        for lower in self.host.lower:
            self.bus.publish(self, lower, partial(lower.step, told))

    def _to_engine(self, connection: bytes, message: FromHostTier) -> None:
        engine = self.host.engines[connection.decode().split(":")[0]]
        if isinstance(message, Found):
            self.lookups.answered(connection, message)
        data = from_host_tier.encode(message)
        if engine.up:
            self.world.send(self.name, engine, lambda: engine.receive(connection, data))

    def _pull(self, effect: host.StartPull) -> None:
        """Read from an engine's devices; fails when that engine's life is over."""
        name, incarnation, _ = effect.parts[0].peer.split(":")
        engine = self.host.engines[name]
        if not engine.up or engine.incarnation != incarnation:
            failed = host.PullFailed(effect.pull, "peer_lost", settled=True)
            self.later(1, lambda: self.step(failed))
            return
        duration_ms = self.world.transfer_ms("pull")
        invariants.check_pulled(effect.parts, engine.name)
        for part in effect.parts:
            rank = int(part.peer.rpartition(":")[2])
            device = engine.workers[rank].device
            units = units_of(effect.block_bytes)
            blocks = (device, device.some(effect.blocks, range(device.parts)))
            slots = (self.arena, self.arena.some(effect.slots, part.share.parts, units))
            copy(self, blocks, slots, duration_ms)
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
        units = units_of(effect.block_bytes)
        sums = tuple(self.arena.sums(slot, units) for slot in effect.slots)
        self.step(host.PullDone(effect.pull, sums))

    def _scrubbed(self, effect: ScrubSlots) -> None:
        """Report what a batch of the scrubber has read, some time after it was wanted."""
        read = [
            self.arena.content(slot, units_of(block.bytes))
            for slot, block in zip(effect.slots, effect.blocks, strict=True)
        ]
        self._scrubbing = {b.hash: seen for b, seen in zip(effect.blocks, read, strict=True)}
        # Most are right: `check` has compared their checksums with those of right bytes.
        wrong = tuple(
            index
            for index, (seen, block) in enumerate(zip(read, effect.blocks, strict=True))
            if seen != right_cells(block.hash, len(seen)) and not block.has_sums(sums_of(seen))
        )
        self.step(ScrubDone(wrong, cpu_us=1_000))

    def _found_rot(self, names: Sequence[SequenceHash]) -> None:
        self.world.marks["rot found by the scrubber"] += len(names)
        for name in names:
            cells = self._scrubbing.get(name, (b"another block",) * self.arena.parts)
            invariants.check_corrupt_block(name, cells)

    def _fill(self, effect: host.AskFill) -> None:
        lower = self._lower(effect.tier)
        if not self.world.bus_up:
            failed = host.FillFailed(effect.fill, "bus_unavailable", settled=True)
            self.later(0, partial(self.step, failed))
            return

        def serve(reply: Done) -> None:
            lower.fill(effect.request, reply)

        def done(reply: object) -> None:
            if isinstance(reply, FillReply):
                self._filled(effect, reply)
                return
            assert isinstance(reply, ErrorBody | Failure)
            settled = reply.code not in ("deadline_exceeded", "bus_unavailable")
            self.world.marks["fill failed" if settled else "slots lent"] += 1
            self.step(host.FillFailed(effect.fill, reply.code, settled=settled))

        limit_ms = max(10, effect.request.until_ms - self.world.now_ms + FILL_MARGIN_MS)
        self.bus.request(self, lower, serve, done, limit_ms=limit_ms)

    def _filled(self, effect: host.AskFill, reply: FillReply) -> None:
        good = [filled for filled in reply.slots if filled.ok]
        may_cross = len(good) > 1 and not self.world.calm
        if may_cross and self.world.rng.random() < self.world.plan.crossed:
            self._cross(good[0], good[1])
            reply = msgspec.structs.replace(reply, slots=_crossed(reply.slots, good[:2]))
        self.step(host.FillDone(effect.fill, reply))
        self.check_arrived([(hash_from_hex(one.hash), one.slot) for one in effect.request.slots])

    def _cross(self, one: FilledSlot, other: FilledSlot) -> None:
        """Put two blocks into each other's slots, as a tier in error would."""
        self.world.marks["fill crossed"] += 1
        units = units_of(one.bytes)
        first, second = (self.arena.content(filled.slot, units) for filled in (one, other))
        self.arena.put(one.slot, second, units)
        self.arena.put(other.slot, first, units)

    def check_arrived(self, arrived: Sequence[tuple[SequenceHash, int]]) -> None:
        """Require that what was just committed is right: nothing of the world's was too late for
        its checksum to find."""
        blocks = self.core.view.blocks()
        for name, slot in arrived:
            if slot in blocks and blocks[slot].hash == name:
                units = units_of(blocks[slot].bytes)
                for rank, content in enumerate(self.arena.content(slot, units)):
                    invariants.check_content(name, rank, content, f"{self.name}, just filled,")

    def _lower_snapshot(self, lower: LowerTier) -> None:
        def serve(reply: Done) -> None:
            reply(lower.core.view.snapshot())

        def done(reply: object) -> None:
            good = LowerSnapshot.of(reply) if isinstance(reply, SnapshotReply) else None
            self.step(host.LowerTierSnapshot("0", good, lower.tier))

        self.bus.request(self, lower, serve, done, limit_ms=SNAPSHOT_MS)


def _crossed(slots: Sequence[FilledSlot], pair: Sequence[FilledSlot]) -> list[FilledSlot]:
    """Return an answer that says where two blocks are by now."""
    one, other = pair
    where = {one.hash: other.slot, other.hash: one.slot}
    return [msgspec.structs.replace(s, slot=where.get(s.hash, s.slot)) for s in slots]


def _arena(size_bytes: int) -> host.ArenaInfo:
    return host.ArenaInfo("arena", 4096, size_bytes, b"agent")
