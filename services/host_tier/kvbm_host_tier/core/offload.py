"""Offload, G1 → G2: pull the blocks that engines offer, have each offer confirmed, commit.

A block is announced only after the engine has confirmed that it held the device block during the
whole pull: a block that was freed and overwritten meanwhile is discarded. The states of an offer
and of a pull are drawn in `docs/state_machines.md`.
"""

from __future__ import annotations

from collections import deque

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import batch_blocks
from kvbm_common.tier.layout import UNIT_BYTES
from kvbm_common.tier.machine import InvalidTransition
from kvbm_common.tier.slots import Block
from kvbm_common.wire.local import Confirm, Pulled
from kvbm_common.wire.verbs import Offer

from kvbm_host_tier.core.engines import Engine, Engines
from kvbm_host_tier.core.held_blocks import HeldBlocks
from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.messages import (
    EngineId,
    PullDone,
    PullFailed,
    StartPull,
    ToEngine,
)
from kvbm_host_tier.core.offer_intake import blocks_of, refusal_of
from kvbm_host_tier.core.offers import (
    OFFER,
    PULL,
    OfferState,
    Phase,
    Pull,
    PullPhase,
    Wanted,
)

_OFFER_MOVES, _PULL_MOVES = OFFER.transitions, PULL.transitions  # Each offer makes four.
PULL_SHARE = 16
"""A pull of small blocks takes at most 1/16 of the arena, since it may evict as much."""
ASKED_MAX = 4096
"""Offers in `_asked_to_confirm`: minutes of a busy host, while late messages are seconds late."""


