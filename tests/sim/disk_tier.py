"""The disk tier of the simulation: the real core over a directory that outlives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import assert_never

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Event
from kvbm_common.wire.verbs import (
    ArenaReply,
    ErrorBody,
    FillRequest,
    LeaseReply,
    ReleaseReply,
    ReleaseRequest,
    SnapshotReply,
)
from kvbm_disk_tier import messages as disk
from kvbm_disk_tier.core import DiskTierCore
from kvbm_disk_tier.frequency_filter import FrequencyFilter
from kvbm_disk_tier.journal import Record
from kvbm_disk_tier.tier import Limits
from kvbm_host_tier import messages as host

from tests.sim import invariants
from tests.sim.bus import Bus, Done, Failure
from tests.sim.disk_store import Store
from tests.sim.memory import Memory, copy
from tests.sim.peers import Peers
from tests.sim.service import DISK_TIER, HOST, HOST_TIER, VERB_MS, Service
from tests.sim.world import Call, World

ANNOUNCE_MS = 250
"""How long the service waits at most between the announcements of what a former life has left."""


class DiskTier(Service):
    """G3. Its store outlives it."""

    core: DiskTierCore
    compares = True
    """The mover compares checksums; a meta-test turns that off."""

    def __init__(self, world: World, bus: Bus, peers: Peers) -> None:
        super().__init__(world, bus, peers, DISK_TIER)
        peers.disk_tier = self
        self.store = Store(world)

    def boot(self) -> None:
        self.begin()
        self.core = DiskTierCore(
            host=HOST,
            instance="0",
            epoch=self.epoch,
            frequency_filter=FrequencyFilter(enabled=self.world.plan.filtered),
            limits=Limits(batch_blocks_max=4, writes_max=2, reads_max=3, announced_blocks_max=2),
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
        self.bus.stream.follow(self, _is_host, self._host_events, new=True)
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

    def snapshot(self, _source: str) -> SnapshotReply:
        return self.core.snapshot()

    def fill(self, request: FillRequest, done: Done) -> None:
        """The verb."""
        self._asked += 1
        self._verbs[self._asked] = done
        self.step(disk.FillAsked(self._asked, request))

    # --- effects ----------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[disk.Effect]) -> None:
        for effect in effects:
            match effect:
                case disk.OpenStore(slot_bytes):
                    self._in_store(partial(self._create, slot_bytes))
                case disk.RewriteJournal(records):
                    self._in_store(partial(self._rewrite, records))
                case disk.AppendJournal():
                    self._in_store(partial(self._append, effect))
                case disk.AskArena():
                    self._ask_arena()
                case disk.AskHostSnapshot():
                    self._ask_host_snapshot()
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
                case disk.AnnounceLater():
                    self.later(ANNOUNCE_MS, partial(self.step, disk.AnnounceMore()))
                case disk.Publish(event):
                    self.publish(event)
                case disk.SayAccepting():
                    pass  # There is no other.
                case disk.DropArena():
                    pass  # What is mapped longer than needed does no harm.
                case _:
                    assert_never(effect)

    def _in_store(self, call: Call) -> None:
        """In the store's one thread: one after the other."""
        self._store_free_at = max(self._store_free_at, self.world.now) + self.world.delay(1)
        self.later(self._store_free_at - self.world.now, call)

    def _create(self, slot_bytes: int) -> None:
        self.step(self.store.create(slot_bytes))

    def _append(self, effect: disk.AppendJournal) -> None:
        self.store.append(effect.records, commit=effect.write is not None)
        if effect.write is not None:
            self.step(disk.Journaled((effect.write,)))

    def _rewrite(self, records: tuple[Record, ...]) -> None:
        self.store.journal.clear()
        self.store.append(records, commit=True)

    def _ask_arena(self) -> None:
        tier = self.peers.host_tier

        def serve(reply: Done) -> None:
            reply(tier.core.arena_reply())

        def done(reply: object) -> None:
            if not isinstance(reply, ArenaReply):
                self.step(disk.ArenaFailed("0"))
                return
            if reply.slot_bytes:
                self._arena = tier.arenas[reply.epoch]
            self.step(disk.ArenaKnown(reply))

        self.bus.request(self, tier, serve, done, limit_ms=VERB_MS)

    def _ask_host_snapshot(self) -> None:
        tier = self.peers.host_tier

        def serve(reply: Done) -> None:
            reply(tier.core.snapshot())

        def done(reply: object) -> None:
            if isinstance(reply, SnapshotReply):
                self.step(disk.HostSnapshot("0", reply))

        self.bus.request(self, tier, serve, done, limit_ms=VERB_MS)

    def _lease(self, effect: disk.LeaseHost) -> None:
        tier = self.peers.host_tier

        def done(reply: object) -> None:
            if isinstance(reply, LeaseReply):
                self.step(disk.Leased(effect.write, reply))
            else:
                assert isinstance(reply, ErrorBody | Failure)
                self.step(disk.LeaseFailed(effect.write, reply.code))

        def serve(reply: Done) -> None:
            tier.ask(host.LeaseAsked(self.world.steps, effect.request), reply)

        self.bus.request(self, tier, serve, done, limit_ms=VERB_MS)

    def _release(self, effect: disk.ReleaseHost) -> None:
        tier = self.peers.host_tier
        request = ReleaseRequest(lease=effect.lease)

        def done(reply: object) -> None:
            valid = isinstance(reply, ReleaseReply) and reply.valid
            self.step(disk.Released(effect.write, valid))

        def serve(reply: Done) -> None:
            tier.ask(host.ReleaseAsked(self.world.steps, request), reply)

        self.bus.request(self, tier, serve, done, limit_ms=VERB_MS)

    def _write(self, effect: disk.WriteSlots) -> None:
        assert self._arena is not None
        duration_ms = self.world.transfer_ms("write")
        self.store.dirty.update(effect.targets)
        copy(self, (self._arena, effect.sources), (self.store.file, effect.targets), duration_ms)
        failed = not self.world.calm and self.world.rng.random() < self.world.plan.loss
        ended = disk.WriteFailed(effect.write, "io") if failed else disk.Written(effect.write)
        self.later(duration_ms, lambda: self.step(ended))

    def _read(self, effect: disk.ReadSlots) -> None:
        """Bytes may be late, but nothing is reported before the last one is there."""
        assert self._arena is not None
        arena, left_ms = self._arena, effect.until_ms - self.world.now_ms
        duration_ms = self.world.transfer_ms("read")
        copy(self, (self.store.file, effect.sources), (arena, effect.targets), duration_ms)
        if duration_ms > left_ms:
            failed = disk.ReadFailed(effect.read, "transfer_timeout")
            self.world.marks["read late"] += 1
            self.later(duration_ms, lambda: self.step(failed))
            return
        self.later(duration_ms, lambda: self._read_landed(effect, arena))

    def _read_landed(self, effect: disk.ReadSlots, arena: Memory) -> None:
        """The bytes are there; summing them up takes a while."""
        self.step(disk.ReadLanded(effect.read))
        self.later(self.world.rng.randint(0, 3), lambda: self._read_ended(effect, arena))

    def _read_ended(self, effect: disk.ReadSlots, arena: Memory) -> None:
        sums = [arena.checksum(slot) for slot in effect.targets]
        intact = tuple(
            found == block.checksum or not self.compares
            for found, block in zip(sums, effect.blocks, strict=True)
        )
        self.world.marks["disk block corrupt"] += len(intact) - sum(intact)
        if arena is self.peers.host_tier.arena:
            self._check_corrupt(effect, arena, intact)
        self.step(disk.ReadDone(effect.read, intact))

    def _check_corrupt(self, effect: disk.ReadSlots, arena: Memory, intact: Sequence[bool]) -> None:
        """After a crash the journal may name what was never written; else all has a cause."""
        seen = [
            arena.slots[slot]
            for slot, block, whole in zip(effect.targets, effect.blocks, intact, strict=True)
            if not whole and block.hash not in self._recovered
        ]
        invariants.check_corrupt(seen)


def _is_host(event: Event) -> bool:
    return event.source == HOST_TIER
