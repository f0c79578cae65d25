"""The host tier's core (G2): a synchronous machine that owns the arena's slots and leases.

`step` is the only way in. It takes what the shell has heard and returns what the shell shall do;
it reads no clock and does no IO. `view` is what the shell may read between two steps. The parts
are drawn and put together in `parts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import MappingProxyType
from typing import assert_never

from kvbm_common.errors import KvbmError
from kvbm_common.identity import IdentityError, SequenceHash, hashes_from_hex
from kvbm_common.tier.admin import TierAdmin
from kvbm_common.tier.announcer import Announcer
from kvbm_common.wire.admin import PrefetchRequest
from kvbm_common.wire.local import (
    Alive,
    Beat,
    Bye,
    Confirm,
    Hello,
    Lookup,
    Misses,
    Outcome,
    Refused,
    Release,
    ToHostTier,
)
from kvbm_common.wire.session_hint import SessionHint
from kvbm_common.wire.verbs import ErrorBody, Offer

from kvbm_host_tier.core.engines import Engine
from kvbm_host_tier.core.filter_messages import FilterFailed
from kvbm_host_tier.core.limits import HostTierLimits, Means
from kvbm_host_tier.core.messages import (
    AdminAsked,
    Answer,
    ArenaInfo,
    ArenaMade,
    ArenaRefused,
    DeparturesTold,
    Effect,
    EngineId,
    FillDone,
    FillFailed,
    FromEngine,
    Input,
    LeaseAsked,
    LowerEventsLost,
    LowerInput,
    LowerTierEvent,
    LowerTierJoined,
    LowerTierLeft,
    LowerTierSnapshot,
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
from kvbm_host_tier.core.parts import Parts
from kvbm_host_tier.core.peer_messages import (
    HoldersTold,
    PeerInput,
    PeerJoined,
    PeerLeft,
    PeerPulled,
    PeerPullFailed,
    PeerPullSettled,
)
from kvbm_host_tier.core.scrub_messages import ScrubDone, ScrubFailed
from kvbm_host_tier.core.shard_map import FrontTaken, Leaving, MapTold, MemberJoined, MemberLeft
from kvbm_host_tier.core.view import HostTierView
from kvbm_host_tier.core.well_formed import require_chain, require_lookup


class HostTierCore:
    """One host tier instance in one life (`epoch`)."""

    def __init__(
        self,
        *,
        host: str,
        instance: str,
        epoch: int,
        arena: ArenaInfo,
        limits: HostTierLimits | None = None,
        policy: str = "lru",
        staging: bool = False,
    ) -> None:
        self._now_ms, self._has_released = 0, False
        self._outbox: list[Effect] = []
        self._emit = self._outbox.append
        self._counts = Counter[str]()
        self._staging = staging
        means = Means(limits or HostTierLimits(), self._counts, self._emit)
        self._announcer = announcer = Announcer(
            host=host, source=f"host-tier-{instance}", tier="host", epoch=epoch
        )
        parts = Parts(announcer, instance, arena, means, policy=policy, staging=staging)
        self._engines, self._placement = parts.engines, parts.placement
        self._offload, self._onboard = parts.offload, parts.onboard
        self._held, self._arena, self._leases = parts.held, parts.arena, parts.leases
        self._fills, self._peers, self._below = parts.fills, parts.peers, parts.below
        self._explain, self._reasons = parts.explain, parts.reasons
        self._findable, self._filtered_lookups = parts.findable, parts.filtered_lookups
        self._admin = TierAdmin(parts.held, parts.leases.leases)
        self._hints, self._sharding, self._scrubber = parts.hints, parts.sharding, parts.scrubber
        self.view = HostTierView(
            instance=instance, is_staging=staging, counts=MappingProxyType(self._counts),
            _parts=parts,
        )  # fmt: skip

    def start(self) -> list[Effect]:
        """Return the first effects of a life: nothing of the life before is left."""
        assert self._announcer.seq == 0, "a life starts once"
        return [Publish(self._announcer.cleared("start"))]

    def stop(self) -> list[Effect]:
        """Return the last effects: the contents die with the process."""
        assert self._announcer.seq > 0, "this life has not started"
        return [Publish(self._announcer.cleared("stop"))]

    def step(self, event: Input, now_ms: int) -> Sequence[Effect]:
        """Take one input; returns the effects, in order."""
        assert now_ms >= self._now_ms, f"{now_ms} ms after {self._now_ms} ms"
        self._now_ms = now_ms
        self._reasons.started_ms = self._reasons.started_ms or now_ms
        self._settle(event)
        self._has_released = isinstance(event, FromEngine) and isinstance(event.message, Release)
        try:
            self._handle(event, now_ms)
        except IdentityError as error:
            self._reject(event, error)
        effects = [*self._findable.settle(is_complete=not self._peers.may_bring), *self._outbox]
        self._outbox.clear()
        return effects

    def settle(self) -> Sequence[Effect]:
        """Do what no answer waits for; returns the effects. Else the next step begins with it."""
        self._settle(None, may_unpin=not self._has_released)  # A lookup comes next, as a rule.
        effects = tuple(self._outbox)
        self._outbox.clear()
        return effects

    def _settle(self, before: Input | None, *, may_unpin: bool = True) -> None:
        """Do what is left; what pins of ended leases cost waits for the answers of lookups, too."""
        assert not self._outbox, f"effects of an earlier step are left: {self._outbox}"
        if self._explain.fresh:
            self._explain.settle()  # Before anything changes: as it was when it was answered.
        self._held.settle()
        is_urgent = isinstance(before, FromEngine) and isinstance(before.message, Lookup | Release)
        if (may_unpin and not is_urgent) or self._leases.must_settle:
            self._leases.settle()

    def _handle(self, event: Input, now_ms: int) -> None:
        match event:
            case FromEngine(connection, message):
                self._from_engine(connection, message, now_ms)
            case OfferReceived(offer):
                self._offered(offer, now_ms)
            case PullDone():
                self._offload.pull_done(event, now_ms)
            case PullFailed():
                self._offload.pull_failed(event, now_ms)
            case PullSettled(pull):
                self._offload.pull_settled(pull)
            case LowerTierEvent() | LowerTierJoined() | LowerTierLeft() | LowerTierSnapshot():
                self._lower_tier(event, now_ms)
            case LowerEventsLost():
                self._outbox += self._below.events_lost(now_ms)
            case FillDone():
                self._onboard.fill_done(event, now_ms)
            case FillFailed():
                self._onboard.fill_failed(event, now_ms)
            case LeaseAsked(reply_to, request):
                self._emit(Answer(reply_to, self._leases.lease_to_copy(request, now_ms)))
            case ReleaseAsked(reply_to, request):
                self._emit(Answer(reply_to, self._leases.release_copy(request)))
            case AdminAsked():
                self._administer(event, now_ms)
            case ArenaMade(arena):
                self._arena.made(arena)
            case ArenaRefused(reason, left):
                self._arena.refused(reason, left)
            case PeerAttached():
                self._engines.peer_attached(event)
            case PeerFailed():
                self._engines.peer_failed(event)
            case DeparturesTold():
                self._explain.told(event, now_ms)
            case FilterFailed(generation):
                self._findable.failed(generation, now_ms)
            case Tick():
                self._tick(now_ms)
            case MemberJoined() | MemberLeft() | MapTold() | FrontTaken() | Leaving():
                self._placement.handle(event)
            case ScrubDone():
                self._scrubber.done(event, now_ms)
            case ScrubFailed():
                self._scrubber.failed(event, now_ms)
            case _:
                self._from_peers(event, now_ms)

    def _from_peers(self, event: PeerInput, now_ms: int) -> None:
        match event:
            case PeerJoined(peer):
                self._peers.joined(peer)
            case PeerLeft(peer):
                self._peers.left(peer)
            case HoldersTold():
                self._onboard.holders_told(event, now_ms)
            case PeerPulled():
                self._onboard.peer_pulled(event, now_ms)
            case PeerPullFailed():
                self._onboard.peer_pull_failed(event, now_ms)
            case PeerPullSettled(pull):
                self._peers.settled(pull)
            case _:
                assert_never(event)

    def _administer(self, asked: AdminAsked, now_ms: int) -> None:
        assert asked.verb
        if isinstance(asked.request, PrefetchRequest):
            hashes = hashes_from_hex(asked.request.hashes)
            require_chain(hashes)
            self._onboard.prefetch(
                asked.reply_to, hashes, now_ms, deadline_ms=asked.request.deadline_ms
            )
            return
        answer = self._admin.answer(asked.verb, asked.request, now_ms)
        self._emit(Answer(asked.reply_to, answer))
        self._placement.advance()  # It may be draining now.

    def _reject(self, event: Input, error: KvbmError) -> None:
        """Refuse an input whose hashes are malformed: only a look inside could find that."""
        assert error.code
        self._counts["dropped.malformed"] += 1
        match event:
            case FromEngine(connection, message):
                about = type(message).__name__.lower()
                refusal = Refused(about=about, code=error.code, message=str(error), field="hashes")
                self._emit(ToEngine(connection, refusal))
            case LeaseAsked(reply_to) | ReleaseAsked(reply_to) | AdminAsked(reply_to):
                self._emit(Answer(reply_to, ErrorBody(code=error.code, message=str(error))))

    # --- engines ----------------------------------------------------------------------------

    def _offered(self, offer: Offer, now_ms: int) -> None:
        """Take an offer in, which every host tier of the host hears; one of them answers."""
        attached = self._engines.get(offer.engine, offer.incarnation) is not None
        if attached or not self._placement.is_others(offer.engine):
            self._offload.offered(offer, now_ms)

    def _from_engine(self, connection: bytes, message: ToHostTier, now_ms: int) -> None:
        if isinstance(message, Hello):
            self._hello(connection, message, now_ms)
            return
        engine = self._engines.get(message.engine, message.incarnation)
        if engine is None or not engine.heard(connection, now_ms):
            self._counts["refused.unknown_engine"] += 1
            about = type(message).__name__.lower()
            text = "say hello first: this host tier does not know you (any more)"
            refusal = Refused(about=about, code="unknown_engine", message=text)
            self._emit(ToEngine(connection, refusal))
            return
        match message:
            case Lookup():
                run = self._held.known.run_of(message.hashes)
                require_lookup(message, run)
                self._onboard.looked_up(connection, message, run, engine, now_ms)
            case Misses():
                self._filtered_lookups.take_in(message, engine, now_ms)
            case Release():
                corrupt = self._leases.release(message.lease, engine.label, message.corrupt)
                self._held.remove(corrupt, "corrupt", now_ms)
            case SessionHint():
                self._hints.hinted(message, engine, now_ms)
            case Outcome():
                self._explain.told_outcome(message, now_ms)
            case Confirm():
                self._offload.confirmed(message, now_ms)
            case Beat():
                self._emit(ToEngine(connection, Alive(epoch=self._announcer.epoch)))
                self._placement.remind(engine, connection, now_ms)
            case Bye():
                self._bye(engine, now_ms)
            case _:
                assert_never(message)

    def _hello(self, connection: bytes, hello: Hello, now_ms: int) -> None:
        assert connection
        if self._placement.sends_away(connection, hello):
            return
        self._held.call_tenants(hello.namespaces)
        if (ended := self._engines.hello(connection, hello, now_ms)) is not None:
            self._drop_work_of(ended, now_ms)
        self._placement.advance()  # The memory may be cut now.

    def _bye(self, engine: Engine, now_ms: int) -> None:
        self._engines.end(engine.id)
        self._engines.pardon(engine.id.engine)
        self._placement.has_left(engine)
        self._drop_work_of(engine.id, now_ms)
        self._leases.end_owner(engine.label)
        assert self._engines.get(engine.id.engine, engine.id.incarnation) is None, engine.label
        self._placement.advance()  # It may have been the last engine.

    def _drop_work_of(self, engine_id: EngineId, now_ms: int) -> None:
        """Drop an engine's offers and lookups; its leases run on to their deadlines, without a Bye.

        Silence does not prove death: a worker of a stalled engine may still be reading, and will
        believe what it has read as long as its lease's deadline has not passed.
        """
        self._offload.end_engine(engine_id, now_ms)
        self._onboard.end_engine(engine_id, now_ms)

    # --- lower tiers ------------------------------------------------------------------------

    def _lower_tier(self, event: LowerInput, now_ms: int) -> None:
        view = self._below.views[event.tier]
        match event:
            case LowerTierJoined(instance, _, epoch):
                self._outbox += view.joined(instance, now_ms, epoch)
            case LowerTierLeft(instance, _, epoch):
                view.left(instance, epoch)
            case LowerTierSnapshot(instance, snapshot):
                view.snapshot(instance, snapshot, now_ms)
            case LowerTierEvent():
                self._lower_tier_event(event, now_ms)
            case _:
                assert_never(event)

    def _lower_tier_event(self, told: LowerTierEvent, now_ms: int) -> None:
        view = self._below.views[told.tier]
        known = view.epoch(told.instance)
        new, questions = view.apply(told.instance, told.event, now_ms)
        self._outbox += questions
        if self._staging and told.tier == "disk":
            self._counts["offload_blocks_d2d"] += new
        # A `cleared` is not enough: a dying life sends one, too, while its reads are in flight.
        if 0 < known < told.event.epoch:
            self._fills.restarted(told.tier, told.instance)

    # --- time -------------------------------------------------------------------------------

    def _tick(self, now_ms: int) -> None:
        lost = self._engines.lost(now_ms)
        assert len(set(lost)) == len(lost), f"an engine is lost once: {lost}"
        for engine_id in lost:
            self._counts["engines_lost"] += 1
            self._engines.end(engine_id)
            self._engines.pardon(engine_id.engine)
            self._drop_work_of(engine_id, now_ms)
        self._leases.expire(now_ms)
        self._held.tick(now_ms)
        self._outbox += self._below.tick(now_ms)
        self._offload.tick(now_ms)
        self._onboard.tick(now_ms)
        self._fills.tick(now_ms)
        self._explain.tick(now_ms)
        self._findable.tick(now_ms)
        self._peers.open_peer_reader()
        self._scrubber.tick(now_ms)
        if lost:
            self._placement.advance()

    # --- questions --------------------------------------------------------------------------

    def story(self, name: SequenceHash) -> list[str]:
        """Return what happened to a block lately."""
        return self._held.story(name)

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        parts = (
            self._held, self._leases, self._below, self._offload, self._onboard, self._fills,
            self._peers, self._explain, self._sharding, self._scrubber, self._findable,
        )  # fmt: skip
        for part in parts:
            part.check()
        lent = self._fills.staged_slots(), self._peers.staged_slots()
        owners = self._offload.staged_slots(), *lent
        staged = set[int]().union(*owners)
        assert len(staged) == sum(map(len, owners)), "a staged slot has two owners"
        assert staged == self._held.table.staged(), "a staged slot has no owner"
        pins = self._leases.pins()
        pins.update(self._onboard.pinned_slots())
        pins.update(self._held.session_pins.slots())
        assert pins == self._held.table.pins(), "a pinned slot has no lease"
