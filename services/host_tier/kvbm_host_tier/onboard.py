"""Onboard, G2 (and G3 and G4 through G2) → G1: answer lookups with leased slots.

A lookup is walked from its first block on. Each block is either here (pin it), below (stage a
slot and have it filled), being filled already (wait with the others), or the end of the run. The
answer goes out once: when all is here, or at its deadline with the prefix that is here by then.
Blocks that arrive after the answer stay: they have been promoted. Where this host has no more, the
index is asked for other hosts that have (`peers`), and the walk goes on with what a peer has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from kvbm_common.identity import SequenceHash, hash_from_hex, hashes_from_hex, hashes_to_hex
from kvbm_common.slots import Block
from kvbm_common.wire.events import Tier as WireTier
from kvbm_common.wire.explain import Place
from kvbm_common.wire.local import Lookup
from kvbm_common.wire.verbs import (
    FILL_GRACE_MS,
    ErrorBody,
    FilledSlot,
    FillRequest,
    FillSlot,
    Hits,
)

from kvbm_host_tier.answers import OPERATOR, Answers, Medium, OnboardState
from kvbm_host_tier.disk_view import AVOID_MS, STARTING_MS
from kvbm_host_tier.explain import Explain
from kvbm_host_tier.messages import (
    Answer,
    AskFill,
    EngineId,
    FillDone,
    FillFailed,
    TellHits,
)
from kvbm_host_tier.peer_messages import HoldersTold, PeerId, PeerPulled, PeerPullFailed
from kvbm_host_tier.peers import Outcome, Peers
from kvbm_host_tier.tier import Tier
from kvbm_host_tier.worth import Worth

HITS_MAX = 1024
"""At most this many hits are told per lookup; the rest are told the next time."""

NOT_ON_DISK = ("gone", "corrupt")
"""The disk tier's own word that it does not have a block; any other failure may pass."""
STARTING = "stale_arena"
"""Of a lower tier that has not mapped our arena yet."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A request to a disk tier: staged slots lent to it."""

    tier: WireTier
    instance: str
    slots: dict[SequenceHash, int]
    until_ms: int
    ahead: int = 0
    """Blocks of the same run that were asked for before these."""
    trace: str = ""


