"""Questions to the index, over NATS, and pulls from peers, through the peer reader."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from kvbm_common.errors import BusUnavailable, DeadlineExceeded, KvbmError, RequestFailed
from kvbm_common.identity import SequenceHash
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.replicas import ask_any
from kvbm_common.nixl.transfers import TransferTimeout
from kvbm_common.registry.records import Changed, Left, RegistryEvent
from kvbm_common.runtime.loop import monotonic_ms
from kvbm_common.runtime.metrics import Metrics, TransferFigures
from kvbm_common.tier.layout import UNIT_BYTES
from kvbm_common.tier.parts import is_divisible
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.index_verbs import MatchReply, MatchRequest
from kvbm_common.wire.slot_entries import LeasedSlot
from kvbm_common.wire.verbs import (
    DoorReply,
    DoorRequest,
    LeaseReply,
    LeaseRequest,
    ReleaseRequest,
    verb_subject,
)

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
from kvbm_host_tier.shell.peer_reader import PeerReader, PeerReaderClosed, ReadFailed

INDEX_PATIENCE_S = 0.1
"""NATS gives a question to one replica of the index, which may hang. After so long others are
asked by name, in time for the question's deadline."""
INDEXES_MAX = 3
"""Replicas of the index that are asked by name: a fleet's questions do not all go to each."""
LEASE_MARGIN_MS = 1_000
"""A lease outlives the read that it is for: who copies ends first."""
RELEASE_DEADLINE_S = 1.0
"""A lease that cannot be given back ends by itself."""
HOST_TIER = "host-tier-"
ADDRESS_MAX = 2**64 - 1
"""The reader process reads at no larger address."""

_door_reply: JsonCodec[DoorReply] = JsonCodec(DoorReply)
_lease_reply: JsonCodec[LeaseReply] = JsonCodec(LeaseReply)
_match_reply: JsonCodec[MatchReply] = JsonCodec(MatchReply)


@dataclass(frozen=True, slots=True)
class Known:
    """A peer's arena as the present peer reader process can read it."""

    name: str
    """NIXL's."""
    reply: DoorReply
    life: int


