"""The peers: other host tiers, of other hosts or this one, what the index is asked, and pulls.

A lookup that ends where this host's own tiers end asks the index for the rest. The peer that has
the longest part of it, and that its breaker lets us use, is asked for it in batches:

    QUEUED --start--> FLYING --pulled-------------> over: what has the right checksum is committed
       |                 |----failed, settled-----> over: the slots are free
       |                 +----failed, unsettled---> UNSETTLED --settled--> over
       +----deadline passed----------------------> over: nobody was asked

A batch's slots are staged from QUEUED on, and not used for anything else before it is over. Wrong
bytes are never committed: what has arrived is compared with the checksum that the peer's own host
tier has had since the block came into its memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvbm_common.breaker import Breaker, BreakerState
from kvbm_common.identity import SequenceHash, hash_from_hex
from kvbm_common.slots import Block

from kvbm_host_tier.peer_messages import (
    AskHolders,
    HoldersTold,
    OpenDoor,
    PeerId,
    PeerPulled,
    PeerPullFailed,
    PulledBlock,
    PullFromPeer,
    ReleaseAtPeer,
)
from kvbm_host_tier.tier import Tier

QUESTIONS_MAX = 64
"""Of the index, at once; one that is so far behind is no help."""
QUESTION_BLOCKS_MAX = 4_096
"""150 KB of JSON; what is behind them is asked for the next time."""
QUESTION_MS = 250
"""The index answers in a millisecond; who waits longer for it had better compute."""
AVOID_MS = 30_000
"""A block that came wrong is not asked for by every lookup, nor given up for ever."""
AVOID_MAX = 65_536
NOT_THE_PEERS_FAULT = ("gone", "bus_unavailable", "door_closed", "stale_epoch")


@dataclass(frozen=True, slots=True)
class PeerPull:
    """A batch: these blocks of a peer into these slots of ours."""

    peer: PeerId
    names: tuple[SequenceHash, ...]
    slots: tuple[int, ...]
    until_ms: int
    trace: str = ""


Outcome = tuple[SequenceHash, int, Block | str]
"""A block, its slot, and how it ended: committed as this, or why it did not come."""


class Peers:
    """Who they are, and every question and pull that is under way."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._breakers: dict[PeerId, Breaker] = {}
        """Of each peer that is registered."""
        self._index = Breaker()
        self._questions: set[int] = set()
        self._next_id = 1
        self._queued: deque[tuple[int, PeerPull]] = deque()
        self._flying: dict[int, PeerPull] = {}
        self._unsettled: dict[int, PeerPull] = {}
        self._settled_early: set[int] = set()
        """Pulls that are known to have settled before they are known to have failed."""
        self._avoid: OrderedDict[SequenceHash, int] = OrderedDict()
        """Block that came wrong → when it may be asked for again."""
        self._door_open = False

    def __len__(self) -> int:
        return len(self._breakers)

    # --- who --------------------------------------------------------------------------------

    def joined(self, peer: PeerId) -> None:
        """A host tier of another host is there, perhaps in a new life: it is trusted again."""
        self._breakers[peer] = Breaker()
        self.open_door()

    def left(self, peer: PeerId) -> None:
        """It is gone. What flies from there ends by itself."""
        self._breakers.pop(peer, None)

    def open_door(self) -> None:
        """Once there are peers and slots, the peers may read."""
        if self._breakers and self._tier.slot_bytes and not self._door_open:
            self._door_open = True
            self._tier.emit(OpenDoor(self._tier.arena.path))

    # --- questions --------------------------------------------------------------------------

    def ask(self, names: Sequence[SequenceHash], now_ms: int, *, until_ms: int) -> int:
        """Ask the index who has the beginning of this run; returns the question, 0: nobody."""
        useful = self._breakers and names and self._tier.limits.peer_pulls_max
        if not useful or (names[0] in self._avoid and now_ms < self._avoid[names[0]]):
            return 0
        if len(self._questions) >= QUESTIONS_MAX or not self._index.allows(now_ms):
            self._tier.counts["dropped.peer_question"] += 1
            return 0
        self._index.start()
        question = self._take_id()
        self._questions.add(question)
        self._tier.counts["peer_questions"] += 1
        deadline_ms = max(1, min(QUESTION_MS, until_ms - now_ms))
        asked = tuple(names[:QUESTION_BLOCKS_MAX])
        self._tier.emit(AskHolders(question, asked, deadline_ms))
        return question

    def told(self, told: HoldersTold, now_ms: int) -> tuple[PeerId, int] | None:
        """The index has answered, or not; returns the peer to pull from and how many blocks."""
        self._questions.discard(told.question)
        if told.holders is None:
            self._tier.counts["dropped.peer_index"] += 1
            self._index.trouble(now_ms)
            return None
        self._index.good()
        for peer, blocks in sorted(told.holders, key=lambda one: (-one[1], one[0])):
            breaker = self._breakers.get(peer)
            if breaker is not None and breaker.allows(now_ms):
                return peer, blocks
        if told.holders:
            self._tier.counts["dropped.peer_bypassed"] += 1
        return None

    # --- pulls ------------------------------------------------------------------------------

    def pull(
        self,
        peer: PeerId,
        slots: dict[SequenceHash, int],
        now_ms: int,
        *,
        until_ms: int,
        trace: str = "",
    ) -> None:
        """Have blocks read into staged slots; `advance` starts what may fly."""
        until_ms = min(until_ms, now_ms + self._tier.limits.peer_deadline_ms)
        batch = PeerPull(peer, tuple(slots), tuple(slots.values()), until_ms, trace)
        self._queued.append((self._take_id(), batch))

    def advance(self, now_ms: int) -> list[Outcome]:
        """Start as many pulls as may fly; returns what became too late in the queue."""
        outcomes: list[Outcome] = []
        while self._queued and len(self._flying) < self._tier.limits.peer_pulls_max:
            number, batch = self._queued.popleft()
            breaker = self._breakers.get(batch.peer)
            late = now_ms >= batch.until_ms
            if late or breaker is None or not breaker.allows(now_ms):
                outcomes += self._give_up(batch, "deadline" if late else "bypassed")
                continue
            breaker.start()
            self._flying[number] = batch
            self._tier.emit(
                PullFromPeer(
                    number, batch.peer, batch.names, batch.slots, self._tier.slot_bytes,
                    batch.until_ms - now_ms, batch.trace,
                )
            )  # fmt: skip
        return outcomes

    def pulled(self, event: PeerPulled, now_ms: int) -> list[Outcome]:
        """Bytes are in. Every block of the batch ends now, well or not."""
        batch = self._ended(event.pull, event.lease)
        came = {block.slot: block for block in event.blocks}
        outcomes: list[Outcome] = []
        for name, slot in zip(batch.names, batch.slots, strict=True):
            outcome = self._verdict(name, came.get(slot))
            outcomes.append((name, slot, outcome))
            if outcome == "corrupt":
                self._avoid_block(name, now_ms)
            if isinstance(outcome, str):
                self._tier.table.abort(slot)
                self._tier.counts[f"dropped.peer_{outcome}"] += 1
        reasons = {outcome for _, _, outcome in outcomes if isinstance(outcome, str)}
        self._judge(batch.peer, reasons, now_ms)
        return outcomes

    def failed(self, event: PeerPullFailed, now_ms: int) -> list[Outcome]:
        """No answer, or no bytes. The slots of an unsettled one are kept until it has settled."""
        batch = self._ended(event.pull, event.lease)
        self._judge(batch.peer, {event.reason}, now_ms)
        settled = event.settled or event.pull in self._settled_early
        self._settled_early.discard(event.pull)
        if not settled:
            self._unsettled[event.pull] = batch
        return self._give_up(batch, event.reason, settled=settled)

    def _ended(self, pull: int, lease: int) -> PeerPull:
        batch = self._flying.pop(pull)
        if lease:
            self._tier.emit(ReleaseAtPeer(batch.peer, lease))
        return batch

    def settled(self, pull: int) -> None:
        """Nothing of a failed pull is on its way any more."""
        batch = self._unsettled.pop(pull, None)
        if batch is None:
            assert pull in self._flying, f"pull {pull} has settled twice"
            self._settled_early.add(pull)
            return
        for slot in batch.slots:
            self._tier.table.abort(slot)

    def _verdict(self, name: SequenceHash, came: PulledBlock | None) -> Block | str:
        if came is None:
            return "gone"
        leased = came.leased
        if hash_from_hex(leased.hash) != name or not 0 < leased.bytes <= self._tier.slot_bytes:
            return "malformed"
        if came.checksum != leased.checksum:
            return "corrupt"
        parent, namespace = hash_from_hex(leased.parent), bytes.fromhex(leased.namespace)
        return Block(name, parent, namespace, leased.checksum, leased.bytes)

    def _judge(self, peer: PeerId, reasons: set[str], now_ms: int) -> None:
        """What came of a pull decides whether the peer is asked again soon."""
        breaker = self._breakers.get(peer)
        if breaker is None:
            return
        if reasons <= set(NOT_THE_PEERS_FAULT):
            breaker.good()
        elif breaker.trouble(now_ms):
            self._tier.counts["peer_bypasses"] += 1

    def _give_up(self, batch: PeerPull, reason: str, *, settled: bool = True) -> list[Outcome]:
        self._tier.counts[f"dropped.peer_{reason}"] += len(batch.names)
        for slot in batch.slots:
            if settled:
                self._tier.table.abort(slot)
            else:
                self._tier.table.abandon(slot)
        return [(name, slot, reason) for name, slot in zip(batch.names, batch.slots, strict=True)]

    def _avoid_block(self, name: SequenceHash, now_ms: int) -> None:
        self._avoid.pop(name, None)
        self._avoid[name] = now_ms + AVOID_MS
        while len(self._avoid) > AVOID_MAX:
            self._avoid.popitem(last=False)

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    # --- questions about it -----------------------------------------------------------------

    def avoided(self, name: SequenceHash, now_ms: int) -> bool:
        """Has this block come wrong a short while ago?"""
        return now_ms < self._avoid.get(name, now_ms)

    def figures(self) -> dict[str, float]:
        """For metrics."""
        bypassed = [b for b in self._breakers.values() if b.state is not BreakerState.CLOSED]
        return {
            "peers": float(len(self._breakers)),
            "peers_bypassed": float(len(bypassed)),
            "peer_pulls": float(len(self._flying) + len(self._queued)),
            "peer_slots_unsettled": float(sum(len(b.slots) for b in self._unsettled.values())),
        }

    def staged_slots(self) -> set[int]:
        """Every slot that a pull has staged, for `check`."""
        queued = [batch for _, batch in self._queued]
        batches = [*queued, *self._flying.values(), *self._unsettled.values()]
        return {slot for batch in batches for slot in batch.slots}

    def check(self) -> None:
        """Assert every invariant."""
        assert len(self._flying) <= self._tier.limits.peer_pulls_max
        assert self._settled_early <= self._flying.keys()
        assert len(self._questions) <= QUESTIONS_MAX
        queued = [batch for _, batch in self._queued]
        batches = [*queued, *self._flying.values(), *self._unsettled.values()]
        slots = [slot for batch in batches for slot in batch.slots]
        assert len(slots) == len(set(slots)), "two pulls write one slot"