class Onboard:
    """All lookups that are not answered yet, and all fills in flight."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._states: dict[int, OnboardState] = {}
        self._waiting: dict[SequenceHash, list[tuple[int, int]]] = {}
        """Block on its way in → (onboard, index in its run) of each that waits for it."""
        self._fills: dict[int, Fill] = {}
        self._lent: list[tuple[int, Fill]] = []
        """(reusable from, fill) of fills without an answer: the disk tier may still read."""
        self._next_id = 1
        self.peers = Peers(tier)
        self.explain = Explain(tier)
        self._worth = Worth(tier.limits.recompute_tokens_per_s)
        self._answers = Answers(tier, self.explain)
        self._questions: dict[int, int] = {}
        """Question to the index → the onboard that waits for it."""

    def __len__(self) -> int:
        return len(self._states)

    def looked_up(
        self,
        connection: bytes,
        lookup: Lookup,
        hashes: list[SequenceHash],
        now_ms: int,
        *,
        block_tokens: int,
        block_bytes: int,
    ) -> None:
        """An engine asks which run of these blocks it can have."""
        if len(self._states) >= self._tier.limits.lookups_max:
            self._tier.counts["dropped.lookup_busy"] += 1
            self._answers.refuse(connection, lookup, hashes, "busy")
            return
        state = OnboardState(
            engine=EngineId(lookup.engine, lookup.incarnation),
            connection=connection,
            lookup=lookup.lookup,
            hashes=hashes,
            slots=[],
            answer_by_ms=now_ms + lookup.deadline_ms,
            lease_until_ms=now_ms + lookup.lease_ms,
            run=0,
            block_tokens=block_tokens,
            asked=lookup,
            block_bytes=block_bytes,
        )
        here = self._begin(state, now_ms)
        self._tell_hits(lookup, state.hashes[:here])  # The engine waits, the disk tier does not.

    def prefetch(
        self, reply_to: int, hashes: list[SequenceHash], now_ms: int, *, deadline_ms: int
    ) -> None:
        """An operator wants the leading blocks of a run here."""
        refusal = "busy" if len(self._states) >= self._tier.limits.lookups_max else ""
        if self._tier.draining:
            refusal = "draining"
        if refusal:
            text = "this host tier takes no prefetch now"
            self._tier.emit(Answer(reply_to, ErrorBody(code=refusal, message=text)))
            return
        state = OnboardState(
            engine=OPERATOR,
            connection=b"",
            lookup=0,
            hashes=hashes,
            slots=[],
            answer_by_ms=now_ms + deadline_ms,
            lease_until_ms=now_ms,
            run=0,
            block_tokens=0,
            reply_to=reply_to,
        )
        self._begin(state, now_ms)

    def _begin(self, state: OnboardState, now_ms: int) -> int:
        """Pin what is here, have filled what is below; returns how many blocks were here."""
        here = self._pin_prefix(state)
        fills = self._walk_rest(state, now_ms)
        self._tier.admit_used(state.hashes, state.slots)
        if state.reason == "not_stored":
            rest = state.hashes[state.run :]
            state.question = self.peers.ask(rest, now_ms, until_ms=state.answer_by_ms)
        if not fills and None not in state.slots and not state.question:
            self._answers.give(state)
        else:
            self._wait(state, fills, now_ms)
        return here

    def _pin_prefix(self, state: OnboardState) -> int:
        """Pin the leading blocks that are here: the common case, kept short."""
        state.slots += self._tier.table.pin_prefix(state.hashes)
        state.run = len(state.slots)
        return state.run

    def _walk_rest(
        self, state: OnboardState, now_ms: int, remote: Container[SequenceHash] = ()
    ) -> list[SequenceHash]:
        """Go on where the run ends; returns the blocks to be brought from below or a peer."""
        table, below = self._tier.table, self._tier.below
        fills: list[SequenceHash] = []
        for name in state.hashes[state.run :]:
            slot = table.find(name)
            if slot is not None:
                table.pin(slot, used=True)
            elif (
                below.usable(name, now_ms)
                or (name in remote and not self.peers.avoided(name, now_ms))
            ) and not table.is_staging(name):
                fills.append(name)
            elif name not in self._waiting:
                break
            state.slots.append(slot)
        state.run = len(state.slots)
        state.reason = "not_stored" if state.run < len(state.hashes) else ""
        return self._worth_it(state, self._fit(state, fills), now_ms)

    def _fit(self, state: OnboardState, fills: list[SequenceHash]) -> list[SequenceHash]:
        """Cut the run at the first fill for which there is no slot."""
        if not fills:
            return fills
        room = self._tier.make_room(len(fills))
        if room == len(fills):
            return fills
        self._tier.counts["dropped.fill_no_room"] += len(fills) - room
        self._cut(state, state.hashes.index(fills[room]), "no_room")
        return fills[:room]

    def _worth_it(
        self, state: OnboardState, fills: list[SequenceHash], now_ms: int
    ) -> list[SequenceHash]:
        """Cut the run at the first fill if the engine computes what is behind it sooner."""
        if not fills or not self._worth.is_asked:
            return fills
        brings = Counter(self._medium_of(name, now_ms) for name in fills)
        behind = state.run - state.hashes.index(fills[0])
        if not self._worth.declines(state, brings, blocks=behind, now_ms=now_ms):
            self._worth.began(state, brings, now_ms)
            return fills
        self._tier.counts["declined_blocks"] += behind
        place = self._medium_of(fills[0], now_ms)
        self._cut(state, state.run - behind, "recompute_cheaper", place)
        return []

    def _medium_of(self, name: SequenceHash, now_ms: int) -> Medium:
        source = self._tier.below.source(name, now_ms)
        return "remote" if source is None else source[0]

    def _wait(self, state: OnboardState, fills: list[SequenceHash], now_ms: int) -> None:
        onboard_id = self._next_id
        self._next_id += 1
        self._states[onboard_id] = state
        if state.question:
            self._questions[state.question] = onboard_id
        self._start_fills(state, fills, now_ms)
        self._await_blocks(onboard_id, state, 0)
        self._answer_if_complete(onboard_id)

    def _await_blocks(self, onboard_id: int, state: OnboardState, start: int) -> None:
        for index in range(start, state.run):
            if state.slots[index] is None:
                self._waiting.setdefault(state.hashes[index], []).append((onboard_id, index))

    # --- peers ------------------------------------------------------------------------------

    def holders_told(self, told: HoldersTold, now_ms: int) -> None:
        """The index knows who has the rest of a run, or does not."""
        onboard_id = self._questions.pop(told.question, 0)
        state = self._states.get(onboard_id)
        source = self.peers.told(told, now_ms)
        if state is None or state.question != told.question:
            return
        state.question = 0
        if source is not None:
            self._extend(onboard_id, state, *source, now_ms)
        self._answer_if_complete(onboard_id)

    def _extend(
        self, onboard_id: int, state: OnboardState, peer: PeerId, count: int, now_ms: int
    ) -> None:
        """Walk on with what a peer has."""
        start = state.run
        remote = frozenset(state.hashes[start : start + count])
        brought = self._walk_rest(state, now_ms, remote)
        self._tier.admit_used(state.hashes[start:], state.slots[start:])
        below = [name for name in brought if self._tier.below.usable(name, now_ms)]
        self._start_fills(state, below, now_ms)
        pulls = [name for name in brought if name not in set(below)]
        batch_max = self._tier.limits.batch_blocks_max
        for first in range(0, len(pulls), batch_max):
            slots = self._stage(pulls[first : first + batch_max], f"from {peer}", now_ms)
            self.peers.pull(peer, slots, now_ms, until_ms=state.answer_by_ms, trace=state.trace)
        self._await_blocks(onboard_id, state, start)
        self._take_outcomes(self.peers.advance(now_ms), now_ms)

    def _stage(
        self, names: Sequence[SequenceHash], why: str, now_ms: int
    ) -> dict[SequenceHash, int]:
        slots = self._tier.table.stage_all(names)
        self._tier.diary.note_all(now_ms, f"staged in slot {{slot}} {why}", names, slots)
        return dict(zip(names, slots, strict=True))

    def peer_pulled(self, event: PeerPulled, now_ms: int) -> None:
        """A pull has ended; others may fly."""
        self._take_outcomes(self.peers.pulled(event, now_ms), now_ms)
        self._take_outcomes(self.peers.advance(now_ms), now_ms)

    def peer_pull_failed(self, event: PeerPullFailed, now_ms: int) -> None:
        """… or brought nothing."""
        self._take_outcomes(self.peers.failed(event, now_ms), now_ms)
        self._take_outcomes(self.peers.advance(now_ms), now_ms)

    def _take_outcomes(self, outcomes: Iterable[Outcome], now_ms: int) -> None:
        for name, slot, outcome in outcomes:
            if isinstance(outcome, str):
                self._not_coming(name, outcome, "remote")
            else:
                self._tier.guests[name] = None
                self._tier.counts["peer_pulled_blocks"] += 1
                self._tier.counts["bytes.r2h"] += outcome.bytes
                self._landed([(slot, outcome)], "remote", now_ms)

    # --- fills ------------------------------------------------------------------------------

    def _start_fills(self, state: OnboardState, names: Sequence[SequenceHash], now_ms: int) -> None:
        """Batches, prefix first, each to one disk tier; they are in flight side by side."""
        by_source: dict[tuple[WireTier, str], list[SequenceHash]] = {}
        for name in names:
            source = self._tier.below.source(name, now_ms)
            assert source is not None, self._tier.diary.story(name)
            by_source.setdefault(source, []).append(name)
        for (tier, instance), wanted in by_source.items():
            batch_max = self._tier.batch_blocks(tier)
            for start in range(0, len(wanted), batch_max):
                slots = self._stage(wanted[start : start + batch_max], "for a fill", now_ms)
                fill = Fill(tier, instance, slots, state.answer_by_ms, start, state.trace)
                self._ask(fill)

    def _ask(self, fill: Fill) -> None:
        request = FillRequest(
            epoch=self._tier.announcer.epoch,
            until_ms=fill.until_ms,
            slots=[FillSlot(hash=name.hex(), slot=slot) for name, slot in fill.slots.items()],
            ahead=fill.ahead,
            trace=fill.trace,
        )
        self._fills[self._next_id] = fill
        self._tier.emit(AskFill(self._next_id, fill.instance, request, fill.tier))
        self._next_id += 1

    def fill_done(self, event: FillDone, now_ms: int) -> None:
        """A disk tier has answered; whatever it did not mention has failed."""
        fill = self._fills.pop(event.fill)
        hashes = hashes_from_hex([filled.hash for filled in event.reply.slots])
        answered = dict(zip(hashes, event.reply.slots, strict=True))
        arrived: list[tuple[int, Block]] = []
        missing: list[tuple[SequenceHash, str]] = []
        for name, slot in fill.slots.items():
            filled = answered.get(name)
            if filled is not None and filled.ok and filled.slot == slot:
                arrived.append((slot, _block_of(name, filled)))
            else:
                self._tier.table.abort(slot)
                missing.append((name, filled.reason if filled is not None else "no_answer"))
        self._tier.counts["promoted_blocks"] += len(arrived)
        self._landed(arrived, fill.tier, now_ms)
        for name, reason in missing:
            self._missing(fill, name, reason, now_ms)
        self._tier.announce_stored([block for _, block in arrived])

    def fill_failed(self, event: FillFailed, now_ms: int) -> None:
        """No answer. Unless that is settled, the slots stay lent until the disk tier is done."""
        fill = self._fills.pop(event.fill)
        if event.settled:
            self._take_back(fill)
        else:
            for slot in fill.slots.values():
                self._tier.table.abandon(slot)
            self._lent.append((max(now_ms, fill.until_ms) + FILL_GRACE_MS, fill))
        for name in fill.slots:
            self._missing(fill, name, event.reason, now_ms)

    def disk_restarted(self, tier: WireTier, instance: str) -> None:
        """A disk tier has begun a new life: its old one reads no more."""
        for entry in self._lent[:]:
            if (entry[1].tier, entry[1].instance) == (tier, instance):
                self._lent.remove(entry)
                self._take_back(entry[1])

    def _take_back(self, fill: Fill) -> None:
        for slot in fill.slots.values():
            self._tier.table.abort(slot)

    def _landed(self, arrived: Sequence[tuple[int, Block]], source: Medium, now_ms: int) -> None:
        """Blocks are here, with their slots: those who wait for them have them."""
        table = self._tier.table
        served: dict[int, None] = {}
        for slot, block in arrived:
            table.register(slot, block)
            waiting = self._waiting.pop(block.hash, ())
            uses = 0
            for onboard_id, index in waiting:
                served[onboard_id] = None
                state = self._states.get(onboard_id)
                if state is not None and index < state.run:
                    table.pin(slot)
                    state.slots[index] = slot
                    state.came_from[index] = source
                    uses += 2 if state.reply_to else 1  # An operator wants it to stay.
            if uses > 1:
                self._tier.admit([block.hash])
        names, slots = [block.hash for _, block in arrived], [slot for slot, _ in arrived]
        self._tier.diary.note_all(now_ms, f"came from {source} to slot {{slot}}", names, slots)
        for onboard_id in served:
            self._answer_if_complete(onboard_id)

    def _missing(self, fill: Fill, name: SequenceHash, reason: str, now_ms: int) -> None:
        """A fill has failed for a block."""
        view = self._tier.below.views[fill.tier]
        if reason in NOT_ON_DISK:
            view.forget(name)
        else:
            view.avoid(name, now_ms, for_ms=STARTING_MS if reason == STARTING else AVOID_MS)
        self._tier.counts[f"dropped.fill_{reason}"] += 1
        self._not_coming(name, reason, fill.tier)

    def _not_coming(self, name: SequenceHash, reason: str, place: Place) -> None:
        """Those who wait for a block get what is before it."""
        for onboard_id, index in self._waiting.pop(name, []):
            state = self._states.get(onboard_id)
            if state is not None and index < state.run:
                self._cut(state, index, reason, place)
                self._answer_if_complete(onboard_id)

    # --- answers ----------------------------------------------------------------------------

    def _cut(self, state: OnboardState, run: int, reason: str, place: Place = "") -> None:
        """The run ends before index `run`: give back what was pinned behind it."""
        self._tier.table.unpin(slot for slot in state.slots[run:] if slot is not None)
        del state.slots[run:]
        state.brings = {}  # Not all of them have come.
        state.question = 0  # What is behind the cut is of no use any more.
        state.run = run
        state.reason, state.failed_at = reason, place

    def _answer_if_complete(self, onboard_id: int) -> None:
        state = self._states.get(onboard_id)
        if state is None or None in state.slots:
            return
        self._worth.ended(state, self._tier.now_ms)
        if not state.question:
            del self._states[onboard_id]
            self._answers.give(state)

    def tick(self, now_ms: int) -> None:
        """Answer what is due with the prefix that is here; take back slots that were lent."""
        due = [i for i, state in self._states.items() if now_ms >= state.answer_by_ms]
        for onboard_id in due:
            state = self._states.pop(onboard_id)
            if None in state.slots:
                self._worth.ended(state, now_ms)
                self._tier.counts["lookups_cut_by_deadline"] += 1
                run = state.slots.index(None)
                self._cut(state, run, "deadline", self._place_of(state.hashes[run]))
            self._answers.give(state)
        self._take_outcomes(self.peers.advance(now_ms), now_ms)
        for entry in [entry for entry in self._lent if now_ms >= entry[0]]:
            self._lent.remove(entry)
            self._take_back(entry[1])

    def _place_of(self, name: SequenceHash) -> Place:
        """Where a block that has not come was to come from."""
        views = self._tier.below.views
        return next((tier for tier, view in views.items() if name in view), "remote")

    def end_engine(self, engine_id: EngineId) -> None:
        """Nobody waits for these answers any more."""
        for onboard_id in [i for i, state in self._states.items() if state.engine == engine_id]:
            state = self._states.pop(onboard_id)
            self._cut(state, 0, "engine_lost")
            self._answers.explain(state)

    def _tell_hits(self, lookup: Lookup, names: Iterable[SequenceHash]) -> None:
        """The disk tier gives space to what is asked for again."""
        news = hashes_to_hex(self._tier.below.missing(names)[:HITS_MAX])
        if news:
            self._tier.emit(TellHits(Hits(namespace=lookup.namespace.hex(), hashes=news)))

    def staged_slots(self) -> set[int]:
        """Every slot that a fill has staged, for `check`."""
        fills = [*self._fills.values(), *(fill for _, fill in self._lent)]
        lent = {slot for fill in fills for slot in fill.slots.values()}
        pulled = self.peers.staged_slots()
        assert not lent & pulled, "a fill and a pull write one slot"
        return lent | pulled

    def pinned_slots(self) -> list[int]:
        """Every pin that a waiting lookup holds, for `check`."""
        states = self._states.values()
        return [slot for state in states for slot in state.slots if slot is not None]

    def check(self) -> None:
        """Assert every invariant."""
        self.peers.check()
        self.explain.check()
        for name, waiting in self._waiting.items():
            assert self._tier.table.is_staging(name), self._tier.diary.story(name)
            assert waiting
        for state in self._states.values():
            assert state.question or None in state.slots, "a complete lookup was not answered"
            assert len(state.slots) == state.run


def _block_of(name: SequenceHash, filled: FilledSlot) -> Block:
    parent = hash_from_hex(filled.parent)
    return Block(name, parent, bytes.fromhex(filled.namespace), filled.checksum, filled.bytes)
