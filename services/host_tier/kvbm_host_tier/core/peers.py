"""The peers: host tiers of other hosts (or this one), the questions to the index, and the pulls.

When this host's own tiers have no more of a lookup's run, the index is asked for the rest. The peer
that has the longest part of it, and whose breaker is closed, is asked for it in batches. Among
equals each asker has an order of its own, so that the askers of a popular run are spread.

The slots of a batch stay staged from QUEUED until it has ended. Wrong bytes are never committed:
blocks are compared with the checksums that the peer computed when they came into its memory. The
parts of a pull are in `peer_pulls`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbm_common.checksum import block_checksum
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import batch_blocks
from kvbm_common.tier.breaker import Breaker, BreakerState
from kvbm_common.tier.failed_blocks import FailedBlocks
from kvbm_common.tier.slots import Block

from kvbm_host_tier.core.arena import Arena
from kvbm_host_tier.core.held_blocks import HeldBlocks
from kvbm_host_tier.core.limits import Means, reason_key
from kvbm_host_tier.core.load_times import LoadTimes
from kvbm_host_tier.core.open_lookup import OpenLookup
from kvbm_host_tier.core.peer_messages import (
    AskHolders,
    HoldersTold,
    OpenPeerReader,
    PeerId,
    PeerPulled,
    PeerPullFailed,
    PullFromPeer,
    ReleaseAtPeer,
)
from kvbm_host_tier.core.peer_pulls import PEER_PULL, PeerPull, PeerPullState, PullQueue, verdict

QUESTIONS_MAX = 64
"""Open questions to the index: one that is further behind would answer too late."""
QUESTION_BLOCKS_MAX = 4_096
"""Blocks of one question, 150 KB of JSON; the next question asks for those after them."""
QUESTION_MS = 250
"""Deadline of a question: the index answers in a millisecond, and the engine waits meanwhile."""
AVOID_MS = 30_000
"""The time for which a block is not asked for after it came with wrong bytes, in milliseconds."""
AVOID_MAX = 65_536
NOT_THE_PEERS_FAULT = ("gone", "bus_unavailable", "reader_closed", "stale_epoch")
"""Reasons of pulls that a peer is not bypassed for. A peer whose reader is closed is, though it may
only be starting: others have the same blocks. It is tried again after the breaker's pause, two
seconds at first, a minute at most."""
COUNTED = (PeerPullState.IN_FLIGHT, PeerPullState.SETTLED)
"""States of the pulls that count against `peer_pulls_max`."""

Outcome = tuple[SequenceHash, int, Block | str]
"""A block, its slot, and the block as it was committed, or the reason why it did not come."""


class IsAwaited(Protocol):
    """The question whether a lookup waits for one of some blocks, or, with `tries`, a try does."""

    def __call__(self, names: Sequence[SequenceHash], *, tries: bool) -> bool:
        """Return whether one of these blocks is awaited."""


class Peers:
    """The registered peers, and all questions and pulls under way."""

    def __init__(
        self,
        own: PeerId,
        held: HeldBlocks,
        arena: Arena,
        times: LoadTimes,
        means: Means,
    ) -> None:
        assert means.limits.peer_pulls_max >= 0
        self._own = own
        self._held, self._table = held, held.table
        self._arena = arena
        self._times = times
        self._limits, self._counts, self._emit = means.limits, means.counts, means.emit
        self._breakers: dict[PeerId, Breaker] = {}
        """Registered peer → its breaker."""
        self._index = Breaker()
        self._questions: set[int] = set()
        self._next_id = 1
        self._pulls: dict[int, PeerPull] = {}
        self._queue = PullQueue()
        self._counted_pulls = 0
        """The number of pulls in one of the states `COUNTED`."""
        self._wrong = FailedBlocks(AVOID_MAX)
        """Blocks that came with wrong bytes a short while ago."""
        self._is_reader_open = False

    def __len__(self) -> int:
        return len(self._breakers)

    @property
    def is_pulling(self) -> bool:
        """Tell whether a pull is in flight."""
        return self._counted_pulls > 0

    @property
    def is_settled(self) -> bool:
        """Tell whether no question and no pull is under way."""
        assert self._counted_pulls <= len(self._pulls), f"{self._counted_pulls} pulls"
        return not self._questions and not self._pulls

    @property
    def may_bring(self) -> bool:
        """Tell whether a lookup may find blocks of peers, now or by what is under way."""
        return bool(self._breakers and self._limits.peer_pulls_max) or not self.is_settled

    def _move(self, number: int, event: str) -> PeerPull:
        """Move a pull by its table; a pull whose states are over is forgotten."""
        pull = self._pulls[number]
        story = f"pull {number} from {pull.peer}"
        was_counted = pull.state in COUNTED
        if PEER_PULL.ends(pull.state, event):
            del self._pulls[number]
            self._counted_pulls -= was_counted
        else:
            pull.state = PEER_PULL.next(pull.state, event, story)
            self._counted_pulls += (pull.state in COUNTED) - was_counted
        assert self._counted_pulls >= 0, f"{story}: {self._counted_pulls} pulls"
        return pull

    # --- peers ------------------------------------------------------------------------------

    def joined(self, peer: PeerId) -> None:
        """Take in a host tier, perhaps in a new life: its breaker is closed again."""
        self._breakers[peer] = Breaker()
        self.open_peer_reader()

    def left(self, peer: PeerId) -> None:
        """Forget a peer that is gone; pulls in flight from there end by themselves."""
        self._breakers.pop(peer, None)

    def open_peer_reader(self) -> None:
        """Start the peer reader once there are peers and slots."""
        if self._breakers and self._arena.unit_count and not self._is_reader_open:
            assert self._arena.info.path
            self._is_reader_open = True
            self._emit(OpenPeerReader(self._arena.info.path))

    # --- questions --------------------------------------------------------------------------

    def ask(self, names: Sequence[SequenceHash], now_ms: int, *, until_ms: int) -> int:
        """Ask the index which peers have the beginning of this run.

        Returns the question's number, 0 where no question was sent.
        """
        useful = self._breakers and names and self._limits.peer_pulls_max
        if not useful or self._wrong.is_failed(names[0], now_ms):
            return 0
        if len(self._questions) >= QUESTIONS_MAX or not self._index.allows(now_ms):
            self._counts["dropped.peer_question"] += 1
            return 0
        self._index.start()
        question = self._take_id()
        assert question not in self._questions, f"two questions have number {question}"
        self._questions.add(question)
        self._counts["peer_questions"] += 1
        deadline_ms = max(1, min(QUESTION_MS, until_ms - now_ms))
        asked = tuple(names[:QUESTION_BLOCKS_MAX])
        self._emit(AskHolders(question, asked, deadline_ms))
        return question

    def told(self, told: HoldersTold, now_ms: int) -> tuple[PeerId, int] | None:
        """Take the index's answer in; returns the peer to pull from and how many blocks."""
        assert told.question < self._next_id
        self._questions.discard(told.question)
        if told.holders is None:
            self._counts["dropped.peer_index"] += 1
            self._index.trouble(now_ms)
            return None
        self._index.good()
        known = [one for one in told.holders if one[0] in self._breakers]
        if usable := [one for one in known if self._breakers[one[0]].allows(now_ms)]:
            return min(usable, key=lambda one: (-one[1], self._place(one[0])))
        if told.holders:
            self._counts["dropped.peer_bypassed"] += 1
        return None

    def _place(self, peer: PeerId) -> tuple[bool, int, PeerId]:
        """Return the place of a peer among equals, which each asker draws for itself. One that has
        to prove itself is tried with blocks that no other has."""
        assert peer != self._own, f"{peer} would pull from itself"
        is_doubtful = self._breakers[peer].state is not BreakerState.CLOSED
        return is_doubtful, block_checksum(f"{self._own} {peer}".encode()), peer

    # --- pulls ------------------------------------------------------------------------------

    def start(
        self, peer: PeerId, names: Sequence[SequenceHash], lookup: OpenLookup, now_ms: int
    ) -> None:
        """Have blocks of a lookup read into slots, by pulls that `advance` starts."""
        size = lookup.block_bytes
        assert size or not names, f"{lookup.owner} waits for blocks of no size"
        slot_bytes = self._table.pool.layout.slot_bytes_of(size) if names else 0
        most = batch_blocks(self._limits.batch_blocks_max, self._limits.batch_bytes, slot_bytes)
        for ahead in range(0, len(names), most):
            batch = tuple(names[ahead : ahead + most])
            slots = tuple(self._held.stage(batch, size, f"from {peer}", now_ms))
            number = self._take_id()
            loading = self._times.begin("remote", len(batch) * size, now_ms)
            self._pulls[number] = PeerPull(
                peer, batch, slots, slot_bytes, lookup.answer_by_ms, loading, lookup.trace
            )
            self._queue.push(number, now_ms, ahead=ahead)

    def drop_unwanted(self, now_ms: int, is_awaited: IsAwaited) -> list[Outcome]:
        """Give up the queued pulls that no lookup waits for any more."""
        over = self._queue.take(lambda number: self._is_over(number, now_ms, is_awaited))
        assert self._counted_pulls <= len(self._pulls), f"{self._counted_pulls} pulls"
        return [one for number in over for one in self._give_up_queued(number, now_ms)]

    def _is_over(self, number: int, now_ms: int, is_awaited: IsAwaited) -> bool:
        batch = self._pulls[number]
        return not is_awaited(batch.names, tries=now_ms < batch.until_ms)

    def _give_up_queued(self, number: int, now_ms: int, reason: str = "") -> list[Outcome]:
        batch = self._move(number, "given up")
        self._measure(batch, now_ms, came=False)
        late = "deadline" if now_ms >= batch.until_ms else "unwanted"
        return self._give_up(batch, reason or late)

    def advance(self, now_ms: int, is_awaited: IsAwaited) -> list[Outcome]:
        """Start as many pulls as may be in flight, each with a deadline from now on; returns what
        is given up in the queue."""
        assert len(self._queue) + self._counted_pulls <= len(self._pulls), "an unknown pull"
        outcomes: list[Outcome] = []
        while self._queue and self._counted_pulls < self._limits.peer_pulls_max:
            number = self._queue.pop()
            batch = self._pulls[number]
            breaker = self._breakers.get(batch.peer)
            if self._is_over(number, now_ms, is_awaited):
                outcomes += self._give_up_queued(number, now_ms)
                continue
            if breaker is None or not breaker.allows(now_ms):
                outcomes += self._give_up_queued(number, now_ms, "bypassed")
                continue
            breaker.start()
            self._move(number, "started")
            within_ms = self._limits.peer_deadline_ms
            batch.until_ms = now_ms + within_ms
            self._emit(
                PullFromPeer(
                    number, batch.peer, batch.names,
                    tuple(self._table.places(batch.slots)), batch.slot_bytes,
                    within_ms, batch.trace,
                )
            )  # fmt: skip
        most = self._limits.peer_pulls_max
        assert self._counted_pulls <= most, f"{self._counted_pulls} pulls of {most} are in flight"
        return outcomes

    def pulled(self, event: PeerPulled, now_ms: int) -> list[Outcome]:
        """Compare the bytes that are in with their checksums; every block of the batch ends now."""
        assert event.pull in self._pulls, f"pull {event.pull} is over"
        batch = self._move(event.pull, "pulled")
        self._release(batch, event.lease)
        came = {block.slot: block for block in event.blocks}
        outcomes: list[Outcome] = []
        for name, slot in zip(batch.names, batch.slots, strict=True):
            outcome = verdict(name, came.get(self._table.place(slot)), batch.slot_bytes)
            outcomes.append((name, slot, outcome))
            if outcome == "corrupt":
                self._wrong.add(name, now_ms + AVOID_MS)
            if isinstance(outcome, str):
                self._table.abort(slot)
                self._counts[f"dropped.peer_{outcome}"] += 1
        reasons = {outcome for _, _, outcome in outcomes if isinstance(outcome, str)}
        self._measure(batch, now_ms, came=not reasons)
        self._judge(batch.peer, reasons, now_ms)
        return outcomes

    def failed(self, event: PeerPullFailed, now_ms: int) -> list[Outcome]:
        """Give a batch up; the slots of an unsettled pull are kept until it has settled."""
        assert event.reason
        is_settled = self._pulls[event.pull].state is PeerPullState.SETTLED
        settled = event.settled or is_settled
        batch = self._move(event.pull, "failed, settled" if settled else "failed")
        self._release(batch, event.lease)
        self._measure(batch, now_ms, came=False)
        self._judge(batch.peer, {event.reason}, now_ms)
        return self._give_up(batch, event.reason, settled=settled)

    def _measure(self, batch: PeerPull, now_ms: int, *, came: bool) -> None:
        """Measure a pull that is over; one that is late has taken so long at least."""
        self._times.end(batch.loading, now_ms, counts=came or now_ms >= batch.until_ms)

    def _release(self, batch: PeerPull, lease: int) -> None:
        assert lease >= 0
        if lease:
            self._emit(ReleaseAtPeer(batch.peer, lease))

    def settled(self, number: int) -> None:
        """Free the slots of a failed pull: nothing of it is on its way any more."""
        assert number in self._pulls, f"pull {number} has settled twice"
        was_failed = self._pulls[number].state is PeerPullState.UNSETTLED
        batch = self._move(number, "settled")
        for slot in batch.slots if was_failed else ():
            self._table.abort(slot)

    def _judge(self, peer: PeerId, reasons: set[str], now_ms: int) -> None:
        """Tell the peer's breaker what came of a pull."""
        assert "" not in reasons
        breaker = self._breakers.get(peer)
        if breaker is None:
            return
        if reasons <= set(NOT_THE_PEERS_FAULT):
            breaker.good()
        elif breaker.trouble(now_ms):
            self._counts["peer_bypasses"] += 1

    def _give_up(self, batch: PeerPull, reason: str, *, settled: bool = True) -> list[Outcome]:
        assert len(batch.names) == len(batch.slots)
        self._counts[reason_key(self._counts, "dropped.peer", reason)] += len(batch.names)
        for slot in batch.slots:
            if settled:
                self._table.abort(slot)
            else:
                self._table.abandon(slot)
        return [(name, slot, reason) for name, slot in zip(batch.names, batch.slots, strict=True)]

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    # --- figures and checks -----------------------------------------------------------------

    def came_wrong(self, name: SequenceHash, now_ms: int) -> bool:
        """Tell whether this block has come with wrong bytes a short while ago."""
        return self._wrong.is_failed(name, now_ms)

    def figures(self) -> dict[str, float]:
        """Return the figures for metrics."""
        bypassed = [b for b in self._breakers.values() if b.state is not BreakerState.CLOSED]
        unsettled = self._of_state(PeerPullState.UNSETTLED)
        return {
            "peers": float(len(self._breakers)),
            "peers_bypassed": float(len(bypassed)),
            "peer_pulls": float(len(self._pulls) - len(unsettled)),
            "peer_slots_unsettled": float(sum(len(one.slots) for one in unsettled)),
        }

    def _of_state(self, state: PeerPullState) -> list[PeerPull]:
        return [one for one in self._pulls.values() if one.state is state]

    def staged_slots(self) -> set[int]:
        """Return every slot that a pull has staged, for `check`."""
        return {slot for batch in self._pulls.values() for slot in batch.slots}

    def check(self) -> None:
        """Assert every invariant of the pulls."""
        counted = [one for one in self._pulls.values() if one.state in COUNTED]
        assert len(counted) == self._counted_pulls <= self._limits.peer_pulls_max
        assert len(self._of_state(PeerPullState.QUEUED)) == len(self._queue)
        assert len(self._questions) <= QUESTIONS_MAX
        slots = [slot for batch in self._pulls.values() for slot in batch.slots]
        assert len(slots) == len(set(slots)), "two pulls write one slot"