class Offload:
    """All offers of all engines. Offers take turns: each starts one pull at a time."""

    def __init__(self, held: HeldBlocks, engines: Engines, means: Means) -> None:
        assert means.limits.transfers_max > 0
        self._held, self._table = held, held.table
        self._engines = engines
        self._limits, self._counts, self._emit = means.limits, means.counts, means.emit
        self._offers: dict[tuple[EngineId, int], OfferState] = {}
        self._queue: deque[OfferState] = deque()
        """Offers that still want blocks, next first."""
        self._pulls: dict[int, Pull] = {}
        self._in_flight = 0
        self._asked_to_confirm: dict[tuple[EngineId, int], None] = {}
        """Offers whose engine was asked to confirm. A late duplicate is not pulled again: a late
        Confirm of the first pull would commit the second one, of blocks reused by then."""
        self._next_pull = 1

    def __len__(self) -> int:
        return len(self._offers)

    @property
    def is_pulling(self) -> bool:
        """Tell whether a pull is in flight."""
        return self._in_flight > 0

    @property
    def unsettled_count(self) -> int:
        """The number of slots that late bytes of failed pulls may still reach."""
        pulls = self._pulls.values()
        return sum(len(one.slots) for one in pulls if one.phase is PullPhase.UNSETTLED)

    # --- moves ------------------------------------------------------------------------------

    def _move(self, state: OfferState, event: str) -> None:
        """Move an offer by its table; forget an offer that has ended."""
        move = (state.phase, event)
        if move not in _OFFER_MOVES:
            raise InvalidTransition(OFFER.refusal(state.phase, event, self._story(state)))
        to = _OFFER_MOVES[move]
        if to is None:
            del self._offers[state.key]
        else:
            state.phase = to

    def _move_pull(self, number: int, event: str) -> Pull:
        """Move a pull by its table; forget a pull that has ended."""
        pull = self._pulls[number]
        move = (pull.phase, event)
        if move not in _PULL_MOVES:
            raise InvalidTransition(PULL.refusal(pull.phase, event, self._story(pull.offer)))
        if pull.phase is PullPhase.IN_FLIGHT:
            self._in_flight -= 1
            pull.offer.pulls.remove(number)
        to = _PULL_MOVES[move]
        if to is None:
            del self._pulls[number]
        else:
            pull.phase = to
        return pull

    def _story(self, state: OfferState) -> str:
        names = [one.hash for one in state.wanted] or [block.hash for _, block in state.arrived]
        about = self._held.story(names[0]) if names else []
        return f"offer {state.key[1]} of {state.engine.label}, {state.reason}; {about}"

    # --- offers -----------------------------------------------------------------------------

    def offered(self, offer: Offer, now_ms: int) -> None:
        """Take an offer in, or tell its engine why not; raises IdentityError."""
        engine = self._engines.get(offer.engine, offer.incarnation)
        count = sum(len(run.hashes) for run in offer.runs)
        key = (EngineId(offer.engine, offer.incarnation), offer.offer)
        is_busy = len(self._offers) >= self._limits.offers_max
        refusal = refusal_of(offer, engine, is_busy=is_busy, is_draining=self._held.draining)
        if key in self._offers or key in self._asked_to_confirm:
            self._counts["dropped.offer_duplicate"] += 1
            return
        if refusal or engine is None:
            self._refuse(engine, offer, count, refusal, now_ms)
            return
        state = OfferState(
            engine=engine,
            key=key,
            namespace=bytes.fromhex(offer.namespace),
            deadline_ms=now_ms + offer.deadline_ms,
            wanted=deque(blocks_of(offer)),
        )
        assert len(state.wanted) == count
        self._offers[key] = state
        self._queue.append(state)
        self.advance(now_ms)

    def _refuse(
        self, engine: Engine | None, offer: Offer, count: int, refusal: str, now_ms: int
    ) -> None:
        assert refusal
        self._counts[f"dropped.offer_{refusal}"] += count
        if engine is not None:
            self._tell(engine, Pulled(
                offer=offer.offer, pulled=0, skipped=0, failed=count, reason=refusal,
                confirm=False,
            ))  # fmt: skip
        if refusal in ("busy", "draining", "incomplete_engine"):
            names = (one.hash for one in blocks_of(offer))
            self._held.not_stored(names, refusal, now_ms)

    # --- pulls ------------------------------------------------------------------------------

    def advance(self, now_ms: int) -> None:
        """Start as many pulls as may be in flight, one batch per offer in turn."""
        assert self._in_flight >= 0
        while self._queue and self._in_flight < self._limits.transfers_max:
            state = self._queue.popleft()
            if state.phase is not Phase.PULLING:
                continue
            self._start_pull(state, now_ms)
            if state.wanted:
                self._queue.append(state)
            elif not state.pulls:
                self._ask_confirm(state, now_ms)

    def _start_pull(self, state: OfferState, now_ms: int) -> None:
        engine = state.engine
        assert state.wanted or not state.pulls, self._story(state)
        if not engine.complete:  # A rank left, or is being attached again.
            self._give_up_rest(state, [], "incomplete_engine", now_ms)
            return
        batch = self._next_batch(state)
        size = engine.block_bytes
        room = self._held.make_room(len(batch), size, now_ms, state.namespace)
        if room < len(batch):  # All other slots are pinned.
            self._give_up_rest(state, batch[room:], "no_room", now_ms)
            batch = batch[:room]
        if not batch:
            return
        slots = self._held.stage([one.hash for one in batch], size, f"for {engine.label}", now_ms)
        pull = Pull(state, tuple(batch), tuple(slots), size, engine.grid)
        self._add_pull(pull)
        deadline_ms = min(state.deadline_ms - now_ms, self._limits.pull_deadline_ms)
        self._emit(
            StartPull(
                pull=self._next_pull, parts=engine.parts(), block_bytes=pull.block_bytes,
                blocks=tuple(wanted.block for wanted in batch),
                slots=tuple(self._table.places(slots)), deadline_ms=max(1, deadline_ms),
            )
        )  # fmt: skip
        self._next_pull += 1

    def _add_pull(self, pull: Pull) -> None:
        assert len(pull.wanted) == len(pull.slots)
        self._pulls[self._next_pull] = pull
        self._in_flight += 1
        pull.offer.pulls.add(self._next_pull)

    def _next_batch(self, state: OfferState) -> list[Wanted]:
        """Take the next blocks of an offer that are neither here nor on their way."""
        batch: list[Wanted] = []
        names: set[SequenceHash] = set()
        table, limits, size = self._table, self._limits, state.engine.block_bytes
        layout = table.pool.layout
        slot_bytes = -(-size // UNIT_BYTES) * UNIT_BYTES
        share = layout.slot_count * layout.slot_bytes // slot_bytes * size // PULL_SHARE
        batch_max = batch_blocks(limits.batch_blocks_max, min(limits.batch_bytes, share), size)
        while state.wanted and len(batch) < batch_max:
            wanted = state.wanted.popleft()
            name = wanted.hash
            if table.find(name) is not None or table.is_staging(name) or name in names:
                state.skipped += 1
                self._held.admit([name])
                self._counts["offload_skipped_blocks"] += 1
            else:
                names.add(name)
                batch.append(wanted)
        assert len(names) == len(batch)
        return batch

    def _give_up_rest(
        self, state: OfferState, batch: list[Wanted], reason: str, now_ms: int
    ) -> None:
        """Store neither these blocks of an offer nor those that are still wanted."""
        assert state.phase is Phase.PULLING, self._story(state)
        given_up = [*batch, *state.wanted]
        self._held.not_stored((one.hash for one in given_up), reason, now_ms)
        state.wanted.clear()
        state.failed += len(given_up)
        state.reason = reason
        self._counts[f"dropped.offer_{reason}"] += len(given_up)

    def pull_done(self, event: PullDone, now_ms: int) -> None:
        """Take in a batch whose bytes have all arrived; it is committed when confirmed."""
        pull = self._move_pull(event.pull, "done")
        state = pull.offer
        assert len(event.sums) == len(pull.slots), self._story(state)
        for wanted, slot, sums in zip(pull.wanted, pull.slots, event.sums, strict=True):
            block = Block.of_sums(
                wanted.hash, wanted.parent, state.namespace, pull.block_bytes, pull.grid, sums
            )
            state.arrived.append((slot, block))
        self._after_pull(state, now_ms)

    def pull_failed(self, event: PullFailed, now_ms: int) -> None:
        """Give up a batch, and keep its slots for as long as late bytes may reach them."""
        assert event.reason
        pull = self._move_pull(event.pull, "failed, settled" if event.settled else "failed")
        state = pull.offer
        state.failed += len(pull.slots)
        if state.phase is not Phase.DEAD:
            state.reason = event.reason
        self._counts[f"dropped.pull_{event.reason}"] += len(pull.slots)
        self._held.not_stored((one.hash for one in pull.wanted), event.reason, now_ms)
        if event.reason == "peer_lost":
            self._engines.reattach(state.engine.id)
        for slot in pull.slots:
            if event.settled:
                self._table.abort(slot)
            else:
                self._table.abandon(slot)
        self._after_pull(state, now_ms)

    def pull_settled(self, number: int) -> None:
        """Free the slots of a failed pull: its last late byte has landed."""
        assert number in self._pulls, f"pull {number} has settled twice"
        for slot in self._move_pull(number, "settled").slots:
            self._table.abort(slot)

    def _after_pull(self, state: OfferState, now_ms: int) -> None:
        if state.phase is Phase.DEAD:
            self._abort_arrived(state)
        elif not state.pulls and not state.wanted:
            self._ask_confirm(state, now_ms)
        self.advance(now_ms)

    def _ask_confirm(self, state: OfferState, now_ms: int) -> None:
        """Tell the engine that its blocks are free, and ask whether it had held them until now."""
        assert not state.pulls, self._story(state)
        assert not state.wanted, self._story(state)
        confirm = bool(state.arrived)
        self._tell(state.engine, Pulled(
            offer=state.key[1], pulled=len(state.arrived), skipped=state.skipped,
            failed=state.failed, reason=state.reason, confirm=confirm,
        ))  # fmt: skip
        if not confirm:
            self._move(state, "nothing pulled")
            return
        self._asked_to_confirm[state.key] = None
        if len(self._asked_to_confirm) > ASKED_MAX:
            del self._asked_to_confirm[next(iter(self._asked_to_confirm))]
        self._move(state, "pulled")
        state.deadline_ms = now_ms + self._limits.confirm_ms

    # --- ends -------------------------------------------------------------------------------

    def confirmed(self, confirm: Confirm, now_ms: int) -> None:
        """Commit an offer, or drop it because the engine had not held its blocks."""
        key = (EngineId(confirm.engine, confirm.incarnation), confirm.offer)
        state = self._offers.get(key)
        if state is None or state.phase is not Phase.CONFIRMING:
            self._counts["dropped.confirm_unknown"] += 1
            return
        if not confirm.held:
            self._drop(state, "revoked", now_ms)
            return
        self._move(state, "held")
        self._held.commit(state.arrived, now_ms)
        self._counts["offload_blocks_d2h"] += len(state.arrived)
        self._counts["bytes.d2h"] += sum([block.bytes for _, block in state.arrived])
        self.advance(now_ms)

    def tick(self, now_ms: int) -> None:
        """Drop the offers whose engines cannot be holding their blocks any more."""
        assert now_ms >= 0
        for state in list(self._offers.values()):
            if state.phase is not Phase.DEAD and now_ms >= state.deadline_ms:
                self._drop(state, "deadline", now_ms)
        self.advance(now_ms)

    def end_engine(self, engine_id: EngineId, now_ms: int) -> None:
        """Drop the offers of an engine that has left: so has the memory of their blocks."""
        assert engine_id.engine
        for state in list(self._offers.values()):
            if state.engine.id == engine_id and state.phase is not Phase.DEAD:
                self._drop(state, "engine_lost", now_ms)

    def _drop(self, state: OfferState, reason: str, now_ms: int) -> None:
        assert state.phase is not Phase.DEAD, self._story(state)
        self._counts[f"dropped.offer_{reason}"] += len(state.wanted)
        self._held.not_stored((one.hash for one in state.wanted), reason, now_ms)
        self._held.not_stored((block.hash for _, block in state.arrived), reason, now_ms)
        self._move(state, "dropped")
        state.reason = reason
        state.wanted.clear()
        self._abort_arrived(state)

    def _abort_arrived(self, state: OfferState) -> None:
        """Give back the slots of a dead offer whose bytes are in; the last pull ends the offer."""
        assert not state.wanted, self._story(state)
        self._counts[f"dropped.offer_{state.reason}"] += len(state.arrived)
        for slot, _ in state.arrived:
            self._table.abort(slot)
        state.arrived.clear()
        if not state.pulls:
            self._move(state, "pulls ended")

    def _tell(self, engine: Engine, message: Pulled) -> None:
        assert message.confirm == (message.pulled > 0)
        if engine.scheduler is not None:
            self._emit(ToEngine(engine.scheduler.connection, message))

    # --- questions --------------------------------------------------------------------------

    def staged_slots(self) -> set[int]:
        """Return every slot that an offer has staged, for `check`."""
        staged = {slot for pull in self._pulls.values() for slot in pull.slots}
        return staged | {slot for one in self._offers.values() for slot, _ in one.arrived}

    def check(self) -> None:
        """Assert every invariant of the offers."""
        in_flight = {n for n, pull in self._pulls.items() if pull.phase is PullPhase.IN_FLIGHT}
        assert len(in_flight) == self._in_flight <= self._limits.transfers_max
        for state in self._offers.values():
            story = self._story(state)
            assert state.pulls <= in_flight, story
            is_confirming, is_dead = state.phase is Phase.CONFIRMING, state.phase is Phase.DEAD
            assert not is_confirming or (state.arrived and not state.pulls), story
            assert not is_dead or (state.pulls and not state.arrived), story
