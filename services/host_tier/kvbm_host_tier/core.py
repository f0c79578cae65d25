"""The host tier's core (G2): a synchronous machine that owns the arena's slots and leases.

`step` is the only door. It takes what the shell has heard and returns what the shell shall do; it
reads no clock and does no IO. The paths are in `offload` (G1 → G2) and `onboard` (G2 → G1); who is
attached is in `engines`; slots, leases and announcements are in `tier`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import assert_never

from kvbm_common.errors import KvbmError
from kvbm_common.identity import (
    IdentityError,
    SequenceHash,
    hashes_from_hex,
    unpack_hashes,
)
from kvbm_common.tier_admin import TierAdmin
from kvbm_common.wire.admin import PrefetchRequest
from kvbm_common.wire.local import (
    Alive,
    Beat,
    Bye,
    Confirm,
    Hello,
    Lookup,
    Outcome,
    Refused,
    Release,
    ToHostTier,
)
from kvbm_common.wire.verbs import (
    MATCH_BLOCKS_MAX,
    ArenaReply,
    ErrorBody,
    LeasedSlot,
    LeaseReply,
    LeaseRequest,
    Offer,
    ReleaseReply,
    ReleaseRequest,
    SnapshotReply,
    StatsReply,
)

from kvbm_host_tier.engines import Engine, Engines
from kvbm_host_tier.messages import (
    AdminAsked,
    Answer,
    ArenaInfo,
    ArenaMade,
    ArenaRefused,
    DiskEvent,
    DiskLost,
    DiskSeen,
    DiskSnapshot,
    Effect,
    EngineId,
    FatesTold,
    FillDone,
    FillFailed,
    FromEngine,
    Input,
    LeaseAsked,
    OfferReceived,
    PeerAttached,
    PeerFailed,
    Publish,
    PullDone,
    PullFailed,
    PullSettled,
    ReleaseAsked,
    Tick,
    ToEngine,
)
from kvbm_host_tier.offload import Offload
from kvbm_host_tier.onboard import Onboard
from kvbm_host_tier.peer_messages import (
    HoldersTold,
    PeerInput,
    PeerJoined,
    PeerLeft,
    PeerPulled,
    PeerPullFailed,
    PeerPullSettled,
)
from kvbm_host_tier.placement import Placement
from kvbm_host_tier.shard_messages import (
    FrontTaken,
    Leaving,
    MapTold,
    MemberEntered,
    MemberGone,
)
from kvbm_host_tier.sharding import Sharding
from kvbm_host_tier.tier import Limits, Tier

LEASE_MS_MAX = 60_000
"""Nobody pins a slot for longer without asking again."""
COPY = "copy"
"""The reason of the leases that the verb grants, and the only ones that it takes back."""


class HostTierCore:
    """One host tier instance in one life (`epoch`)."""

    def __init__(
        self,
        *,
        host: str,
        instance: str,
        epoch: int,
        arena: ArenaInfo,
        limits: Limits | None = None,
        policy: str = "lru",
        staging: bool = False,
    ) -> None:
        self.instance = instance
        self.tier = Tier(
            host=host,
            source=f"host-tier-{instance}",
            epoch=epoch,
            arena=arena,
            limits=limits or Limits(),
            policy=policy,
            staging=staging,
        )
        self.engines = Engines(self.tier)
        self.sharding = Sharding(instance)
        self.placement = Placement(self.tier, self.engines, self.sharding)
        self.offload = Offload(self.tier, self.engines)
        self.onboard = Onboard(self.tier)
        self.admin = TierAdmin(self.tier)

    def start(self) -> list[Effect]:
        """The first effects of a life: announce that nothing of the life before is left."""
        return [Publish(self.tier.announcer.cleared("start"))]

    def stop(self) -> list[Effect]:
        """The last effects: the contents die with the process."""
        return [Publish(self.tier.announcer.cleared("stop"))]

    def step(self, event: Input, now_ms: int) -> Sequence[Effect]:
        """Take one input; returns the effects, in order."""
        self.tier.now_ms = now_ms
        self.tier.started_ms = self.tier.started_ms or now_ms
        self.onboard.explain.settle()  # Before anything changes: as it was when it was answered.
        try:
            self._handle(event, now_ms)
        except IdentityError as error:
            self._reject(event, error)
        self.placement.advance()
        effects, self.tier.effects = self.tier.effects, []
        return effects

    def _handle(self, event: Input, now_ms: int) -> None:
        match event:
            case FromEngine(connection, message):
                self._from_engine(connection, message, now_ms)
            case OfferReceived(offer):
                self._offered(offer, now_ms)
            case ArenaMade(arena):
                self.tier.arena_made(arena)
            case ArenaRefused(reason):
                self.tier.arena_refused(reason)
            case PeerAttached():
                self.engines.peer_attached(event)
            case PeerFailed():
                self.engines.peer_failed(event)
            case PullDone():
                self.offload.pull_done(event, now_ms)
            case PullFailed():
                self.offload.pull_failed(event, now_ms)
            case PullSettled(pull):
                self.offload.pull_settled(pull)
            case DiskEvent():
                self._disk_event(event, now_ms)
            case DiskSeen(instance, tier):
                self.tier.emit(*self.tier.below.views[tier].seen(instance))
            case DiskLost(instance, tier):
                self.tier.below.views[tier].lost(instance)
            case DiskSnapshot(instance, reply, tier):
                self.tier.below.views[tier].snapshot(instance, reply)
            case FillDone():
                self.onboard.fill_done(event, now_ms)
            case FillFailed():
                self.onboard.fill_failed(event, now_ms)
            case LeaseAsked(reply_to, request):
                self.tier.emit(Answer(reply_to, self._lease(request, now_ms)))
            case ReleaseAsked(reply_to, request):
                self.tier.emit(Answer(reply_to, self._release(request)))
            case AdminAsked():
                self._admin(event, now_ms)
            case FatesTold():
                self.onboard.explain.told(event)
            case Tick():
                self._tick(now_ms)
            case MemberEntered() | MemberGone() | MapTold() | FrontTaken() | Leaving():
                self.placement.handle(event)
            case _:
                self._peers(event, now_ms)

    def _offered(self, offer: Offer, now_ms: int) -> None:
        """Every host tier of the host hears an offer; who does not serve its engine is silent."""
        attached = self.engines.get(offer.engine, offer.incarnation) is not None
        if attached or not self.placement.is_others(offer.engine):
            self.offload.offered(offer, now_ms)

    def _peers(self, event: PeerInput, now_ms: int) -> None:
        match event:
            case PeerJoined(peer):
                self.onboard.peers.joined(peer)
            case PeerLeft(peer):
                self.onboard.peers.left(peer)
            case HoldersTold():
                self.onboard.holders_told(event, now_ms)
            case PeerPulled():
                self.onboard.peer_pulled(event, now_ms)
            case PeerPullFailed():
                self.onboard.peer_pull_failed(event, now_ms)
            case PeerPullSettled(pull):
                self.onboard.peers.settled(pull)
            case _:
                assert_never(event)

    def _admin(self, asked: AdminAsked, now_ms: int) -> None:
        if not isinstance(asked.request, PrefetchRequest):
            answer = self.admin.answer(asked.verb, asked.request, now_ms)
            self.tier.emit(Answer(asked.reply_to, answer))
            return
        hashes = hashes_from_hex(asked.request.hashes)
        if len(set(hashes)) != len(hashes):
            raise IdentityError("a chain cannot hold the same block twice")
        self.onboard.prefetch(asked.reply_to, hashes, now_ms, deadline_ms=asked.request.deadline_ms)

    def _reject(self, event: Input, error: KvbmError) -> None:
        """A peer's mistake that only a look inside the message could find."""
        self.tier.counts["dropped.malformed"] += 1
        match event:
            case FromEngine(connection, message):
                about = type(message).__name__.lower()
                refusal = Refused(about=about, code=error.code, message=str(error), field="hashes")
                self.tier.emit(ToEngine(connection, refusal))
            case LeaseAsked(reply_to) | ReleaseAsked(reply_to) | AdminAsked(reply_to):
                self.tier.emit(Answer(reply_to, ErrorBody(code=error.code, message=str(error))))
            case _:
                pass

    # --- engines ----------------------------------------------------------------------------

    def _from_engine(self, connection: bytes, message: ToHostTier, now_ms: int) -> None:
        if isinstance(message, Hello):
            if self.placement.sends_away(connection, message):
                return
            ended = self.engines.hello(connection, message, now_ms)
            if ended is not None:
                self._end_engine(ended)
            return
        engine = self.engines.get(message.engine, message.incarnation)
        if engine is None or not engine.heard(connection, now_ms):
            self.tier.counts["refused.unknown_engine"] += 1
            about = type(message).__name__.lower()
            text = "say hello first: this host tier does not know you (any more)"
            self.tier.emit(
                ToEngine(connection, Refused(about=about, code="unknown_engine", message=text))
            )
            return
        match message:
            case Lookup():
                self._lookup(connection, message, engine, now_ms)
            case Release():
                self._engine_release(message)
            case Outcome():
                self.onboard.explain.told_outcome(message, now_ms)
            case Confirm():
                self.offload.confirmed(message, now_ms)
            case Beat():
                self.tier.emit(ToEngine(connection, Alive(epoch=self.tier.announcer.epoch)))
                self.placement.remind(engine, connection, now_ms)
            case Bye():
                self.engines.end(engine.id)
                self.placement.has_left(engine)
                self._end_engine(engine.id)
                self.tier.end_leases(self.tier.leases.end_owner(str(engine.id)))
            case _:
                assert_never(message)

    def _lookup(self, connection: bytes, lookup: Lookup, engine: Engine, now_ms: int) -> None:
        hashes = unpack_hashes(lookup.hashes)
        if len(hashes) > MATCH_BLOCKS_MAX or len(lookup.namespace) != 32:
            raise IdentityError(f"a lookup has at most {MATCH_BLOCKS_MAX} hashes and a namespace")
        if len(set(hashes)) != len(hashes):
            raise IdentityError("a chain cannot hold the same block twice")
        block_tokens = engine.hello.namespace.block_tokens
        self.onboard.looked_up(
            connection, lookup, hashes, now_ms,
            block_tokens=block_tokens, block_bytes=engine.block_bytes,
        )  # fmt: skip

    def _engine_release(self, release: Release) -> None:
        owner = str(EngineId(release.engine, release.incarnation))
        lease = self.tier.leases.find(release.lease)
        if lease is None or lease.owner != owner:
            self.tier.counts["released_late"] += 1
            return
        self.tier.leases.release(lease.id)
        table = self.tier.table
        corrupt = [
            table.block(lease.slots[index]).hash
            for index in release.corrupt
            if index < len(lease.slots)
        ]
        self.tier.end_leases([lease])
        self.tier.remove(corrupt, "corrupt")

    def _end_engine(self, engine_id: EngineId) -> None:
        """Drop its offers and lookups. Its leases run on to their deadlines, unless it said Bye.

        Silence does not prove death: a worker of a stalled engine may still be reading, and will
        believe what it has read as long as its lease's deadline has not passed.
        """
        self.offload.end_engine(engine_id)
        self.onboard.end_engine(engine_id)

    # --- the disk tier ----------------------------------------------------------------------

    def _disk_event(self, disk: DiskEvent, now_ms: int) -> None:
        view = self.tier.below.views[disk.tier]
        known = view.epoch(disk.instance)
        new, questions = view.apply(disk.instance, disk.event, now_ms)
        self.tier.emit(*questions)
        if self.tier.staging and disk.tier == "disk":
            self.tier.counts["offload_blocks_d2d"] += new
        # A `cleared` is not enough: a dying life sends one, too, while its reads still fly.
        if 0 < known < disk.event.epoch:
            self.onboard.disk_restarted(disk.tier, disk.instance)

    def _lease(self, request: LeaseRequest, now_ms: int) -> LeaseReply | ErrorBody:
        if request.epoch != self.tier.announcer.epoch:
            return ErrorBody(code="stale_epoch", message="the arena is another one", field="epoch")
        table = self.tier.table
        slots: list[int] = []
        for name in hashes_from_hex(request.hashes):
            slot = table.find(name)
            if slot is not None and slot not in slots:
                table.pin(slot)
                slots.append(slot)
        deadline_ms = now_ms + min(request.lease_ms, LEASE_MS_MAX)
        lease = self.tier.leases.grant(request.owner, COPY, tuple(slots), deadline_ms=deadline_ms)
        return LeaseReply(lease=lease.id, slots=[self._leased(slot) for slot in slots])

    def _leased(self, slot: int) -> LeasedSlot:
        block = self.tier.table.block(slot)
        return LeasedSlot(
            hash=block.hash.hex(),
            parent=block.parent.hex(),
            namespace=block.namespace.hex(),
            slot=slot,
            checksum=block.checksum,
            bytes=block.bytes,
        )

    def _release(self, request: ReleaseRequest) -> ReleaseReply:
        lease = self.tier.leases.find(request.lease)
        if lease is None or lease.reason != COPY:
            return ReleaseReply(valid=False)
        self.tier.leases.release(lease.id)
        self.tier.end_leases([lease])
        return ReleaseReply(valid=True)

    # --- time -------------------------------------------------------------------------------

    def _tick(self, now_ms: int) -> None:
        for engine_id in self.engines.lost(now_ms):
            self.tier.counts["engines_lost"] += 1
            self.engines.end(engine_id)
            self.engines.pardon(engine_id)
            self._end_engine(engine_id)
        self.tier.end_leases(self.tier.leases.expire(now_ms))
        self.offload.tick(now_ms)
        self.onboard.tick(now_ms)
        self.onboard.explain.tick(now_ms)
        self.onboard.peers.open_door()

    # --- questions --------------------------------------------------------------------------

    def arena_reply(self) -> ArenaReply:
        """Where the arena is and how it is cut."""
        tier = self.tier
        return ArenaReply(
            path=tier.arena.path,
            bytes=tier.arena.capacity_bytes,
            slot_bytes=tier.slot_bytes,
            slot_count=tier.table.slot_count,
            epoch=tier.announcer.epoch,
            instance=self.instance,
            staging=tier.staging,
        )

    def snapshot(self) -> SnapshotReply:
        """Everything that is committed, as of the last event."""
        return self.tier.announcer.snapshot(self.tier.own_blocks())

    def snapshot_pages(self) -> Sequence[Callable[[], SnapshotReply]]:
        """The same in pages, to be made later: whoever asks is answered by one at a time."""
        return self.tier.announcer.moment(self.tier.own_blocks())

    def statistics(self, now_ms: int) -> StatsReply:
        """Figures for metrics and admin API."""
        tier = self.tier
        figures = {name: float(value) for name, value in tier.counts.items()}
        figures |= _hit_rates(tier)
        figures["leases_expired"] = float(tier.leases.expired_count)
        figures["slots_unsettled"] = float(self.offload.unsettled_count)
        figures["draining"] = float(tier.draining)
        figures |= self.onboard.peers.figures()
        figures["shards"] = float(len(self.sharding.map.endpoints))
        figures["front"] = float(self.sharding.is_front)
        figures["guests"] = float(len(tier.guests))
        figures["offers"] = float(len(self.offload))
        figures["explained_requests"] = float(len(self.onboard.explain.kept))
        figures["lookups_waiting"] = float(len(self.onboard))
        for medium, view in tier.below.views.items():
            figures[f"known_on_{medium}"] = float(len(view))
        return StatsReply(
            kind="host-tier",
            host=tier.announcer.host,
            instance=self.instance,
            epoch=tier.announcer.epoch,
            ready=True,
            seq=tier.announcer.seq,
            tier="host",
            slots=tier.table.counts(),
            slot_bytes=tier.slot_bytes,
            block_bytes=tier.table.block_bytes,
            policy=tier.policy_name,
            leases=len(tier.leases),
            figures=figures,
            workers=self.engines.statistics(now_ms),
        )

    def story(self, name: SequenceHash) -> list[str]:
        """What happened to a block lately."""
        return self.tier.diary.story(name)

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        tier = self.tier
        tier.table.check()
        tier.leases.check()
        self.offload.check()
        self.onboard.check()
        self.sharding.check()
        offload, onboard = self.offload.staged_slots(), self.onboard.staged_slots()
        assert not offload & onboard, "a staged slot has two owners"
        assert offload | onboard == tier.table.staged(), "a staged slot has no owner"
        pins = Counter(slot for lease in tier.leases.all() for slot in lease.slots)
        pins.update(self.onboard.pinned_slots())
        assert pins == tier.table.pins(), "a pinned slot has no lease"
        lost = [name for name in tier.guests if tier.table.find(name) is None]
        assert not lost, "a guest is not here"


def _hit_rates(tier: Tier) -> dict[str, float]:
    asked = sum(entry[0] for entry in tier.hit_window)
    if not asked:
        return dict.fromkeys(
            ("host_cache_hit_rate", "disk_cache_hit_rate", "object_cache_hit_rate",
             "lookups_windowed"), 0.0
        )  # fmt: skip
    return {
        "host_cache_hit_rate": sum(entry[1] for entry in tier.hit_window) / asked,
        "disk_cache_hit_rate": sum(entry[2] for entry in tier.hit_window) / asked,
        "object_cache_hit_rate": sum(entry[3] for entry in tier.hit_window) / asked,
        "lookups_windowed": float(len(tier.hit_window)),
    }
