"""Where an event stands in its stream, read one by one and in columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.event_subscription import positions_of, several_positions

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


@pytest.mark.parametrize("odd", ["$JS.ACK.S.c.1.2.3.4", "$JS.ACK.hub.A.S.c.1.2.3.4.5.x"])
def test_of_several_forms_no_columns_are_made(odd: str) -> None:
    assert several_positions(["$JS.ACK.S.c.1.2.3.4.5", odd]) is None
