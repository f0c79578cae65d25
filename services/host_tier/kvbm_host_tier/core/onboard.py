"""Onboard, G2 (and G3 and G4 through G2) → G1: answer lookups with leased slots.

The blocks of a lookup are visited from the first one on. A block is here (pin it), below (stage a
slot and have it filled), on its way for another lookup (wait for it, too), or it ends the run.
Each lookup is answered once: when all is here, or at its deadline with the prefix that is here then
(with several KV groups, the largest hit). Blocks that come later stay: they are promoted.
Where this host has no more, the index is asked for a peer, unless there are several KV groups; the
visit goes on with the peer's blocks. `docs/state_machines.md` draws a lookup's states.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import Block
from kvbm_common.wire.explain import Place
from kvbm_common.wire.local import Lookup, Refused
from kvbm_common.wire.verbs import ErrorBody

from kvbm_host_tier.core.answers import OPERATOR, OTHER_NAMESPACE, Answers
from kvbm_host_tier.core.engines import Engine
from kvbm_host_tier.core.fills import Filled, Fills
from kvbm_host_tier.core.group_plan import GroupPlan
from kvbm_host_tier.core.held_blocks import HeldBlocks
from kvbm_host_tier.core.known_runs import Run
from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.load_cost import NO_LOOKUP, LoadCost
from kvbm_host_tier.core.lower_tier_view import Namespaces
from kvbm_host_tier.core.lower_tiers import LowerTiers
from kvbm_host_tier.core.messages import Answer, EngineId, FillDone, FillFailed, ToEngine
from kvbm_host_tier.core.open_lookup import LOOKUP, LookupState, Medium, OpenLookup
from kvbm_host_tier.core.peer_messages import HoldersTold, PeerId, PeerPulled, PeerPullFailed
from kvbm_host_tier.core.peers import Outcome, Peers
from kvbm_host_tier.core.presence import Presence
from kvbm_host_tier.core.waiting_lookups import WaitingLookups


class Onboard:
    """All lookups that are not answered yet."""

    def __init__(
        self, held: HeldBlocks, below: LowerTiers, fills: Fills, peers: Peers, answers: Answers,
        waiting: WaitingLookups, cost: LoadCost, means: Means,
    ) -> None:  # fmt: skip
        assert means.limits.lookups_max >= 0
        self._held, self._table = held, held.table
        self._below = below
        self._fills = fills
        self._peers = peers
        self._answers = answers
        self._limits, self._counts, self._emit = means.limits, means.counts, means.emit
        self._cost = cost
        self._lookups: dict[int, OpenLookup] = {}
        self._waiting = waiting
        self._presence = Presence(self._table, below, waiting)
        self._questions: dict[int, int] = {}
        """Question to the index → the lookup that waits for it."""
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._lookups)

    def _move(self, lookup_id: int, event: str) -> OpenLookup:
        """Move a lookup by its table; forget a lookup that has ended."""
        lookup = self._lookups[lookup_id]
        if lookup.state is not None and LOOKUP.ends(lookup.state, event):
            del self._lookups[lookup_id]
        else:
            lookup.state = LOOKUP.next(lookup.state, event, lookup.owner)
        return lookup

    # --- the beginning ----------------------------------------------------------------------

    def looked_up(
        self, connection: bytes, asked: Lookup, run: Run, engine: Engine, now_ms: int
    ) -> None:
        """Find the longest run of these blocks that an engine can have."""
        assert engine.id.incarnation == asked.incarnation, engine.label
        hashes = run.names
        if asked.namespace not in engine.namespaces:
            self._counts["refused.lookup_namespace"] += 1
            text = "a lookup names a namespace with which its engine has not said hello"
            refusal = Refused(about="lookup", code="namespace", message=text, field="namespace")
            self._emit(ToEngine(connection, refusal))
            return
        if len(self._lookups) >= self._limits.lookups_max:
            self._counts["dropped.lookup_busy"] += 1
            self._answers.refuse(connection, asked, hashes, "busy", now_ms)
            return
        if asked.prefill is not None and asked.prefill.is_valid:
            engine.prefill = asked.prefill
        if asked.only_asks and (usable := self._presence.run_of(hashes, engine.namespaces, now_ms)):
            self._answers.tell_usable(connection, asked, usable)
            return
        plan = None
        if asked.groups:
            plan = GroupPlan.of(asked.groups, hashes)
            shorter = plan.choose(self._presence.of(engine.namespaces, now_ms))
            hashes = plan.needed()
        lookup = OpenLookup.of_engine(connection, asked, hashes, engine, plan, now_ms)
        if plan is None:
            lookup.known = run
        else:
            lookup.fallback = list(self._table.pin_prefix(shorter))
        count = self._begin(lookup, now_ms)
        self._held.hits.note(asked.namespace, hashes[:count], engine.block_bytes)

    def prefetch(
        self, reply_to: int, hashes: list[SequenceHash], now_ms: int, *, deadline_ms: int,
        namespaces: Namespaces = frozenset(),
    ) -> None:  # fmt: skip
        """Bring the leading blocks of a run here, for an operator or a hint."""
        assert reply_to
        if self._held.draining or len(self._lookups) >= self._limits.lookups_max:
            code = "draining" if self._held.draining else "busy"
            error = ErrorBody(code=code, message="this host tier takes no prefetch now")
            self._emit(Answer(reply_to, error))
            return
        lookup = OpenLookup(
            engine=OPERATOR, owner=OPERATOR.engine, hashes=hashes,
            answer_by_ms=now_ms + deadline_ms, lease_until_ms=now_ms, reply_to=reply_to,
            namespaces=namespaces,
        )  # fmt: skip
        self._begin(lookup, now_ms)

    def _begin(self, lookup: OpenLookup, now_ms: int) -> int:
        """Pin the blocks that are here, ask for the others; returns how many were here."""
        # In the common case all blocks are here.
        lookup.slots = [*self._table.pin_prefix(lookup.hashes, lookup.known.slots)]
        lookup.run_blocks = len(lookup.slots)
        self._answers.keep_own(lookup)
        here = lookup.run_blocks
        fills, question = list[SequenceHash](), 0
        goes_on = here < len(lookup.hashes) and not lookup.reason
        if goes_on:
            fills = self._walk_rest(lookup, now_ms)
        self._admit(lookup.hashes, lookup.slots)
        if lookup.reason == "not_stored" and lookup.plan is None:
            rest = lookup.hashes[lookup.run_blocks :]
            question = self._peers.ask(rest, now_ms, until_ms=lookup.answer_by_ms)
        if fills or question or (goes_on and None in lookup.slots):
            self._wait(lookup, fills, question, now_ms)
        else:
            self._answers.give(lookup, now_ms)
        return here

    def _admit(self, names: Sequence[SequenceHash], slots: Sequence[int | None]) -> None:
        """Turn guests that were just pinned into announced blocks: this is their second use."""
        if self._held.guests.names or self._held.demoted.names:
            here = zip(names, slots, strict=False)
            self._held.admit([name for name, slot in here if slot is not None])

    def _walk_rest(
        self, lookup: OpenLookup, now_ms: int, remote: Container[SequenceHash] = ()
    ) -> list[SequenceHash]:
        """Go on where the run ends; returns the blocks to be brought from below or a peer."""
        fills = self._walk(lookup, now_ms, remote)
        if fills:
            fills = self._cut_where_no_room(lookup, fills, now_ms)
        return self._cost.cut(lookup, fills, now_ms)

    def _walk(
        self, lookup: OpenLookup, now_ms: int, remote: Container[SequenceHash] = ()
    ) -> list[SequenceHash]:
        """Pin the blocks here up to the first that cannot be loaded; return those to fill."""
        assert len(lookup.slots) == lookup.run_blocks, lookup.owner
        table, below, own = self._table, self._below, lookup.namespaces
        fills: list[SequenceHash] = []
        for name in lookup.hashes[lookup.run_blocks :]:
            slot = table.find(name)
            if slot is not None:
                table.pin(slot, used=True)
            elif (
                below.usable(name, now_ms, own)
                or (name in remote and not self._peers.came_wrong(name, now_ms))
            ) and not table.is_staging(name):
                fills.append(name)
            elif name not in self._waiting:
                break
            lookup.slots.append(slot)
        lookup.run_blocks = len(lookup.slots)
        lookup.reason = ""
        if lookup.run_blocks < len(lookup.hashes):
            place = below.others(lookup.hashes[lookup.run_blocks], own)
            lookup.reason = OTHER_NAMESPACE if place else "not_stored"
            lookup.failed_at = place or ""
        return fills

    def _cut_where_no_room(
        self, lookup: OpenLookup, fills: list[SequenceHash], now_ms: int
    ) -> list[SequenceHash]:
        """Cut the run at the first fill for which there is no slot; returns the fills before."""
        size = lookup.block_bytes = lookup.block_bytes or self._held.size_of(
            lookup.slots, fills[0], lookup.namespaces
        )
        # All namespaces of an engine are of one tenant.
        own = next(iter(lookup.namespaces or ()), b"")
        room = self._held.make_room(len(fills), size, now_ms, own) if size else 0
        if room == len(fills):
            return fills
        reason = "no_room" if size else "unknown_size"
        if lookup.plan is None:
            lookup.cut(lookup.hashes.index(fills[room]), reason, self._table)
            kept = fills[:room]
        else:  # A part of its run would be of no use: blocks come group after group.
            lookup.plan.shorten(room, self._presence.of(lookup.namespaces, now_ms))
            lookup.restart(lookup.plan, self._table)
            kept = self._walk(lookup, now_ms)
            lookup.reason = reason
        self._counts[f"dropped.fill_{reason}"] += max(0, len(fills) - len(kept))
        return kept

    def _wait(
        self, lookup: OpenLookup, fills: list[SequenceHash], question: int, now_ms: int
    ) -> None:
        lookup_id = self._next_id
        self._next_id += 1
        self._lookups[lookup_id] = lookup
        self._move(lookup_id, "index asked" if question else "blocks asked for")
        if question:
            self._questions[question] = lookup_id
        self._fills.start(fills, lookup, now_ms)
        self._await_blocks(lookup_id, lookup, 0)
        self._answer_if_complete(lookup_id, now_ms)

    def _await_blocks(self, lookup_id: int, lookup: OpenLookup, start: int) -> None:
        assert 0 <= start <= lookup.run_blocks, lookup.owner
        for index in range(start, lookup.run_blocks):
            if lookup.slots[index] is None:
                self._waiting.add(lookup.hashes[index], (lookup_id, index))

    # --- peers ------------------------------------------------------------------------------

    def holders_told(self, told: HoldersTold, now_ms: int) -> None:
        """Go on with what a peer has, or answer: the index knows of no more, or is silent."""
        lookup_id = self._questions.pop(told.question, 0)
        lookup = self._lookups.get(lookup_id)
        source = self._peers.told(told, now_ms)
        if lookup is None or lookup.state is not LookupState.ASKING:
            return
        self._move(lookup_id, "index answered")
        if source is not None:
            self._extend(lookup_id, lookup, *source, now_ms)
        self._answer_if_complete(lookup_id, now_ms)

    def _extend(
        self, lookup_id: int, lookup: OpenLookup, peer: PeerId, count: int, now_ms: int
    ) -> None:
        """Walk on with what a peer has."""
        assert count >= 0
        start, own = lookup.run_blocks, lookup.namespaces
        remote = frozenset(lookup.hashes[start : start + count])
        brought = self._walk_rest(lookup, now_ms, remote)
        self._admit(lookup.hashes[start:], lookup.slots[start:])
        below = dict.fromkeys(name for name in brought if self._below.usable(name, now_ms, own))
        self._fills.start(list(below), lookup, now_ms)
        self._peers.start(peer, [name for name in brought if name not in below], lookup, now_ms)
        self._await_blocks(lookup_id, lookup, min(start, lookup.run_blocks))  # Perhaps it was cut.
        self._start_pulls(now_ms)

    def peer_pulled(self, event: PeerPulled, now_ms: int) -> None:
        """Take in what a pull has brought, and start the next one."""
        self._take_outcomes(self._peers.pulled(event, now_ms), now_ms)
        self._start_pulls(now_ms)

    def peer_pull_failed(self, event: PeerPullFailed, now_ms: int) -> None:
        """Cut the lookups that wait for a failed pull, and start the next one."""
        self._take_outcomes(self._peers.failed(event, now_ms), now_ms)
        self._start_pulls(now_ms)

    def _start_pulls(self, now_ms: int) -> None:
        self._take_outcomes(self._peers.advance(now_ms, self._is_awaited), now_ms)

    def _is_awaited(self, names: Sequence[SequenceHash], *, tries: bool) -> bool:
        """Tell whether a lookup still waits for one of these blocks, or, with `tries`, a try."""
        for name in names:
            for lookup_id, index in self._waiting.of(name):
                lookup = self._lookups.get(lookup_id)
                if lookup is not None and index < lookup.run_blocks:
                    return True
                if tries and (lookup_id, index) == NO_LOOKUP:
                    return True
        return False

    def _take_outcomes(self, outcomes: Iterable[Outcome], now_ms: int) -> None:
        for name, slot, outcome in outcomes:
            if isinstance(outcome, str):
                self._not_coming(name, outcome, "remote", now_ms)
            else:
                self._held.add_guest(outcome, slot)
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
            self._held.register(slot, block)
            uses = 0
            for lookup_id, index in self._waiting.take(block.hash):
                served[lookup_id] = None
                lookup = self._lookups.get(lookup_id)
                if lookup is not None and index < lookup.run_blocks:
                    assert lookup.slots[index] is None, self._held.story(block.hash)
                    table.pin(slot)
                    lookup.slots[index] = slot
                    lookup.came_from[index] = source
                    uses += 2 if lookup.reply_to else 1  # A prefetch wants it to stay.
            if uses > 1:
                self._held.admit([block.hash])
        self._held.landed(arrived, source, now_ms)
        for lookup_id in served:
            self._answer_if_complete(lookup_id, now_ms)

    def _not_coming(self, name: SequenceHash, reason: str, place: Place, now_ms: int) -> None:
        """Cut the lookups that wait for a block before that block."""
        assert not self._table.is_staging(name), self._held.story(name)
        for lookup_id, index in self._waiting.take(name):
            lookup = self._lookups.get(lookup_id)
            if lookup is not None and index < lookup.run_blocks:
                lookup.cut(index, reason, self._table, place)
                if lookup.state is LookupState.ASKING:  # The blocks after the cut are of no use.
                    self._move(lookup_id, "cut")
                self._answer_if_complete(lookup_id, now_ms)

    # --- answers ----------------------------------------------------------------------------

    def _answer_if_complete(self, lookup_id: int, now_ms: int) -> None:
        lookup = self._lookups.get(lookup_id)
        if lookup is None or None in lookup.slots:
            return
        assert len(lookup.slots) == lookup.run_blocks, lookup.owner
        if lookup.state is LookupState.FILLING:
            self._answers.give(self._move(lookup_id, "complete"), now_ms)

    def tick(self, now_ms: int) -> None:
        """Answer the lookups that are due with the prefix that is here, and start pulls."""
        for lookup_id in [i for i, one in self._lookups.items() if now_ms >= one.answer_by_ms]:
            lookup = self._move(lookup_id, "deadline")
            if None in lookup.slots:
                self._counts["lookups_cut_by_deadline"] += 1
                at = lookup.slots.index(None)
                place = self._below.medium_of(lookup.hashes[at]) or "remote"
                lookup.cut(at, "deadline", self._table, place)
            self._answers.give(lookup, now_ms)
        self._take_outcomes(self._peers.drop_unwanted(now_ms, self._is_awaited), now_ms)
        self._start_pulls(now_ms)
        assert all(now_ms < lookup.answer_by_ms for lookup in self._lookups.values())

    def end_engine(self, engine_id: EngineId, now_ms: int) -> None:
        """Drop the lookups of an engine that has left, and what they pin."""
        assert engine_id != OPERATOR
        for lookup_id in [i for i, lookup in self._lookups.items() if lookup.engine == engine_id]:
            lookup = self._move(lookup_id, "engine left")
            lookup.cut(0, "engine_lost", self._table)
            lookup.unpin_fallback(self._table)
            self._answers.explain(lookup, now_ms)

    # --- checks -----------------------------------------------------------------------------

    def pinned_slots(self) -> list[int]:
        """Return every pin that a waiting lookup holds, for `check`."""
        lookups = self._lookups.values()
        waited = [slot for lookup in lookups for slot in lookup.slots if slot is not None]
        return waited + [slot for lookup in lookups for slot in lookup.fallback]

    def check(self) -> None:
        """Assert every invariant of the lookups."""
        for name in self._waiting.names:
            assert self._table.is_staging(name), self._held.story(name)
        asking = set(self._questions.values())
        for lookup_id, lookup in self._lookups.items():
            assert lookup.state is not None, lookup.owner
            is_asking = lookup.state is LookupState.ASKING
            assert is_asking or None in lookup.slots, "a complete lookup was not answered"
            assert lookup_id in asking or not is_asking, lookup.owner
            assert len(lookup.slots) == lookup.run_blocks, lookup.owner
