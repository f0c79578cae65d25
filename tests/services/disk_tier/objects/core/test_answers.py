"""What is believed of a store's answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_disk_tier.objects.core.answers import (
    CLOCKS_APART_MAX_MS,
    EARLIEST_MS,
    ListAnswer,
    age_ms,
    file_server_now_ms,
    refusal_of,
    store_now_ms,
)

NOW_MS = 1_800_000_000_000


def answer(*names: str, **changes: Any) -> ListAnswer:
    """A page of a listing of `kv/`."""
    values: dict[str, Any] = {"is_listing": True, "prefix": "kv/", "is_truncated": False}
    return ListAnswer(names=names, **(values | changes))


@pytest.mark.parametrize(
    "good",
    [
        answer(),
        answer("kv/a", "kv/b"),
        answer("kv/b", is_truncated=True),
        answer("kv/a", prefix=None),
        answer("kv/z", "kv/ä", "kv/ﬀ", "kv/𝄞"),
    ],
)
def test_a_listing_is_believed(good: ListAnswer) -> None:
    """Also an empty one, one without an echo, and one in the order of UTF-8."""
    assert refusal_of(good, prefix="kv/", after="") == ""


@pytest.mark.parametrize(
    ("odd", "after", "reason"),
    [
        (answer(is_listing=False), "", "an answer that is no listing"),
        (answer(prefix=""), "", "a listing of '', not of 'kv/'"),
        (answer("kv/a", "other"), "", "that names 'other'"),
        (answer("kv/b", "kv/a"), "", "do not ascend: 'kv/a'"),
        (answer("kv/a", "kv/a"), "", "do not ascend"),
        (answer("kv/a", "kv/b"), "kv/b", "do not ascend"),
        (answer(is_truncated=True), "", "cut off before its first name"),
    ],
)
def test_what_is_no_listing_of_what_was_asked_for_is_refused(
    odd: ListAnswer, after: str, reason: str
) -> None:
    """A page that comes again would make a listing without an end."""
    assert reason in refusal_of(odd, prefix="kv/", after=after)


def test_ages_are_told_by_the_stores_clock_if_it_may_be_one() -> None:
    assert store_now_ms(None, NOW_MS) == NOW_MS
    for apart, believed in ((CLOCKS_APART_MAX_MS, True), (CLOCKS_APART_MAX_MS + 1, False)):
        for theirs in (NOW_MS + apart, NOW_MS - apart):
            assert store_now_ms(theirs, NOW_MS) == (theirs if believed else NOW_MS)


def test_a_file_server_is_believed_unless_it_is_far_ahead() -> None:
    """Behind ours its clock makes files younger, which deletes none."""
    for apart in (-(10**9), -1, 0, CLOCKS_APART_MAX_MS):
        assert file_server_now_ms(NOW_MS + apart, NOW_MS) == NOW_MS + apart
    assert file_server_now_ms(NOW_MS + CLOCKS_APART_MAX_MS + 1, NOW_MS) == NOW_MS


@given(st.integers(-(10**15), 10**15))
def test_an_impossible_date_makes_nothing_old(stored_ms: int) -> None:
    """1970, or the future: such an object is not deleted for its age."""
    age = age_ms(stored_ms, NOW_MS)
    assert age >= 0
    assert age == 0 or EARLIEST_MS <= stored_ms < NOW_MS
