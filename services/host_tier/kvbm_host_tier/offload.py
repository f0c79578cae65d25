"""Offload, G1 → G2: pull what engines offer, have it confirmed, commit.

    offered --stage, pull--> PULLING --all batches in--> CONFIRMING --held--> committed
                                |                            |
                                +--deadline, engine lost-----+--not held, deadline--> aborted

Nothing is announced before the engine has confirmed, after the pull, that it had held the device
blocks all the time: a block that was freed and rewritten under the pull is thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from kvbm_common.identity import SequenceHash, hash_from_hex, hashes_from_hex
from kvbm_common.slots import Block
from kvbm_common.wire.local import Confirm, Pulled
from kvbm_common.wire.verbs import OFFER_BLOCKS_MAX, Offer

from kvbm_host_tier.engines import Engine, Engines
from kvbm_host_tier.messages import (
    EngineId,
    PullDone,
    PullFailed,
    StartPull,
    ToEngine,
)
from kvbm_host_tier.tier import Tier

ASKED_MAX = 4096
"""Offers that are remembered: minutes of a busy host, and messages are late by seconds."""


class Phase(Enum):
    """Where an offer is in the drawing above."""

    PULLING = "pulling"
    CONFIRMING = "confirming"
    DEAD = "dead"
    """Only waits for its pulls in flight to settle."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A device block that is on offer."""

    hash: SequenceHash
    parent: SequenceHash
    block: int


@dataclass(slots=True)
class OfferState:
    """An offer from its arrival to its end."""

    engine: EngineId
    offer: int
    namespace: bytes
    deadline_ms: int
    wanted: deque[Wanted]
    phase: Phase = Phase.PULLING
    pulls: set[int] = field(default_factory=set)
    arrived: list[tuple[int, Block]] = field(default_factory=list)
    """Staged slots whose bytes are in."""
    skipped: int = 0
    failed: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pull:
    """A batch in flight."""

    offer: OfferState
    wanted: tuple[Wanted, ...]
    slots: tuple[int, ...]
    block_bytes: int