class PeerClient:
    """Everything that one host tier wants of others. Wherever it waits there is a deadline."""

    def __init__(
        self, bus: Bus, reader: PeerReader, *, host: str, source: str, counters: Metrics
    ) -> None:
        self._bus, self._reader, self._host, self._source = bus, reader, host, source
        self._owner = f"{source}@{host}"
        self._token = secrets.token_hex(16)
        """The secret that gives this host tier's leases back at peers: nothing else does."""
        self._figures = TransferFigures(counters)
        self._unreleased = counters.counter(
            "kvbm_peer_leases_unreleased_total",
            "Leases at peers that ended by their deadline, because they could not be given back.",
            labels=("reason",),
        )
        self._known: dict[PeerId, Known] = {}
        self._names: dict[tuple[int, bytes], str] = {}
        """Number of the peer reader process, and metadata of a peer → NIXL's name of the peer."""
        self._indexes: set[str] = set()
        """Subjects on which the replicas of the index answer by name."""
        self._meeting: dict[PeerId, asyncio.Lock] = {}
        self._pull_of: dict[int, int] = {}
        """Read that may still write → the pull that it is for."""
        self.on_settled: Callable[[PeerPullSettled], None] = lambda _: None
        reader.on_settled = self._settled

    def changed(self, peer: PeerId, event: RegistryEvent) -> PeerJoined | PeerLeft | None:
        """Forget a peer that has left or begun a new life: it is asked again where its arena is.

        Returns the core's input; None where an entry changes within a life, as when the peer's
        memory is cut. NIXL forgets a peer only when no read hangs: a wire may heal, and the same
        peer return.
        """
        if isinstance(event, Changed) and event.before.epoch == event.record.epoch:
            return None
        self._forget(peer, gone=not self._reader.any_may_write)
        return PeerLeft(peer) if isinstance(event, Left) else PeerJoined(peer)

    def _forget(self, peer: PeerId, *, gone: bool) -> None:
        known = self._known.pop(peer, None)
        if known is not None and gone and known.life == self._reader.life:
            self._names.pop((known.life, known.reply.agent), None)
            self._reader.remove_peer(known.name)

    # --- the index --------------------------------------------------------------------------

    async def holders(self, ask: AskHolders) -> HoldersTold:
        """Ask the index which other host tiers have the beginning of a run."""
        if not self._bus.connected:
            return HoldersTold(ask.question, None)
        request = MatchRequest(hashes=[name.hex() for name in ask.names])
        try:
            payload = await ask_any(
                self._bus,
                verb_subject("index", "match"),
                msgspec.json.encode(request),
                by_name=self._some_indexes,
                patience_s=min(INDEX_PATIENCE_S, ask.deadline_ms / 1000),
                deadline_s=ask.deadline_ms / 1000,
            )
            reply = _match_reply.decode(payload)
        except KvbmError:
            return HoldersTold(ask.question, None)
        holders = tuple(
            (PeerId(match.host, match.source.removeprefix(HOST_TIER)), match.blocks)
            for match in reply.matches
            if match.source.startswith(HOST_TIER)
            and (match.host, match.source) != (self._host, self._source)
        )
        return HoldersTold(ask.question, holders)

    def index_changed(self, event: RegistryEvent) -> None:
        """Take what the registry says of a replica of the index."""
        record = event.record
        subject = verb_subject("index", "match", host=record.host, instance=record.instance)
        if isinstance(event, Left):
            self._indexes.discard(subject)
        else:
            self._indexes.add(subject)

    async def _some_indexes(self) -> list[str]:
        """Return the subjects of a few replicas of the index, others each time."""
        return random.sample(sorted(self._indexes), min(INDEXES_MAX, len(self._indexes)))

    # --- pulls ------------------------------------------------------------------------------

    async def pull(self, pull: PullFromPeer) -> PeerPulled | PeerPullFailed:
        """Lease, read, sum up."""
        until_ms = monotonic_ms() + pull.deadline_ms
        if not self._bus.connected:
            return PeerPullFailed(pull.pull, BusUnavailable.code, settled=True)
        if self._reader.opened is None:
            return PeerPullFailed(pull.pull, PeerReaderClosed.code, settled=True)
        try:
            async with asyncio.timeout(_left_s(until_ms)):
                known = await self._meet(pull.peer, until_ms)
            lease = await self._lease(pull, known, until_ms)
        except TimeoutError:
            return PeerPullFailed(pull.pull, DeadlineExceeded.code, settled=True)
        except KvbmError as error:
            if isinstance(error, RequestFailed):  # Another life, most likely.
                self._forget(pull.peer, gone=False)
            return PeerPullFailed(pull.pull, error.code, settled=True)
        try:
            return await self._read(pull, known, lease, until_ms)
        except (PeerReaderClosed, ReadFailed) as error:
            if error.code != TransferTimeout.code:  # Late is not gone.
                self._forget(pull.peer, gone=True)
            settled = not isinstance(error, ReadFailed) or not self._reader.may_write(error.read)
            if isinstance(error, ReadFailed) and not settled:
                self._pull_of[error.read] = pull.pull
            return PeerPullFailed(pull.pull, error.code, settled=settled, lease=lease.lease)

    async def release(self, peer: PeerId, lease: int) -> None:
        """Give a lease back, if that works."""
        request = msgspec.json.encode(ReleaseRequest(lease=lease, token=self._token))
        try:
            await self._ask(peer, "release", request, deadline_s=RELEASE_DEADLINE_S)
        except KvbmError as error:
            self._unreleased.labels(reason=error.code).inc()

    async def _meet(self, peer: PeerId, until_ms: int) -> Known:
        """Return where a peer's arena is, as far as we know, or as it says."""
        async with self._meeting.setdefault(peer, asyncio.Lock()):
            known = self._known.get(peer)
            if known is not None and known.life == self._reader.life:
                return known
            life = self._reader.life
            left_s = _left_s(until_ms)
            payload = await self._ask(
                peer, "door", msgspec.json.encode(DoorRequest(any_size=True)), deadline_s=left_s
            )
            reply = _door_reply.decode(payload)
            name = self._names.get((life, reply.agent))
            if name is None:
                name = await self._reader.add_peer(reply.agent, deadline_s=_left_s(until_ms))
                self._names = {key: one for key, one in self._names.items() if key[0] == life}
                self._names[life, reply.agent] = name
            known = self._known[peer] = Known(name, reply, life)
            return known

    async def _lease(self, pull: PullFromPeer, known: Known, until_ms: int) -> LeaseReply:
        left_s = _left_s(until_ms)
        request = LeaseRequest(
            owner=self._owner,
            epoch=known.reply.epoch,
            hashes=[name.hex() for name in pull.names],
            lease_ms=int(left_s * 1000) + LEASE_MARGIN_MS,
            trace=pull.trace,
            token=self._token,
        )
        payload = await self._ask(
            pull.peer, "lease", msgspec.json.encode(request), deadline_s=left_s
        )
        return _lease_reply.decode(payload)

    async def _read(
        self, pull: PullFromPeer, known: Known, lease: LeaseReply, until_ms: int
    ) -> PeerPulled:
        wanted = readable(pull, known.reply, lease.slots)
        if not wanted:
            return PeerPulled(pull.pull, (), lease.lease)
        block_bytes = wanted[0][1].bytes
        arrived = await self._reader.read(
            known.name,
            [known.reply.address + leased.slot * known.reply.slot_bytes for _, leased in wanted],
            [slot * UNIT_BYTES for slot, _ in wanted],
            block_bytes=block_bytes,
            deadline_ms=until_ms - monotonic_ms(),
            parts=wanted[0][1].parts,
        )
        self._figures.observe("r2h", arrived.seconds, block_bytes * len(wanted))
        came = zip(wanted, arrived.sums, strict=True)
        blocks = tuple(PulledBlock(slot, leased, sums) for (slot, leased), sums in came)
        return PeerPulled(pull.pull, blocks, lease.lease)

    async def _ask(self, peer: PeerId, verb: str, payload: bytes, *, deadline_s: float) -> bytes:
        subject = verb_subject("host-tier", verb, host=peer.host, instance=peer.instance)
        return await self._bus.request(subject, payload, deadline_s=deadline_s)

    def _settled(self, read: int) -> None:
        pull = self._pull_of.pop(read, None)
        if pull is not None:
            self.on_settled(PeerPullSettled(pull))


def readable(
    pull: PullFromPeer, door: DoorReply, leased: Sequence[LeasedSlot]
) -> list[tuple[int, LeasedSlot]]:
    """Return what of a lease can be read into our slots.

    These are blocks that were asked for, inside both arenas. All are of one size and cut alike, as
    the blocks of one chain are.
    """
    slot_of: dict[SequenceHash, int] = dict(zip(pull.names, pull.slots, strict=True))
    room = min(door.slot_count * door.slot_bytes, ADDRESS_MAX - door.address)
    wanted: list[tuple[int, LeasedSlot]] = []
    for one in leased:
        slot = slot_of.pop(SequenceHash(bytes.fromhex(one.hash)), None)
        end = one.slot * door.slot_bytes + one.bytes
        fits = 0 < one.bytes <= pull.slot_bytes and end <= room
        if slot is not None and fits and is_divisible(one.bytes, one.parts):
            wanted.append((slot, one))
    return [one for one in wanted if _shape(one[1]) == _shape(wanted[0][1])]


def _shape(leased: LeasedSlot) -> tuple[int, int]:
    return leased.bytes, leased.parts


def _left_s(until_ms: int) -> float:
    return max(0.001, (until_ms - monotonic_ms()) / 1000)
