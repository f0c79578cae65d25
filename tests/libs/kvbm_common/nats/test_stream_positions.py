"""Where an event stands in its stream, read one by one and in columns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvbm_common.nats.jetstream import StreamState
from kvbm_common.nats.stream_positions import (
    ConsumerInfo,
    Horizon,
    _Delivered,
    columns_of,
    columns_of_alike,
    positions_of,
)

NUMBERS = st.tuples(*[st.integers(0, 10**12)] * 3)


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.booleans())
def test_the_columns_are_what_each_says(placed: list[tuple[int, int, int]], domain: bool) -> None:
    """With a domain and an account in front, and a token behind, as in clusters."""
    front, behind = ("hub.ACCOUNT.", ".x7") if domain else ("", "")
    replies = [
        f"$JS.ACK.{front}S.consumer.1.{stream}.{consumer}.1763799999999999999.{pending}{behind}"
        for stream, consumer, pending in placed
    ]
    columns = columns_of(replies)
    assert columns is not None
    assert list(zip(*columns, strict=True)) == list(map(positions_of, replies)) == placed
    alike = len(placed) > 1 and not domain
    assert columns_of_alike(replies) == (columns if alike else None)


@pytest.mark.parametrize("odd", ["$JS.ACK.S.c.1.2.3.4", "$JS.ACK.hub.A.S.c.1.2.3.4.5.x"])
def test_of_several_forms_no_columns_are_made(odd: str) -> None:
    assert columns_of(["$JS.ACK.S.c.1.2.3.4.5", odd]) is None


def test_a_reply_that_is_another_consumers_or_none_is_seen() -> None:
    """1. Two of one consumer. 2. Another consumer's, no event, and one number too few."""
    replies = [f"$JS.ACK.hub.A.S.c.1.{at}.{at}.5.0" for at in (7, 8)]
    assert columns_of_alike(replies) == ([7, 8], [7, 8], [0, 0])
    for odd in ("$JS.ACK.hub.A.S.d.1.9.9.5.0", "$JS.FC.S.c.1", "", "$JS.ACK.hub.A.S.c.1.9.9.5"):
        assert columns_of_alike([*replies, odd]) is None
        assert columns_of_alike([odd, *replies]) is None


class Reading(RuleBasedStateMachine):
    """A stream of ours and others', a consumer of ours, and looks that take their time."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: list[int] = []
        self.first, self.last = 1, 0
        self.sent = 0
        """Position of the last message that the server has sent."""
        self.count = 0
        self.on_the_way: list[int] = []
        self.position = 0
        self.taken = 0
        self.owed: set[int] = set()
        """Lost, and not told yet."""
        self.horizon = Horizon()
        self.horizon.begin(0, self.state)

    @property
    def state(self) -> StreamState:
        return StreamState(self.first, self.last)

    @property
    def pending(self) -> list[int]:
        return [seq for seq in self.ours if seq >= self.first and seq > self.sent]

    @rule(ours=st.lists(st.booleans(), min_size=1, max_size=5))
    def publish(self, ours: list[bool]) -> None:
        for is_ours in ours:
            self.last += 1
            self.ours += [self.last] if is_ours else []

    @rule(count=st.integers(1, 4))
    def drop(self, count: int) -> None:
        before = set(self.pending)
        self.first = min(self.first + count, self.last + 1)
        self.owed |= before - set(self.pending)

    @rule()
    def send(self) -> None:
        if self.pending:
            self.sent = self.pending[0]
            self.count += 1
            self.on_the_way.append(self.sent)

    @rule()
    def take(self) -> None:
        if self.on_the_way:
            self.position = self.on_the_way.pop(0)
            self.taken += 1

    @rule(between=st.lists(st.sampled_from(["publish", "drop", "send", "take"]), max_size=4))
    def look(self, between: list[str]) -> None:
        if self.horizon.has_all(self.state):
            assert not self.owed, "a loss would not be told"
            return
        position = self.position
        consumer = ConsumerInfo(len(self.pending), _Delivered(self.count))
        for what in between:
            self._do(what)
        told = self.horizon.advance(consumer, self.state, position=position, taken=self.taken)
        assert told or not self.owed, "a loss was not told"
        self.owed.clear()

    def _do(self, what: str) -> None:
        match what:
            case "publish":
                self.publish([True])
            case "drop":
                self.drop(1)
            case "send":
                self.send()
            case _:
                self.take()

    @invariant()
    def what_is_certain_exists(self) -> None:
        assert self.horizon.certain <= self.last


Reading.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestReading = Reading.TestCase


def test_who_keeps_up_is_told_of_nothing() -> None:
    """Ten messages of others between two looks, and a stream that keeps twenty."""
    horizon = Horizon()
    horizon.begin(0, StreamState(1, 0))
    idle = ConsumerInfo(0, _Delivered(1))
    told = [
        horizon.advance(idle, StreamState(max(1, last - 19), last), position=1, taken=1)
        for last in range(10, 200, 10)
    ]
    assert not any(told)
    assert horizon.advance(idle, StreamState(1000, 1014), position=1, taken=1), "all was replaced"


def test_a_stream_that_was_empty_has_dropped_nothing() -> None:
    """It says 0 for its first message until it has one, which is 1."""
    horizon = Horizon()
    horizon.begin(-1, StreamState(0, 0))
    assert not horizon.advance(ConsumerInfo(), StreamState(1, 1), position=0, taken=0)


def test_all_of_a_stream_that_rests_is_there_after_two_looks() -> None:
    """Not after the first: what it ended with may have been on its way then."""
    horizon, rests = Horizon(), StreamState(1, 5)
    horizon.begin(0, StreamState(1, 2))
    idle = ConsumerInfo(0, _Delivered(1))
    for is_known in (False, False, True):
        assert horizon.has_all(rests) == is_known
        horizon.advance(idle, rests, position=1, taken=1)
    assert not horizon.has_all(StreamState(1, 6))


def test_what_is_still_on_its_way_is_not_certain() -> None:
    horizon = Horizon()
    horizon.begin(0, StreamState(1, 5))
    horizon.advance(ConsumerInfo(0, _Delivered(2)), StreamState(1, 5), position=1, taken=1)
    assert horizon.certain == 1