class Offload:
    """All offers of all engines. Pulls are shared out among the offers in turn."""

    def __init__(self, tier: Tier, engines: Engines) -> None:
        self._tier = tier
        self._engines = engines
        self._offers: dict[tuple[EngineId, int], OfferState] = {}
        self._turn: deque[OfferState] = deque()
        """Offers that still want blocks, next first."""
        self._pulls: dict[int, Pull] = {}
        self._unsettled: dict[int, tuple[int, ...]] = {}
        """Pull → its slots, which late bytes may still reach: not used until it has settled."""
        self._asked: dict[tuple[EngineId, int], None] = {}
        """Offers that were put to the question. A late duplicate is not pulled again: a late
        Confirm of the first pull would commit the second one, of blocks reused by then."""
        self._next_pull = 1

    def __len__(self) -> int:
        return len(self._offers)

    @property
    def unsettled_count(self) -> int:
        """Slots lost to transfers whose end is unknown."""
        return sum(map(len, self._unsettled.values()))

    def offered(self, offer: Offer, now_ms: int) -> None:
        """An offer has come in."""
        engine = self._engines.get(offer.engine, offer.incarnation)
        count = sum(len(run.hashes) for run in offer.runs)
        key = (EngineId(offer.engine, offer.incarnation), offer.offer)
        refusal = self._refusal(engine, offer, count)
        if key in self._offers or key in self._asked:
            self._tier.counts["dropped.offer_duplicate"] += 1
            return
        if refusal:
            self._tier.counts[f"dropped.offer_{refusal}"] += count
            if engine is not None:
                self._tell(engine, Pulled(
                    offer=offer.offer, pulled=0, skipped=0, failed=count, reason=refusal,
                    confirm=False,
                ))  # fmt: skip
            if refusal in ("busy", "draining", "incomplete_engine"):
                self._not_stored((one.hash for one in _wanted(offer)), refusal)
            return
        state = OfferState(
            *key,
            namespace=bytes.fromhex(offer.namespace),
            deadline_ms=now_ms + offer.deadline_ms,
            wanted=deque(_wanted(offer)),
        )
        self._offers[key] = state
        self._turn.append(state)
        self.advance(now_ms)

    def _refusal(self, engine: Engine | None, offer: Offer, count: int) -> str:
        if engine is None:
            return "unknown_engine"
        if not engine.complete:
            return "incomplete_engine"
        if offer.namespace != engine.namespace.hex():
            return "namespace"
        if len(self._offers) >= self._tier.limits.offers_max:
            return "busy"
        if self._tier.draining:
            return "draining"
        if count > OFFER_BLOCKS_MAX or any(len(r.hashes) != len(r.blocks) for r in offer.runs):
            return "malformed"
        if any(block >= engine.block_count for run in offer.runs for block in run.blocks):
            return "block_id"
        return ""

    # --- pulls ------------------------------------------------------------------------------

    def advance(self, now_ms: int) -> None:
        """Start as many pulls as may fly, one batch per offer in turn."""
        while self._turn and len(self._pulls) < self._tier.limits.transfers_max:
            state = self._turn.popleft()
            if state.phase is not Phase.PULLING:
                continue
            self._start_pull(state, now_ms)
            if state.wanted:
                self._turn.append(state)
            elif not state.pulls:
                self._pulled(state, now_ms)

    def _start_pull(self, state: OfferState, now_ms: int) -> None:
        engine = self._engines.get(state.engine.engine, state.engine.incarnation)
        assert engine is not None, f"{state.engine} ended, its offers did not"
        if not engine.complete:  # A rank left, or is being attached anew.
            self._give_up_rest(state, 0, "incomplete_engine")
            return
        batch = self._next_batch(state)
        room = self._tier.make_room(len(batch))
        if room < len(batch):
            self._not_stored((one.hash for one in batch[room:]), "no_room")
            self._give_up_rest(state, len(batch) - room, "no_room")
        if not room:
            return
        names = [wanted.hash for wanted in batch[:room]]
        slots = self._tier.table.stage_all(names)
        self._tier.diary.note_all(
            now_ms, f"staged in slot {{slot}} for {state.engine}", names, slots
        )
        pull = Pull(state, tuple(batch[:room]), tuple(slots), engine.block_bytes)
        self._pulls[self._next_pull] = pull
        state.pulls.add(self._next_pull)
        self._tier.emit(
            StartPull(
                pull=self._next_pull,
                parts=engine.parts(),
                blocks=tuple(wanted.block for wanted in pull.wanted),
                slots=pull.slots,
                block_bytes=pull.block_bytes,
                deadline_ms=max(
                    1, min(state.deadline_ms - now_ms, self._tier.limits.pull_deadline_ms)
                ),
            )
        )
        self._next_pull += 1

    def _next_batch(self, state: OfferState) -> list[Wanted]:
        """The next blocks of an offer that are neither here nor on their way."""
        batch: list[Wanted] = []
        names: set[SequenceHash] = set()
        while state.wanted and len(batch) < self._tier.limits.batch_blocks_max:
            wanted = state.wanted.popleft()
            table = self._tier.table
            if (
                table.find(wanted.hash) is not None
                or table.is_staging(wanted.hash)
                or wanted.hash in names
            ):
                state.skipped += 1
                self._tier.admit([wanted.hash])
                self._tier.counts["offload_skipped_blocks"] += 1
            else:
                names.add(wanted.hash)
                batch.append(wanted)
        return batch

    def _give_up_rest(self, state: OfferState, count: int, reason: str) -> None:
        """`count` blocks and all that are still wanted are not cached. No room: all is pinned."""
        count += len(state.wanted)
        self._not_stored((one.hash for one in state.wanted), reason)
        state.wanted.clear()
        state.failed += count
        state.reason = reason
        self._tier.counts[f"dropped.offer_{reason}"] += count

    def pull_done(self, event: PullDone, now_ms: int) -> None:
        """A batch is in."""
        pull = self._pulls.pop(event.pull)
        state = pull.offer
        state.pulls.remove(event.pull)
        for wanted, slot, checksum in zip(pull.wanted, pull.slots, event.checksums, strict=True):
            block = Block(wanted.hash, wanted.parent, state.namespace, checksum, pull.block_bytes)
            state.arrived.append((slot, block))
        self._after_pull(state, now_ms)

    def pull_failed(self, event: PullFailed, now_ms: int) -> None:
        """A batch did not come in."""
        pull = self._pulls.pop(event.pull)
        pull.offer.pulls.remove(event.pull)
        pull.offer.failed += len(pull.slots)
        if pull.offer.phase is not Phase.DEAD:
            pull.offer.reason = event.reason
        self._tier.counts[f"dropped.pull_{event.reason}"] += len(pull.slots)
        self._not_stored((one.hash for one in pull.wanted), event.reason)
        if event.reason == "peer_lost":
            self._engines.reattach(pull.offer.engine)
        if event.settled:
            self._abort(pull.slots)
        else:
            for slot in pull.slots:
                self._tier.table.abandon(slot)
            self._unsettled[event.pull] = pull.slots
        self._after_pull(pull.offer, now_ms)

    def pull_settled(self, pull: int) -> None:
        """The last late byte of a failed pull has landed."""
        self._abort(self._unsettled.pop(pull))

    def _after_pull(self, state: OfferState, now_ms: int) -> None:
        if state.phase is Phase.DEAD:
            self._bury(state)
        elif not state.pulls and not state.wanted:
            self._pulled(state, now_ms)
        self.advance(now_ms)

    def _pulled(self, state: OfferState, now_ms: int) -> None:
        """All that can come is in: free the engine's blocks, and ask whether it had held them."""
        confirm = bool(state.arrived)
        engine = self._engines.get(state.engine.engine, state.engine.incarnation)
        assert engine is not None
        self._tell(engine, Pulled(
            offer=state.offer, pulled=len(state.arrived), skipped=state.skipped,
            failed=state.failed, reason=state.reason, confirm=confirm,
        ))  # fmt: skip
        if not confirm:
            del self._offers[(state.engine, state.offer)]
            return
        self._asked[(state.engine, state.offer)] = None
        if len(self._asked) > ASKED_MAX:
            del self._asked[next(iter(self._asked))]
        state.phase = Phase.CONFIRMING
        state.deadline_ms = now_ms + self._tier.limits.confirm_ms

    # --- ends -------------------------------------------------------------------------------

    def confirmed(self, confirm: Confirm, now_ms: int) -> None:
        """The engine says whether it held the blocks until now."""
        key = (EngineId(confirm.engine, confirm.incarnation), confirm.offer)
        state = self._offers.get(key)
        if state is None or state.phase is not Phase.CONFIRMING:
            self._tier.counts["dropped.confirm_unknown"] += 1
            return
        if not confirm.held:
            self._kill(state, "revoked")
            return
        del self._offers[key]
        self._tier.table.register_all(state.arrived)
        slots = [slot for slot, _ in state.arrived]
        blocks = [block for _, block in state.arrived]
        names = [block.hash for block in blocks]
        self._tier.diary.note_all(now_ms, "committed in slot {slot}", names, slots)
        self._tier.counts["offload_blocks_d2h"] += len(blocks)
        self._tier.counts["bytes.d2h"] += sum(block.bytes for block in blocks)
        self._tier.announce_stored(blocks)
        self.advance(now_ms)

    def tick(self, now_ms: int) -> None:
        """Drop the offers whose engines cannot be holding their blocks any more."""
        for state in list(self._offers.values()):
            if state.phase is not Phase.DEAD and now_ms >= state.deadline_ms:
                self._kill(state, "deadline")
        self.advance(now_ms)

    def end_engine(self, engine_id: EngineId) -> None:
        """The engine is gone, and its memory with it."""
        for state in list(self._offers.values()):
            if state.engine == engine_id and state.phase is not Phase.DEAD:
                self._kill(state, "engine_lost")

    def _kill(self, state: OfferState, reason: str) -> None:
        self._tier.counts[f"dropped.offer_{reason}"] += len(state.wanted)
        self._not_stored((one.hash for one in state.wanted), reason)
        self._not_stored((block.hash for _, block in state.arrived), reason)
        state.phase, state.reason = Phase.DEAD, reason
        state.wanted.clear()
        self._bury(state)

    def _bury(self, state: OfferState) -> None:
        """Give back what a dead offer has staged, as far as it has settled."""
        self._tier.counts[f"dropped.offer_{state.reason}"] += len(state.arrived)
        self._abort(slot for slot, _ in state.arrived)
        state.arrived.clear()
        if not state.pulls:
            del self._offers[(state.engine, state.offer)]

    def _not_stored(self, names: Iterable[SequenceHash], reason: str) -> None:
        """Remember why, for those who miss them."""
        self._tier.fates.note(names, "offload", self._tier.now_ms, detail=reason)

    def _abort(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._tier.table.abort(slot)

    def _tell(self, engine: Engine, message: Pulled) -> None:
        if engine.scheduler is not None:
            self._tier.emit(ToEngine(engine.scheduler.connection, message))

    def staged_slots(self) -> set[int]:
        """Every slot that an offer has staged, for `check`."""
        staged = {slot for pull in self._pulls.values() for slot in pull.slots}
        staged |= {slot for state in self._offers.values() for slot, _ in state.arrived}
        return staged.union(*self._unsettled.values())

    def check(self) -> None:
        """Assert every invariant."""
        assert len(self._pulls) <= self._tier.limits.transfers_max
        for state in self._offers.values():
            assert state.pulls <= self._pulls.keys()
            assert state.phase is not Phase.CONFIRMING or (state.arrived and not state.pulls)
            assert state.phase is not Phase.DEAD or (state.pulls and not state.arrived)


def _wanted(offer: Offer) -> list[Wanted]:
    """The blocks of an offer with their parents; raises IdentityError on a malformed hash."""
    wanted: list[Wanted] = []
    for run in offer.runs:
        parent = hash_from_hex(run.parent)
        for name, block in zip(hashes_from_hex(run.hashes), run.blocks, strict=True):
            wanted.append(Wanted(name, parent, block))
            parent = name
    return wanted
