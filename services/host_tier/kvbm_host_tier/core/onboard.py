"""Onboard, G2 (and G3 and G4 through G2) → G1: answer lookups with leased slots.

A lookup is walked from its first block on. Each block is either here (pin it), below (stage a
slot and have it filled), on its way for another lookup (wait for it, too), or the end of the run.
The answer leaves once: when all is here, or at its deadline with the prefix that is here by then.
Blocks that arrive after the answer stay: they have been promoted. Where this host has no more, the
index is asked for other hosts that have, and the walk goes on with what a peer has. The states of
a lookup are drawn in `docs/state_machines.md`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import Block
from kvbm_common.wire.explain import Place
from kvbm_common.wire.local import Lookup, Refused
from kvbm_common.wire.verbs import ErrorBody

from kvbm_host_tier.core.answers import (
    LOOKUP,
    OPERATOR,
    OTHER_NAMESPACE,
    Answers,
    LookupState,
    Medium,
    OnboardState,
)
from kvbm_host_tier.core.engines import Engine
from kvbm_host_tier.core.fills import Filled, Fills
from kvbm_host_tier.core.group_plan import GroupPlan
from kvbm_host_tier.core.held_blocks import HeldBlocks
from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.load_cost import LoadCost
from kvbm_host_tier.core.lower_tiers import LowerTiers, Namespaces
from kvbm_host_tier.core.messages import Answer, EngineId, FillDone, FillFailed, ToEngine
from kvbm_host_tier.core.peer_messages import HoldersTold, PeerId, PeerPulled, PeerPullFailed
from kvbm_host_tier.core.peers import Outcome, Peers


class Onboard:
    """All lookups that are not answered yet."""

    def __init__(
        self,
        held: HeldBlocks,
        below: LowerTiers,
        fills: Fills,
        peers: Peers,
        answers: Answers,
        means: Means,
    ) -> None:
        assert means.limits.lookups_max >= 0
        self._held, self._table = held, held.table
        self._below = below
        self._fills = fills
        self._peers = peers
        self._answers = answers
        self._limits, self._counts, self._emit = means.limits, means.counts, means.emit
        self._cost = LoadCost(means.limits.recompute_tokens_per_s, below)
        self._states: dict[int, OnboardState] = {}
        self._waiting: dict[SequenceHash, list[tuple[int, int]]] = {}
        """Block on its way in → (lookup, index in its run) of each that waits for it."""
        self._questions: dict[int, int] = {}
        """Question to the index → the lookup that waits for it."""
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._states)

    def _move(self, onboard_id: int, event: str) -> OnboardState:
        """Move a lookup by its table; a lookup whose states are over is forgotten."""
        state = self._states[onboard_id]
        if state.state is not None and LOOKUP.ends(state.state, event):
            del self._states[onboard_id]
        else:
            state.state = LOOKUP.next(state.state, event, state.owner)
        return state

    # --- the beginning ----------------------------------------------------------------------

    def looked_up(
        self,
        connection: bytes,
        lookup: Lookup,
        hashes: list[SequenceHash],
        engine: Engine,
        now_ms: int,
    ) -> None:
        """Find the longest run of these blocks that an engine can have."""
        assert engine.id.incarnation == lookup.incarnation, engine.label
        if lookup.namespace not in engine.namespaces:
            self._counts["refused.lookup_namespace"] += 1
            text = "a lookup names a namespace with which its engine has not said hello"
            refusal = Refused(about="lookup", code="namespace", message=text, field="namespace")
            self._emit(ToEngine(connection, refusal))
            return
        if len(self._states) >= self._limits.lookups_max:
            self._counts["dropped.lookup_busy"] += 1
            self._answers.refuse(connection, lookup, hashes, "busy", now_ms)
            return
        plan = None
        if lookup.groups:
            plan = GroupPlan.of(lookup.groups, hashes)
            own = engine.namespaces
            plan.choose(self._table.holds, lambda name: self._may_come(name, own, now_ms))
            hashes = plan.needed()
        state = OnboardState.of_engine(connection, lookup, hashes, engine, plan, now_ms)
        here = self._begin(state, now_ms)
        # The engine waits, the disk tier does not.
        self._held.tell_hits(lookup.namespace, hashes[:here], engine.block_bytes)

    def prefetch(
        self, reply_to: int, hashes: list[SequenceHash], now_ms: int, *, deadline_ms: int
    ) -> None:
        """Bring the leading blocks of a run here, for an operator."""
        assert reply_to
        if self._held.draining or len(self._states) >= self._limits.lookups_max:
            code = "draining" if self._held.draining else "busy"
            error = ErrorBody(code=code, message="this host tier takes no prefetch now")
            self._emit(Answer(reply_to, error))
            return
        state = OnboardState(
            engine=OPERATOR,
            owner=OPERATOR.engine,
            hashes=hashes,
            answer_by_ms=now_ms + deadline_ms,
            lease_until_ms=now_ms,
            reply_to=reply_to,
        )
        self._begin(state, now_ms)

    def _begin(self, state: OnboardState, now_ms: int) -> int:
        """Pin what is here, have filled what is below; returns how many blocks were here."""
        state.slots += self._table.pin_prefix(state.hashes)  # All of them, in the common case.
        state.run = len(state.slots)
        self._answers.keep_own(state)
        here = state.run
        fills, question = list[SequenceHash](), 0
        if here < len(state.hashes) and not state.reason:
            fills = self._walk_rest(state, now_ms)
        self._admit(state.hashes, state.slots)
        if state.reason == "not_stored" and state.plan is None:
            rest = state.hashes[state.run :]
            question = self._peers.ask(rest, now_ms, until_ms=state.answer_by_ms)
        if fills or question or None in state.slots:
            self._wait(state, fills, question, now_ms)
        else:
            self._answers.give(state, now_ms)
        return here

    def _may_come(self, name: SequenceHash, own: Namespaces, now_ms: int) -> bool:
        """Return whether a block is here, below for its engine, or on its way for a lookup."""
        if self._table.holds(name) or name in self._waiting:
            return True
        return not self._table.is_staging(name) and self._below.usable(name, now_ms, own)

    def _admit(self, names: Sequence[SequenceHash], slots: Sequence[int | None]) -> None:
        """Turn guests that were just pinned into announced blocks: this is their second use."""
        if self._held.guests.names:
            here = zip(names, slots, strict=False)
            self._held.admit([name for name, slot in here if slot is not None])

    def _walk_rest(
        self, state: OnboardState, now_ms: int, remote: Container[SequenceHash] = ()
    ) -> list[SequenceHash]:
        """Go on where the run ends; returns the blocks to be brought from below or a peer."""
        assert len(state.slots) == state.run, state.owner
        table, below, own = self._table, self._below, state.namespaces
        fills: list[SequenceHash] = []
        for name in state.hashes[state.run :]:
            slot = table.find(name)
            if slot is not None:
                table.pin(slot, used=True)
            elif (
                below.usable(name, now_ms, own)
                or (name in remote and not self._peers.avoided(name, now_ms))
            ) and not table.is_staging(name):
                fills.append(name)
            elif name not in self._waiting:
                break
            state.slots.append(slot)
        state.run = len(state.slots)
        state.reason = ""
        if state.run < len(state.hashes):
            place = below.others(state.hashes[state.run], own)
            state.reason = OTHER_NAMESPACE if place else "not_stored"
            state.failed_at = place or ""
        if not fills:
            return fills
        return self._worth_it(state, self._fit(state, fills, now_ms), now_ms)

    def _fit(
        self, state: OnboardState, fills: list[SequenceHash], now_ms: int
    ) -> list[SequenceHash]:
        """Cut the run at the first fill for which there is no slot."""
        size = state.block_bytes = state.block_bytes or self._held.size_of(state.slots, fills[0])
        room = self._held.make_room(len(fills), size, now_ms) if size else 0
        if room == len(fills):
            return fills
        reason = "no_room" if size else "unknown_size"
        self._counts[f"dropped.fill_{reason}"] += len(fills) - room
        state.cut(state.hashes.index(fills[room]), reason, self._table)
        return fills[:room]

    def _worth_it(
        self, state: OnboardState, fills: list[SequenceHash], now_ms: int
    ) -> list[SequenceHash]:
        """Cut the run at the first fill if the engine computes what is behind it sooner."""
        if not fills or not self._cost.is_asked:
            return fills
        place = self._cost.weigh(state, fills, now_ms)
        if place is None:
            return fills
        run = state.hashes.index(fills[0])
        self._counts["declined_blocks"] += state.run - run
        state.cut(run, "recompute_cheaper", self._table, place)
        return []

    def _wait(
        self, state: OnboardState, fills: list[SequenceHash], question: int, now_ms: int
    ) -> None:
        onboard_id = self._next_id
        self._next_id += 1
        self._states[onboard_id] = state
        self._move(onboard_id, "index asked" if question else "blocks asked for")
        if question:
            self._questions[question] = onboard_id
        self._fills.start(fills, state.block_bytes, state.answer_by_ms, state.trace, now_ms)
        self._await_blocks(onboard_id, state, 0)
        self._answer_if_complete(onboard_id, now_ms)

    def _await_blocks(self, onboard_id: int, state: OnboardState, start: int) -> None:
        assert 0 <= start <= state.run, state.owner
        for index in range(start, state.run):
            if state.slots[index] is None:
                self._waiting.setdefault(state.hashes[index], []).append((onboard_id, index))

    # --- peers ------------------------------------------------------------------------------

    def holders_told(self, told: HoldersTold, now_ms: int) -> None:
        """Go on with what a peer has, or answer: the index knows of no more, or is silent."""
        onboard_id = self._questions.pop(told.question, 0)
        state = self._states.get(onboard_id)
        source = self._peers.told(told, now_ms)
        if state is None or state.state is not LookupState.ASKING:
            return
        self._move(onboard_id, "index answered")
        if source is not None:
            self._extend(onboard_id, state, *source, now_ms)
        self._answer_if_complete(onboard_id, now_ms)

    def _extend(
        self, onboard_id: int, state: OnboardState, peer: PeerId, count: int, now_ms: int
    ) -> None:
        """Walk on with what a peer has."""
        assert count >= 0
        start, own = state.run, state.namespaces
        remote = frozenset(state.hashes[start : start + count])
        brought = self._walk_rest(state, now_ms, remote)
        self._admit(state.hashes[start:], state.slots[start:])
        below = [name for name in brought if self._below.usable(name, now_ms, own)]
        self._fills.start(below, state.block_bytes, state.answer_by_ms, state.trace, now_ms)
        pulls = [name for name in brought if name not in set(below)]
        batch_max = self._limits.batch_blocks_max
        for first in range(0, len(pulls), batch_max):
            names = pulls[first : first + batch_max]
            slots = self._held.stage(names, state.block_bytes, f"from {peer}", now_ms)
            lent = dict(zip(names, slots, strict=True))
            self._peers.pull(peer, lent, now_ms, until_ms=state.answer_by_ms, trace=state.trace)
        self._await_blocks(onboard_id, state, start)
        self._take_outcomes(self._peers.advance(now_ms), now_ms)

    def peer_pulled(self, event: PeerPulled, now_ms: int) -> None:
        """Take in what a pull has brought, and start the next one."""
        self._take_outcomes(self._peers.pulled(event, now_ms), now_ms)
        self._take_outcomes(self._peers.advance(now_ms), now_ms)

    def peer_pull_failed(self, event: PeerPullFailed, now_ms: int) -> None:
        """Cut the lookups that wait for a failed pull, and start the next one."""
        self._take_outcomes(self._peers.failed(event, now_ms), now_ms)
        self._take_outcomes(self._peers.advance(now_ms), now_ms)

    def _take_outcomes(self, outcomes: Iterable[Outcome], now_ms: int) -> None:
        for name, slot, outcome in outcomes:
            if isinstance(outcome, str):
                self._not_coming(name, outcome, "remote", now_ms)
            else:
                self._held.add_guest(name, slot)
                self._counts["peer_pulled_blocks"] += 1
                self._counts["bytes.r2h"] += outcome.bytes
                self._landed([(slot, outcome)], "remote", now_ms)

    # --- fills ------------------------------------------------------------------------------

    def fill_done(self, event: FillDone, now_ms: int) -> None:
        """Take in what a lower tier has brought."""
        filled = self._fills.done(event, now_ms)
        self._landed(filled.arrived, filled.tier, now_ms)
        self._cut_missing(filled, now_ms)
        self._held.announce([block for _, block in filled.arrived])

    def fill_failed(self, event: FillFailed, now_ms: int) -> None:
        """Cut the lookups that wait for a fill without an answer."""
        self._cut_missing(self._fills.failed(event, now_ms), now_ms)

    def _cut_missing(self, filled: Filled, now_ms: int) -> None:
        for name, reason in filled.missing:
            self._not_coming(name, reason, filled.tier, now_ms)

    def _landed(self, arrived: Sequence[tuple[int, Block]], source: Medium, now_ms: int) -> None:
        """Commit blocks that are in their slots, and give them to the lookups that wait."""
        table = self._table
        served: dict[int, None] = {}
        for slot, block in arrived:
            table.register(slot, block)
            uses = 0
            for onboard_id, index in self._waiting.pop(block.hash, ()):
                served[onboard_id] = None
                state = self._states.get(onboard_id)
                if state is not None and index < state.run:
                    assert state.slots[index] is None, self._held.story(block.hash)
                    table.pin(slot)
                    state.slots[index] = slot
                    state.came_from[index] = source
                    uses += 2 if state.reply_to else 1  # An operator wants it to stay.
            if uses > 1:
                self._held.admit([block.hash])
        self._held.landed(arrived, source, now_ms)
        for onboard_id in served:
            self._answer_if_complete(onboard_id, now_ms)

    def _not_coming(self, name: SequenceHash, reason: str, place: Place, now_ms: int) -> None:
        """Cut the lookups that wait for a block before that block."""
        assert not self._table.is_staging(name), self._held.story(name)
        for onboard_id, index in self._waiting.pop(name, []):
            state = self._states.get(onboard_id)
            if state is not None and index < state.run:
                state.cut(index, reason, self._table, place)
                if state.state is LookupState.ASKING:  # The blocks behind the cut are of no use.
                    self._move(onboard_id, "cut")
                self._answer_if_complete(onboard_id, now_ms)

    # --- answers ----------------------------------------------------------------------------

    def _answer_if_complete(self, onboard_id: int, now_ms: int) -> None:
        state = self._states.get(onboard_id)
        if state is None or None in state.slots:
            return
        assert len(state.slots) == state.run, state.owner
        self._cost.ended(state, now_ms)
        if state.state is LookupState.FILLING:
            self._answers.give(self._move(onboard_id, "complete"), now_ms)

    def tick(self, now_ms: int) -> None:
        """Answer the lookups that are due with the prefix that is here, and start pulls."""
        due = [i for i, state in self._states.items() if now_ms >= state.answer_by_ms]
        for onboard_id in due:
            state = self._move(onboard_id, "deadline")
            if None in state.slots:
                self._cost.ended(state, now_ms)
                self._counts["lookups_cut_by_deadline"] += 1
                run = state.slots.index(None)
                place = self._below.medium_of(state.hashes[run]) or "remote"
                state.cut(run, "deadline", self._table, place)
            self._answers.give(state, now_ms)
        self._take_outcomes(self._peers.advance(now_ms), now_ms)
        assert all(now_ms < state.answer_by_ms for state in self._states.values())

    def end_engine(self, engine_id: EngineId, now_ms: int) -> None:
        """Drop the lookups of an engine that has left, and what they pin."""
        assert engine_id != OPERATOR
        for onboard_id in [i for i, state in self._states.items() if state.engine == engine_id]:
            state = self._move(onboard_id, "engine left")
            state.cut(0, "engine_lost", self._table)
            self._answers.explain(state, now_ms)

    # --- checks -----------------------------------------------------------------------------

    def pinned_slots(self) -> list[int]:
        """Return every pin that a waiting lookup holds, for `check`."""
        states = self._states.values()
        return [slot for state in states for slot in state.slots if slot is not None]

    def check(self) -> None:
        """Assert every invariant of the lookups."""
        for name, waiting in self._waiting.items():
            assert self._table.is_staging(name), self._held.story(name)
            assert waiting
        asking = set(self._questions.values())
        for onboard_id, state in self._states.items():
            assert state.state is not None, state.owner
            is_asking = state.state is LookupState.ASKING
            assert is_asking or None in state.slots, "a complete lookup was not answered"
            assert onboard_id in asking or not is_asking, state.owner
            assert len(state.slots) == state.run, state.owner
