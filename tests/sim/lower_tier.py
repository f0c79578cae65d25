"""A tier below the host tiers: the real core, and what disk tier and object tier have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import assert_never

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Event, Tier
from kvbm_common.wire.verbs import (
    ArenaReply,
    ErrorBody,
    FillRequest,
    LeaseReply,
    ReleaseReply,
    ReleaseRequest,
    SnapshotReply,
)
from kvbm_disk_tier.core import effects as wanted
from kvbm_disk_tier.core import messages as disk
from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_host_tier.core import messages as host_tier

from tests.sim import invariants
from tests.sim.ages import aged_lower_tier
from tests.sim.bus import Bus, Done, Failure
from tests.sim.cluster import Cluster, Host
from tests.sim.memory import Memory, units_of
from tests.sim.registry import News
from tests.sim.service import VERB_MS, Service
from tests.sim.world import World

ANNOUNCE_MS = 250
"""How long the service waits at most between the announcements of what a former life has left."""
HOST_TIER = "host-tier-"


class LowerTier(Service):
    """What leases, fills and announces; the medium is the subclass's."""

    core: DiskTierCore
    tier: Tier

    def __init__(self, world: World, bus: Bus, cluster: Cluster, host: Host, source: str) -> None:
        super().__init__(world, bus, cluster, host, source)
        host.lower.append(self)

    def boot(self) -> None:
        self.begin()
        self.core = self.make_core()
        self._mapped: dict[str, int] = {}
        """By host tier, the epoch of its arena."""
        self._verbs: dict[int, Done] = {}
        self._asked = 0
        self.carry_out(aged_lower_tier(self.core, self.announced, self.world))
        self.recover()
        self.bus.registry.watch(self, self._registry)
        self.bus.stream.follow(self, self._is_host_tiers, self._host_events, new=True)
        self.every(1_000, lambda: self.step(disk.Tick()))

    @abstractmethod
    def make_core(self) -> DiskTierCore:
        """Return the core of a new life."""

    def recover(self) -> None:
        """Open what a former life has left, if that is known at once."""

    @abstractmethod
    def open_store(self, slot_bytes: int) -> None:
        """Make a store."""

    @abstractmethod
    def write(self, effect: wanted.WriteSlots, arena: Memory) -> None:
        """Move blocks from an arena into the store."""

    @abstractmethod
    def read(self, effect: wanted.ReadSlots, arena: Memory) -> None:
        """Move blocks from the store into an arena."""

    @abstractmethod
    def append(self, effect: wanted.AppendJournal) -> None:
        """Make records last."""

    @abstractmethod
    def rewrite(self, effect: wanted.RewriteJournal) -> None:
        """Write a part of a shorter journal."""

    def stop(self) -> None:
        """End in order: reads and writes go on while it says good-bye."""
        self.carry_out(self.core.stop())
        self.later(self.world.rng.uniform(0, 1_000), self.leave)

    def step(self, event: disk.Input) -> None:
        """Take one input."""
        self.heard(event)
        self.carry_out(self.core.step(event, self.world.now_ms))
        self.stepped()

    def check(self) -> None:
        """Check the core, and the checksums in its table."""
        self.core.check()
        invariants.check_sums(
            self.core.inventory.table.blocks(), self.world.plan.part_count, self.name
        )

    def snapshot(self, _source: str) -> SnapshotReply:
        return self.core.view.snapshot()

    def fill(self, request: FillRequest, done: Done) -> None:
        """Answer the verb."""
        self._asked += 1
        self._verbs[self._asked] = done
        self.step(disk.FillAsked(self._asked, request))

    # --- inputs -----------------------------------------------------------------------------

    def _registry(self, news: News) -> None:
        host, source = news.name.split("/")
        if host != self.host.name or not source.startswith(HOST_TIER):
            return
        instance = source.removeprefix(HOST_TIER)
        if news.is_there:
            self.step(disk.HostJoined(instance, news.epoch))
        else:
            self.step(disk.HostLeft(instance))

    def _is_host_tiers(self, event: Event) -> bool:
        return event.host == self.host.name and event.source.startswith(HOST_TIER)

    def _host_events(self, events: list[Event]) -> None:
        for event in events:
            self.step(disk.HostEvent(event.source.removeprefix(HOST_TIER), event))

    # --- effects ----------------------------------------------------------------------------

    def carry_out(self, effects: Sequence[wanted.Effect]) -> None:
        """Do what the core wants."""
        for effect in effects:
            match effect:
                case wanted.OpenStore(slot_bytes):
                    self.open_store(slot_bytes)
                case wanted.ProbeStore():
                    self.later(self.world.delay(10), lambda: self.step(self.probe()))
                case wanted.RewriteJournal():
                    self.rewrite(effect)
                case wanted.AppendJournal():
                    self.append(effect)
                case wanted.AskArena(instance):
                    self._ask_arena(instance)
                case wanted.AskHostSnapshot(instance):
                    self._ask_host_snapshot(instance)
                case wanted.LeaseHost():
                    self._lease(effect)
                case wanted.ReleaseHost():
                    self._release(effect)
                case wanted.WriteSlots():
                    self._write(effect)
                case wanted.ReadSlots():
                    self._read(effect)
                case wanted.Answer(reply_to, reply):
                    self._verbs.pop(reply_to)(reply)
                case wanted.AnnounceLater():
                    self.later(ANNOUNCE_MS, partial(self.step, disk.AnnounceMore()))
                case wanted.Publish(event):
                    self.publish(event)
                case wanted.SayAccepting():
                    pass  # There is no other.
                case wanted.DropArena():
                    pass  # What is mapped longer than needed does no harm.
                case _:
                    assert_never(effect)

    def _write(self, effect: wanted.WriteSlots) -> None:
        if effect.epoch in self._mapped.values():
            self.write(effect, self.cluster.arenas[effect.epoch])
        else:
            failed = disk.WriteFailed(effect.write, disk.STALE_ARENA)
            self.later(0, partial(self.step, failed))

    def probe(self) -> disk.StoreProbed:
        """Say whether the store can be read and written now."""
        return disk.StoreProbed()

    def _read(self, effect: wanted.ReadSlots) -> None:
        if effect.epoch in self._mapped.values():
            self.read(effect, self.cluster.arenas[effect.epoch])
        else:
            self.later(0, partial(self.step, disk.ReadFailed(effect.read, disk.STALE_ARENA)))

    def _ask_arena(self, instance: str) -> None:
        tier = self.host.host_tiers[instance]

        def serve(reply: Done) -> None:
            reply(tier.core.view.arena_reply())

        def done(reply: object) -> None:
            if not isinstance(reply, ArenaReply):
                self.step(disk.ArenaFailed(instance))
                return
            if reply.slot_bytes:
                self._mapped[instance] = reply.epoch
            self.step(disk.ArenaKnown(reply))

        self.bus.request(self, tier, serve, done, limit_ms=VERB_MS)

    def _ask_host_snapshot(self, instance: str) -> None:
        tier = self.host.host_tiers[instance]

        def serve(reply: Done) -> None:
            reply(tier.core.view.snapshot())

        def done(reply: object) -> None:
            if isinstance(reply, SnapshotReply):
                self.step(disk.HostSnapshot(instance, reply))
            else:
                self.step(disk.HostSnapshotFailed(instance))

        self.bus.request(self, tier, serve, done, limit_ms=VERB_MS)

    def _lease(self, effect: wanted.LeaseHost) -> None:
        tier = self.host.host_tiers[effect.instance]

        def done(reply: object) -> None:
            if isinstance(reply, LeaseReply):
                self.world.marks["lease over its share"] += bool(reply.over_share)
                self.step(disk.Leased(effect.write, reply))
            else:
                assert isinstance(reply, ErrorBody | Failure)
                self.step(disk.LeaseFailed(effect.write, reply.code))

        def serve(reply: Done) -> None:
            tier.ask(host_tier.LeaseAsked(tier.next_verb(), effect.request), reply)

        self.bus.request(self, tier, serve, done, limit_ms=VERB_MS)

    def _release(self, effect: wanted.ReleaseHost) -> None:
        tier = self.host.host_tiers[effect.instance]
        request = ReleaseRequest(lease=effect.lease)

        def done(reply: object) -> None:
            valid = isinstance(reply, ReleaseReply) and reply.valid
            answered = not isinstance(reply, Failure)
            self.step(disk.Released(effect.write, valid, answered))

        def serve(reply: Done) -> None:
            tier.ask(host_tier.ReleaseAsked(tier.next_verb(), request), reply)

        self.bus.request(self, tier, serve, done, limit_ms=VERB_MS)

    def check_corrupt(
        self,
        effect: wanted.ReadSlots,
        arena: Memory,
        intact: Sequence[bool],
        spared: set[SequenceHash],
    ) -> None:
        """Require that every corrupt block has a cause in the world."""
        if effect.epoch not in (tier.epoch for tier in self.cluster.host_tiers if tier.up):
            return
        for slot, block, whole in zip(effect.targets, effect.blocks, intact, strict=True):
            if not whole and block.hash not in spared:
                found = arena.content(slot, units_of(block.bytes))
                invariants.check_corrupt_block(block.hash, found)
