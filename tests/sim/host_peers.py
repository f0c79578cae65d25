"""What a host tier of the simulation wants of others: questions to the index, and pulls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvbm_common.checksum import combined_checksum
from kvbm_common.wire.slot_entries import LeasedSlot
from kvbm_common.wire.verbs import ErrorBody, LeaseReply, LeaseRequest, ReleaseRequest
from kvbm_host_tier.core import messages as host
from kvbm_host_tier.core.peer_messages import (
    AskHolders,
    HoldersTold,
    PeerId,
    PeerJoined,
    PeerLeft,
    PeerPulled,
    PeerPullFailed,
    PeerPullSettled,
    PulledBlock,
    PullFromPeer,
)

from tests.sim import invariants
from tests.sim.bus import Done, Failure
from tests.sim.memory import copy, units_of
from tests.sim.registry import News
from tests.sim.world import Call, Node

if TYPE_CHECKING:
    from tests.sim.host_tier import HostTier

LEASE_MARGIN_MS = 1_000
HOST_TIER = "host-tier-"
Leased = list[tuple[int, LeasedSlot]]


@dataclass(frozen=True, slots=True)
class Met:
    """A peer's arena, as it was found."""

    epoch: int
    reader: Reader | None
    """The life of our own reader that has met it."""


class Reader:
    """A life of the process that reads other hosts' arenas: its copies end with it."""

    def __init__(self, node: Node) -> None:
        self._node, self.world = node, node.world
        self._is_up = True

    def later(self, delay_ms: float, call: Call) -> None:
        """Call back if this life still lasts, and the host tier's."""
        self._node.later(delay_ms, lambda: call() if self._is_up else None)

    def die(self) -> None:
        """End: nothing more is written."""
        self._is_up = False


