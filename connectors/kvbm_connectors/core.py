"""The connector's core: the scheduler half of every engine, without the engine.

A lookup, keyed by the engine's request:

    ASKED --Found--> FOUND --take--> LOADING --load ended--> (released)
      |                |                |
      +--no answer-----+--lease ended---+--forget--> (released)
                       |
                       +--host tier gone--> LOST --take--> (a load that its worker will refuse)

While it moves to another host tier nothing new is asked or offered, and what is under way ends as
ever: then it leaves (`may_leave`). What has not ended in time is given up, but for loads.

An engine that has been told of a hit takes it a moment later; that the host tier went away in
between is no mistake of the engine's, so it gets a load that fails, never an exception.

An offer pins the engine's device blocks from `offer` until `OfferEnded`. It ends by the host
tier's `Pulled` (then `Confirm` says whether the pin had held), by its deadline, or when the host
tier is gone. The engine asks, and is never made to wait: `lookup` answers with what is known now,
or None for "ask me again".

A block that failed to load is not offered again for a while (`avoid_ms`): an engine that recomputes
after a failed load asks again at once, and would be sent the same bad block for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Self

from kvbm_common.config import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.identity import SequenceHash, pack_hashes
from kvbm_common.wire.local import (
    Confirm,
    Found,
    Lookup,
    Offered,
    OfferedRun,
    Outcome,
    Pulled,
    Release,
)

from kvbm_connectors.answers import hit_of, is_sound, nothing, why_failed
from kvbm_connectors.avoided import Avoided
from kvbm_connectors.messages import (
    UNSAID,
    Effect,
    Hit,
    Load,
    LoadResult,
    OfferEnded,
    OfferRun,
    Origin,
    ToEvents,
    ToHost,
)

NEVER_MS = 2**62


REQUEST_CHARS_MAX = 256
"""Of an engine's request id, as far as people need it."""


class ConnectorMisuse(KvbmError):
    """The engine side called out of turn."""

    code = "connector_misuse"


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the core, from the configuration."""

    lease_ms: int = 5_000
    onboard_deadline_ms: int = 2_000
    answer_margin_ms: int = 500
    """How long after its deadline an answer may still be on its way."""
    offer_deadline_ms: int = 5_000
    offers_max: int = 256
    """Offers in flight; further blocks are not offered, and counted."""
    avoid_ms: int = 60_000
    avoid_max: int = 65_536

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """What the configuration bounds; the rest by default."""
        return cls(
            lease_ms=settings.lease_ms,
            onboard_deadline_ms=settings.onboard_deadline_ms,
            offer_deadline_ms=settings.offer_deadline_ms,
        )


class Stage(Enum):
    """Where a lookup is in the drawing above."""

    ASKED = "asked"
    FOUND = "found"
    LOADING = "loading"
    LOST = "lost"


@dataclass(slots=True)
class Request:
    """One engine request's lookup."""

    lookup: int
    hashes: tuple[SequenceHash, ...]
    asked: int
    """How many of them were asked for: those before the first that is avoided."""
    deadline_ms: int
    """When to stop waiting for the answer."""
    lease_until_ms: int
    """When the lease ends, on our clock."""
    stage: Stage = Stage.ASKED
    found: Found | None = None


