"""Where an event stands in its stream, read one by one and in columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.nats.stream_positions import alike_positions, positions_of, several_positions

NUMBERS = st.tuples(*[st.integers(0, 10**12)] * 3)


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.booleans())
def test_the_columns_are_what_each_says(placed: list[tuple[int, int, int]], domain: bool) -> None:
    """With a domain and an account in front, and a token behind, as in clusters."""
    front, behind = ("hub.ACCOUNT.", ".x7") if domain else ("", "")
    replies = [
        f"$JS.ACK.{front}S.consumer.1.{stream}.{consumer}.1763799999999999999.{pending}{behind}"
        for stream, consumer, pending in placed
    ]
    columns = several_positions(replies)
    assert columns is not None
    assert list(zip(*columns, strict=True)) == list(map(positions_of, replies)) == placed
    alike = len(placed) > 1 and not domain
    assert alike_positions(replies) == (columns if alike else None)


@pytest.mark.parametrize("odd", ["$JS.ACK.S.c.1.2.3.4", "$JS.ACK.hub.A.S.c.1.2.3.4.5.x"])
def test_of_several_forms_no_columns_are_made(odd: str) -> None:
    assert several_positions(["$JS.ACK.S.c.1.2.3.4.5", odd]) is None


def test_a_reply_that_is_another_consumers_or_none_is_seen() -> None:
    """1. Two of one consumer. 2. Another consumer's, no event, and one number too few."""
    replies = [f"$JS.ACK.hub.A.S.c.1.{at}.{at}.5.0" for at in (7, 8)]
    assert alike_positions(replies) == ([7, 8], [7, 8], [0, 0])
    for odd in ("$JS.ACK.hub.A.S.d.1.9.9.5.0", "$JS.FC.S.c.1", "", "$JS.ACK.hub.A.S.c.1.9.9.5"):
        assert alike_positions([*replies, odd]) is None
        assert alike_positions([odd, *replies]) is None
