"""Every order of questions, pulls and their ends, with two peers, five slots and eight blocks.

`Host` checks the core after every step, and what it announces. Here the outside world adds: an
answer names the blocks that were asked for, no slot that late bytes may still reach is given away,
every lease of a peer goes back once, and when all has ended nothing is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from kvbm_common.wire.local import Found
from kvbm_host_tier.core.messages import AskFill, Effect, StartPull, ToEngine
from kvbm_host_tier.core.peer_messages import (
    AskHolders,
    PeerJoined,
    PeerLeft,
    PeerPullSettled,
    PullFromPeer,
    ReleaseAtPeer,
)

from tests.services.host_tier.helpers import asked, checksum
from tests.services.host_tier.peer_helpers import ANN, BEN, HostWithPeers, asked_numbers

T = TypeVar("T")
BLOCKS = st.lists(st.integers(1, 8), min_size=1, max_size=4, unique=True)
PEERS = st.sampled_from([ANN, BEN])
LOST_MAX = 2


class PeersInEveryOrder(RuleBasedStateMachine):
    """The index, the peers and an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.host = HostWithPeers(
            peers=(ANN, BEN), slots=5, peer_pulls_max=2, batch_blocks_max=2,
            engine_lost_ms=10**9,
        )  # fmt: skip
        self.questions: list[AskHolders] = []
        self.pulls: list[PullFromPeer] = []
        self.lost: list[PullFromPeer] = []
        self.fills: list[AskFill] = []
        self.asked: dict[int, list[int]] = {}
        self.leases: list[int] = []
        self.peer_leases = 0
        self.last = 0

    def take(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case AskHolders():
                    self.questions.append(effect)
                case PullFromPeer():
                    self.check_safe(effect.slots)
                    self.pulls.append(effect)
                case AskFill():
                    self.check_safe([slot.slot for slot in effect.request.slots])
                    self.fills.append(effect)
                case StartPull():
                    self.check_safe(effect.slots)
                    self.take(self.host.pulled(effect))
                case ReleaseAtPeer():
                    self.peer_leases -= 1
                case ToEngine(_, Found() as found):
                    self.check_found(found)
                case _:
                    pass

    def check_found(self, found: Found) -> None:
        wanted = self.asked.pop(found.lookup)
        assert found.checksums == [checksum(number) for number in wanted[: len(found.slots)]]
        self.check_safe(found.slots)
        self.leases += [found.lease] if found.lease else []

    def check_safe(self, slots: Sequence[int]) -> None:
        """No transfer that may still write has one of these slots."""
        written = {slot for pull in (*self.pulls, *self.lost) for slot in pull.slots}
        written |= {slot.slot for fill in self.fills for slot in fill.request.slots}
        assert not written & set(slots), f"late bytes may reach {written & set(slots)}"

    def one_of(self, data: st.DataObject, entries: list[T]) -> T:
        return entries.pop(data.draw(st.integers(0, len(entries) - 1)))

    @rule(blocks=BLOCKS, deadline_ms=st.integers(1, 200))
    def look_up(self, blocks: list[int], deadline_ms: int) -> None:
        self.last += 1
        self.asked[self.last] = blocks
        self.take(
            self.host.look_up(*blocks, lookup=self.last, deadline_ms=deadline_ms, lease_ms=10**6)
        )

    @rule(blocks=BLOCKS)
    def store(self, blocks: list[int]) -> None:
        self.host.store(*blocks)

    @rule(blocks=BLOCKS)
    def disk_stored(self, blocks: list[int]) -> None:
        self.host.disk_stored(*blocks)

    @precondition(lambda self: self.questions)
    @rule(data=st.data(), first=PEERS, counts=st.tuples(st.integers(0, 4), st.integers(0, 4)))
    def answer(self, data: st.DataObject, first: object, counts: tuple[int, int]) -> None:
        ask = self.one_of(data, self.questions)
        holders = [(peer, count) for peer, count in zip((ANN, BEN), counts, strict=True) if count]
        if first is ANN and not holders:
            self.take(self.host.index_silent(ask))
        else:
            self.take(self.host.answer(ask, *holders))

    @precondition(lambda self: self.pulls)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["all", "all", "missing", "wrong", "failed", "lost", "early"]),
    )
    def end_pull(self, data: st.DataObject, outcome: str) -> None:
        pull = self.one_of(data, self.pulls)
        self.peer_leases += 1
        numbers = asked_numbers(pull)
        match outcome:
            case "missing":
                self.take(self.host.came(pull, missing=numbers[:1]))
            case "wrong":
                self.take(self.host.came(pull, wrong=numbers[-1:]))
            case "failed":
                self.take(self.host.lost(pull, reason="bus_unavailable"))
            case "early":
                self.host.step(PeerPullSettled(pull.pull))
                self.take(self.host.lost(pull, settled=False))
            case "lost" if len(self.lost) < LOST_MAX:
                self.lost.append(pull)
                self.take(self.host.lost(pull, settled=False))
            case _:
                self.take(self.host.came(pull))

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.take(self.host.step(PeerPullSettled(self.one_of(data, self.lost).pull)))

    @precondition(lambda self: self.fills)
    @rule(data=st.data(), some=st.booleans())
    def end_fill(self, data: st.DataObject, some: bool) -> None:
        fill = self.one_of(data, self.fills)
        self.take(self.host.filled(fill, *(asked(fill)[1:] if some else ())))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.host.release(self.one_of(data, self.leases))

    @rule(peer=PEERS, there=st.booleans())
    def peer_moves(self, peer: object, there: bool) -> None:
        assert peer in (ANN, BEN)
        which = ANN if peer is ANN else BEN
        self.take(self.host.step(PeerJoined(which) if there else PeerLeft(which)))

    @rule(ms=st.sampled_from([1, 20, 150, 2_000]))
    def wait(self, ms: int) -> None:
        self.take(self.host.wait(ms))

    def teardown(self) -> None:
        """Everything ends: nothing is asked, staged or leased."""
        while self.questions or self.pulls or self.fills:
            for ask in [*self.questions]:
                self.questions.remove(ask)
                self.take(self.host.answer(ask))
            for pull in [*self.pulls]:
                self.pulls.remove(pull)
                self.peer_leases += 1
                self.take(self.host.came(pull))
            for fill in [*self.fills]:
                self.fills.remove(fill)
                self.take(self.host.filled(fill))
        for pull in self.lost:
            self.host.step(PeerPullSettled(pull.pull))
        self.take(self.host.wait(1_000))
        for lease in self.leases:
            self.host.release(lease)
        assert not self.asked, "a look-up was not answered"
        assert self.peer_leases == 0
        assert self.host.slots["staged"] == self.host.slots["active"] == 0


PeersInEveryOrder.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None
)
TestPeersInEveryOrder = PeersInEveryOrder.TestCase