class HostPeers:
    """As PeerClient, and the reader process."""

    def __init__(self, node: HostTier) -> None:
        self._node, self._world = node, node.world
        self._met: dict[PeerId, Met] = {}
        self._reader = Reader(node)
        self._reading: dict[int, Callable[[], None]] = {}
        """Pull that may still write → what its reader's death does to it."""
        self.is_open = False
        """Peers may read this arena."""

    def open_door(self) -> None:
        """Let peers read, as soon as the reader process is there."""
        self._node.later(self._world.delay(30), self._opened)

    def _opened(self) -> None:
        self.is_open = True

    def changed(self, peer: PeerId, news: News) -> None:
        """Forget where a peer's arena was: it may live anew."""
        self._met.pop(peer, None)
        self._node.step(PeerJoined(peer) if news.is_there else PeerLeft(peer))

    def reader_dies(self) -> None:
        """Lose the reader process: what it was writing ends with it."""
        self._reader.die()
        self._reader = Reader(self._node)
        reading, self._reading = self._reading, {}
        for end in reading.values():
            end()

    # --- the index --------------------------------------------------------------------------

    def holders(self, ask: AskHolders) -> None:
        """Ask the index which other host tiers have the beginning of a run."""
        index = self._node.cluster.index

        def serve(reply: Done) -> None:
            reply(index.core.match(ask.names))

        def done(reply: object) -> None:
            holders: list[tuple[PeerId, int]] = []
            for match in reply if isinstance(reply, list) else ():
                ours = (match.host, match.source) == (self._node.host.name, self._node.source)
                if match.source.startswith(HOST_TIER) and not ours:
                    instance = match.source.removeprefix(HOST_TIER)
                    holders.append((PeerId(match.host, instance), match.blocks))
            found = tuple(holders) if isinstance(reply, list) else None
            self._node.step(HoldersTold(ask.question, found))

        self._node.bus.request(self._node, index, serve, done, limit_ms=ask.deadline_ms)

    # --- pulls ------------------------------------------------------------------------------

    def pull(self, pull: PullFromPeer) -> None:
        """Meet the peer, lease, read, sum up."""
        peer = self._tier_of(pull.peer)
        until_ms = self._world.now + pull.deadline_ms
        met = self._met.get(pull.peer)
        if met is not None and met.reader is self._reader:
            self._lease(pull, peer, met, until_ms)
            return

        def serve(reply: Done) -> None:
            closed = ErrorBody(code="door_closed", message="")
            reply(Met(peer.epoch, None) if peer.peers.is_open else closed)

        def done(reply: object) -> None:
            if not isinstance(reply, Met):
                assert isinstance(reply, ErrorBody | Failure)
                self._fail(pull, reply.code)
                return
            met = self._met[pull.peer] = Met(reply.epoch, self._reader)
            self._lease(pull, peer, met, until_ms)

        self._node.bus.request(self._node, peer, serve, done, limit_ms=pull.deadline_ms)

    def _lease(self, pull: PullFromPeer, peer: HostTier, met: Met, until_ms: float) -> None:
        left_ms = max(1, int(until_ms - self._world.now))
        request = LeaseRequest(
            owner=self._node.name,
            epoch=met.epoch,
            hashes=[name.hex() for name in pull.names],
            lease_ms=left_ms + LEASE_MARGIN_MS,
        )

        def serve(reply: Done) -> None:
            peer.ask(host.LeaseAsked(peer.next_verb(), request), reply)

        def done(reply: object) -> None:
            if isinstance(reply, LeaseReply):
                self._world.marks["peer's lease over its share"] += bool(reply.over_share)
                self._read(pull, peer, met, reply, until_ms)
                return
            assert isinstance(reply, ErrorBody | Failure)
            if isinstance(reply, ErrorBody):  # Another life, most likely.
                self._met.pop(pull.peer, None)
            self._fail(pull, reply.code)

        self._node.bus.request(self._node, peer, serve, done, limit_ms=left_ms)

    def _read(
        self, pull: PullFromPeer, peer: HostTier, met: Met, lease: LeaseReply, until_ms: float
    ) -> None:
        slot_of = {name.hex(): slot for name, slot in zip(pull.names, pull.slots, strict=True)}
        fits = [one for one in lease.slots if one.bytes <= pull.slot_bytes]
        wanted = [(slot_of[one.hash], one) for one in fits]
        if not wanted:
            self._node.step(PeerPulled(pull.pull, (), lease.lease))
            return
        theirs, ours = self._node.cluster.arenas[met.epoch], self._node.arena
        duration_ms = self._world.transfer_ms("peer")
        sources = (theirs, [theirs.whole(one.slot, units_of(one.bytes)) for _, one in wanted])
        targets = (ours, [ours.whole(slot, units_of(one.bytes)) for slot, one in wanted])
        copy(self._reader, sources, targets, duration_ms)
        self._reading[pull.pull] = partial(self._fail, pull, "reader_closed", lease=lease.lease)
        if self._world.now + duration_ms > until_ms:
            self._world.marks["peer read late"] += 1
            late = partial(self._late, pull, lease.lease, duration_ms)
            self._reader.later(max(0.0, until_ms - self._world.now), late)
            return
        life = peer.life

        def end() -> None:
            del self._reading[pull.pull]
            if not peer.up or peer.life != life:
                self._met.pop(pull.peer, None)
                self._fail(pull, "read_failed", lease=lease.lease)
                return
            self._arrived(pull, wanted, lease.lease)

        self._reader.later(duration_ms, end)

    def _late(self, pull: PullFromPeer, lease: int, duration_ms: float) -> None:
        """Give up a read that hangs; its last bytes land later, if its reader lives."""
        self._reading[pull.pull] = partial(self._settled, pull.pull)
        self._reader.later(duration_ms, partial(self._landed, pull.pull))
        self._fail(pull, "transfer_timeout", lease=lease, settled=False)

    def _landed(self, pull: int) -> None:
        del self._reading[pull]
        self._settled(pull)

    def _settled(self, pull: int) -> None:
        self._node.step(PeerPullSettled(pull))

    def _arrived(self, pull: PullFromPeer, wanted: Leased, lease: int) -> None:
        arena = self._node.arena
        blocks: list[PulledBlock] = []
        self._garble([slot for slot, _ in wanted])
        for slot, leased in wanted:
            units = units_of(leased.bytes)
            blocks.append(PulledBlock(slot, leased, arena.sums(slot, units)))
            if combined_checksum(blocks[-1].sums) != leased.checksum:
                self._world.marks["peer block corrupt"] += 1
                name = pull.names[pull.slots.index(slot)]
                invariants.check_corrupt_block(name, arena.content(slot, units))
        self._world.marks["blocks from peer"] += len(blocks)
        self._node.step(PeerPulled(pull.pull, tuple(blocks), lease))
        self._node.check_arrived(list(zip(pull.names, pull.slots, strict=True)))

    def _garble(self, slots: list[int]) -> None:
        """Change bytes that were on their way, now and then."""
        if not self._world.calm and self._world.rng.random() < self._world.plan.garbled:
            self._node.arena.rot(self._world.rng.choice(slots))

    def _fail(
        self, pull: PullFromPeer, reason: str, *, lease: int = 0, settled: bool = True
    ) -> None:
        self._world.marks[f"peer pull failed: {reason}"] += 1
        self._node.step(PeerPullFailed(pull.pull, reason, settled, lease))

    def release(self, peer: PeerId, lease: int) -> None:
        """Give a lease back, if that works."""
        tier, request = self._tier_of(peer), ReleaseRequest(lease=lease)

        def serve(reply: Done) -> None:
            tier.ask(host.ReleaseAsked(tier.next_verb(), request), reply)

        self._node.bus.request(self._node, tier, serve, lambda _: None, limit_ms=1_000)

    def _tier_of(self, peer: PeerId) -> HostTier:
        return self._node.cluster.hosts[peer.host].host_tiers[peer.instance]