class ConnectorCore:
    """The scheduler half's state. `epoch` 0 means that no host tier is there: pass-through."""

    def __init__(
        self, *, engine: str, incarnation: str, namespace: bytes, limits: Limits | None = None
    ) -> None:
        assert len(namespace) == 32
        self.engine, self.incarnation, self.namespace = engine, incarnation, namespace
        self.limits = limits or Limits()
        self.epoch = 0
        self._arena_epoch = 0
        """The life whose arena is known, even while it does not answer."""
        self._leave_by_ms: int | None = None
        """Another host tier serves us: when to be gone from this one."""
        self.events_attached = True
        """Is there a consolidator that passes offers on? It says so; the host tier is not asked."""
        self.explains = False
        """The host tier keeps why lookups miss, and wants to be told what it cannot see."""
        self.counts: Counter[str] = Counter()
        self._requests: dict[str, Request] = {}
        self._lookups: dict[int, str] = {}
        self._loading: set[int] = set()
        """Leases of loads in flight, whatever has become of their requests."""
        self._offers: dict[int, int] = {}
        """Offer → its deadline. As long as it is here, the engine holds the blocks."""
        self._avoided = Avoided(
            avoid_ms=self.limits.avoid_ms, block_count_max=self.limits.avoid_max
        )
        self._next_id = 1
        self._effects: list[Effect] = []

    # --- the link ---------------------------------------------------------------------------

    def attached(self, epoch: int) -> list[Effect]:
        """The host tier has welcomed us. Another epoch is another arena: all leases are void."""
        if epoch != self.epoch:
            self._drop_everything("host_tier_restarted" if self.epoch else "attached")
        if epoch != self._arena_epoch:
            self._avoided.clear()
        self.epoch = self._arena_epoch = epoch
        self._leave_by_ms = None
        return self._take_effects()

    def moved(self, now_ms: int, within_ms: int) -> None:
        """Another host tier serves this engine: begin nothing new with this one."""
        self.counts["moves"] += 1
        if self.epoch:
            self._leave_by_ms = now_ms + within_ms

    def may_leave(self) -> bool:
        """Nothing is asked, leased, loading or on offer."""
        waiting = any(state.stage is not Stage.LOST for state in self._requests.values())
        return not (waiting or self._offers or self._loading)

    def detached(self) -> list[Effect]:
        """The host tier does not answer (any more): pass-through until it is back."""
        if self.epoch:
            self._drop_everything("host_tier_lost")
        self.epoch, self._leave_by_ms = 0, None
        return self._take_effects()

    def _drop_everything(self, reason: str) -> None:
        self.counts[f"lookups_dropped.{reason}"] += len(self._requests)
        found = {r: s for r, s in self._requests.items() if s.stage in (Stage.FOUND, Stage.LOST)}
        for state in found.values():
            state.stage = Stage.LOST
        self._requests = found
        self._lookups.clear()
        for offer in list(self._offers):
            self._end_offer(offer, 0, reason)

    # --- lookups ----------------------------------------------------------------------------

    def lookup(
        self,
        request: str,
        hashes: Sequence[SequenceHash],
        now_ms: int,
        *,
        deadline_ms: int | None = None,
        origin: Origin = UNSAID,
    ) -> tuple[Hit | None, list[Effect]]:
        """Which run of these blocks can be onboarded? None: ask again, the answer is on its way.

        Idempotent: asking again with the same hashes changes nothing. Other hashes start anew.
        `deadline_ms` goes before the limit of that name, for an engine that waits for the answer.
        `origin` is what only serves to explain and to trace.
        """
        state = self._requests.get(request)
        over = state is not None and state.stage in (Stage.LOST, Stage.LOADING)
        if state is not None and (over or state.hashes != tuple(hashes)):
            self._forget(request)  # A load in flight goes on; whoever asks under it starts anew.
            state = None
        if state is None:
            onboard_ms = deadline_ms or self.limits.onboard_deadline_ms
            hit = self._ask(request, hashes, now_ms, onboard_ms, origin)
            return hit, self._take_effects()
        if state.stage is Stage.ASKED:
            if now_ms < state.deadline_ms:
                return None, []
            self.counts["lookups_unanswered"] += 1
            self._tell(request, state.lookup, "no_answer", state.asked)
            self._forget(request)
            return Hit(0, reason="no_answer"), self._take_effects()
        if now_ms >= state.lease_until_ms:
            self.counts["lookups_outlived_lease"] += 1
            blocks = len(state.found.slots) if state.found is not None else 0
            self._tell(request, state.lookup, "lease_ended", blocks)
            self._forget(request)
            return Hit(0, reason="lease_ended"), self._take_effects()
        assert state.found is not None
        return hit_of(state.found), []

    def _ask(
        self,
        request: str,
        hashes: Sequence[SequenceHash],
        now_ms: int,
        onboard_ms: int,
        origin: Origin,
    ) -> Hit | None:
        if not self.epoch:
            self.counts["lookups_passed_through"] += 1
            return Hit(0, reason="no_host_tier")
        if self._leave_by_ms is not None:
            self.counts["lookups_passed_through"] += 1
            return Hit(0, reason="moving")
        wanted = hashes[: self._avoided.run_before(hashes, now_ms)]
        self.counts["avoided_blocks"] += len(hashes) - len(wanted)
        if not wanted:
            if hashes:
                self._tell(request, 0, "avoided", len(hashes))
            return Hit(0, reason="avoided" if hashes else "")
        limits = self.limits
        lookup = self._take_id()
        self._lookups[lookup] = request
        self._requests[request] = Request(
            lookup,
            tuple(hashes),
            len(wanted),
            deadline_ms=now_ms + onboard_ms + limits.answer_margin_ms,
            lease_until_ms=now_ms + onboard_ms + limits.lease_ms,
        )
        message = Lookup(
            engine=self.engine,
            incarnation=self.incarnation,
            lookup=lookup,
            namespace=self.namespace,
            hashes=pack_hashes(wanted),
            lease_ms=onboard_ms + limits.lease_ms,
            deadline_ms=onboard_ms,
            request=request[:REQUEST_CHARS_MAX] if self.explains else "",
            content=origin.content if self.explains else b"",
            avoided=len(hashes) - len(wanted),
            trace=origin.trace,
            sent_us=origin.sent_us,
            parent=origin.parent,
        )
        self._effects.append(ToHost(message))
        self.counts["lookups"] += 1
        return None

    def found(self, found: Found) -> list[Effect]:
        """The host tier has answered; too late or unasked, and the lease goes back at once."""
        request = self._lookups.pop(found.lookup, None)
        state = self._requests.get(request) if request is not None else None
        if found.epoch != self.epoch:
            # Its lease ended with that life; an id may mean another lease by now.
            self.counts["answers_unwanted"] += 1
            if request is not None:
                self._forget(request)  # The engine asks again, and is answered by this life.
        elif state is None:
            self.counts["answers_unwanted"] += 1
            self._give_back(found.lease)
        elif not is_sound(found, state.asked):
            self.counts["answers_malformed"] += 1
            self._tell(request or "", found.lookup, "malformed", len(found.slots))
            self._give_back(found.lease)
            state.stage, state.found = Stage.FOUND, nothing(found, "malformed")
        else:
            state.stage, state.found = Stage.FOUND, found
        return self._take_effects()

    def _give_back(self, lease: int) -> None:
        """A lease that nobody wants; but a second answer must not end the first one's lease."""
        found = (state.found for state in self._requests.values() if state.found is not None)
        if lease not in self._loading and all(lease != answer.lease for answer in found):
            self._release(lease)

    def take(self, request: str, blocks: Sequence[int], now_ms: int) -> Load:
        """The engine will load the first `len(blocks)` of what was found, into these blocks."""
        state = self._requests.get(request)
        takeable = state is not None and state.stage in (Stage.FOUND, Stage.LOST)
        if state is None or not takeable or state.found is None:
            raise ConnectorMisuse(f"request {request} has nothing to load")
        found, count = state.found, len(blocks)
        if not 0 < count <= len(found.slots):
            raise ConnectorMisuse(f"request {request}: {count} of {len(found.slots)} blocks")
        if state.stage is Stage.LOST:
            del self._requests[request]
        state.stage = Stage.LOADING
        self._loading.add(found.lease)
        self.counts["loads"] += 1
        return Load(
            request=request,
            lookup=found.lookup,
            epoch=found.epoch,
            lease=found.lease,
            slots=tuple(found.slots[:count]),
            blocks=tuple(blocks),
            hashes=state.hashes[:count],
            checksums=tuple(found.checksums[:count]),
            block_bytes=found.block_bytes,
            deadline_ms=state.lease_until_ms,
        )

    def load_ended(self, result: LoadResult, now_ms: int) -> list[Effect]:
        """A load is over: give the lease back, and do not offer again what failed."""
        load = result.load
        self._loading.discard(load.lease)
        self.counts["loaded_blocks"] += sum(result.intact)
        failed = len(result.intact) - sum(result.intact)
        self.counts["load_failed_blocks"] += failed
        if failed and load.epoch == self.epoch:
            self._tell(load.request, load.lookup, why_failed(result), failed)
        for name, ok in zip(load.hashes, result.intact, strict=True):
            if not ok and load.epoch == self.epoch:
                self._avoided.add(name, now_ms)
        state = self._requests.get(load.request)
        if state is not None and state.found is not None and state.found.lease == load.lease:
            del self._requests[load.request]
        if load.epoch == self.epoch:
            self._release(load.lease, result.corrupt)
        return self._take_effects()

    def forget(self, request: str) -> list[Effect]:
        """The engine does not want this lookup any more (finished, aborted, preempted)."""
        self._forget(request)
        return self._take_effects()

    def _forget(self, request: str) -> None:
        state = self._requests.get(request)
        if state is None or state.stage is Stage.LOADING:
            return  # A load in flight gives its lease back when it ends.
        del self._requests[request]
        self._lookups.pop(state.lookup, None)
        if state.found is not None and state.found.epoch == self.epoch:
            self._release(state.found.lease)

    def _tell(self, request: str, lookup: int, reason: str, blocks: int) -> None:
        """What the host tier cannot see, for whoever asks it why."""
        if self.explains and self.epoch:
            message = Outcome(
                engine=self.engine,
                incarnation=self.incarnation,
                request=request[:REQUEST_CHARS_MAX],
                lookup=lookup,
                reason=reason,
                blocks=blocks,
            )
            self._effects.append(ToHost(message))

    def _release(self, lease: int, corrupt: Sequence[int] = ()) -> None:
        if lease:
            message = Release(
                engine=self.engine,
                incarnation=self.incarnation,
                lease=lease,
                corrupt=list(corrupt),
            )
            self._effects.append(ToHost(message))

    # --- offers -----------------------------------------------------------------------------

    def offer(
        self, runs: Sequence[OfferRun], now_ms: int, *, priority: int = 0
    ) -> tuple[int | None, list[Effect]]:
        """Offer device blocks. The engine holds them until `OfferEnded`; None: do not hold."""
        count = sum(len(run.hashes) for run in runs)
        if not self.epoch or not self.events_attached or self._leave_by_ms is not None:
            self.counts["offers_passed_through"] += count
            return None, []
        if len(self._offers) >= self.limits.offers_max:
            self.counts["offers_dropped_busy"] += count
            return None, []
        offer = self._take_id()
        self._offers[offer] = now_ms + self.limits.offer_deadline_ms
        message = Offered(
            engine=self.engine,
            incarnation=self.incarnation,
            offer=offer,
            namespace=self.namespace,
            deadline_ms=self.limits.offer_deadline_ms,
            priority=priority,
            runs=[
                OfferedRun(
                    parent=run.parent, hashes=pack_hashes(run.hashes), blocks=list(run.blocks)
                )
                for run in runs
            ],
        )
        self._effects.append(ToEvents(message))
        self.counts["offered_blocks"] += count
        return offer, self._take_effects()

    def pulled(self, pulled: Pulled) -> list[Effect]:
        """The host tier has what it wanted. Was the hold unbroken? Then it may commit."""
        held = pulled.offer in self._offers
        if pulled.confirm:
            self._effects.append(
                ToHost(
                    Confirm(
                        engine=self.engine,
                        incarnation=self.incarnation,
                        offer=pulled.offer,
                        held=held,
                    )
                )
            )
        if held:
            reason = pulled.reason or "pulled"
            self._end_offer(pulled.offer, pulled.pulled, reason, complete=not pulled.failed)
        return self._take_effects()

    def revoke(self, offer: int, reason: str = "revoked") -> list[Effect]:
        """The engine reuses the blocks now (preemption, or nobody pulls): a pull is worthless."""
        if offer in self._offers:
            self._end_offer(offer, 0, reason)
        return self._take_effects()

    def _end_offer(self, offer: int, stored: int, reason: str, *, complete: bool = False) -> None:
        del self._offers[offer]
        self.counts[f"offers_ended.{reason}"] += 1
        self.counts["offload_blocks"] += stored
        self._effects.append(OfferEnded(offer, stored, complete))

    # --- time -------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> list[Effect]:
        """End offers whose deadline has passed; forget what is too old to matter."""
        for offer in [o for o, deadline_ms in self._offers.items() if now_ms >= deadline_ms]:
            self._end_offer(offer, 0, "deadline")
        if self._leave_by_ms is not None and now_ms >= self._leave_by_ms:
            self._leave_by_ms = NEVER_MS
            self._drop_everything("moved")
        self._avoided.tick(now_ms)
        return self._take_effects()

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def idle(self) -> bool:
        """Nothing is on offer, asked or leased."""
        return not self._offers and not self._requests

    def check(self) -> None:
        """Assert every invariant."""
        assert len(self._offers) <= self.limits.offers_max
        asked = {s.lookup: r for r, s in self._requests.items() if s.stage is Stage.ASKED}
        assert asked == self._lookups
        if not self.epoch:
            assert not self._offers
            assert all(state.stage is Stage.LOST for state in self._requests.values())
