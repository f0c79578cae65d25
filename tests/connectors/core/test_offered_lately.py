"""Names offered lately: for how long they are remembered, and in how much memory."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_connectors.core import offered_lately
from kvbm_connectors.core.offered_lately import (
    FULL_NAMES,
    NAMES_PER_S_MAX,
    TABLE_BYTES,
    WAITING_MAX,
    OfferedLately,
    tables_for,
)

from tests.connectors.helpers import name


def drawn(count: int) -> list[SequenceHash]:
    """So many names that no other test has."""
    return [SequenceHash(os.urandom(16)) for _ in range(count)]


def test_names_are_remembered_for_a_time_and_at_most_twice_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. More names than a table takes. 2. The time is over once: they are kept. 3. Twice."""
    monkeypatch.setattr(offered_lately, "FULL_NAMES", 2)
    monkeypatch.setattr(offered_lately, "WAITING_MAX", 2)
    lately, names = OfferedLately(100), [name(number) for number in range(9)]
    lately.tick(0)
    for one in names:
        lately.add([one])
    for now_ms in (99, 100, 199):
        lately.tick(now_ms)
        assert all(lately.has_any([one]) for one in names)
    lately.add([name(9)])
    for now_ms in range(200, 210):
        lately.tick(now_ms)
        assert not lately.has_any(names)
    assert lately.has_any([name(9)])
    for now_ms in (300, 400):
        lately.tick(now_ms)
    assert lately.table_bytes == 0


@given(
    st.lists(
        st.lists(st.integers(0, 40), max_size=6).map(lambda numbers: [name(n) for n in numbers])
        | st.integers(0, 150),
        max_size=20,
    )
)
def test_no_name_of_the_last_time_is_missed(steps: list[list[SequenceHash] | int]) -> None:
    """Goal: what a set of all names and times would have, is found; what is too old, is not."""
    lately, offered_ms, now_ms = OfferedLately(100), dict[SequenceHash, int](), 0
    lately.tick(0)
    for step in steps:
        if isinstance(step, int):
            now_ms += step
            lately.tick(now_ms)
        else:
            lately.add(step)
            offered_ms |= dict.fromkeys(step, now_ms)
        for one, at_ms in offered_ms.items():
            if now_ms - at_ms <= 100:
                assert lately.has_any([one])
        assert not lately.has_any(one for one in map(name, range(41)) if one not in offered_ms)


def wrong(lately: OfferedLately, names: Iterable[SequenceHash]) -> int:
    """Of so many names that were not offered, those that are found."""
    return sum(lately.has_any([one]) for one in names)


@pytest.mark.slow
def test_eighty_thousand_names_a_second_take_little_and_are_told_apart() -> None:
    """Goal: less than 1 % of questions are asked in vain, in less than 6 bytes a name."""
    lately, count = OfferedLately(5_500), 5 * 80_000
    for now_ms in (0, 5_500):
        lately.tick(now_ms)
        for _ in range(count // 100):
            lately.add(drawn(100))
    assert lately.table_bytes < 6 * 2 * count
    assert wrong(lately, drawn(20_000)) < 200


def test_the_memory_has_a_bound_that_follows_from_the_time() -> None:
    """Goal: no rate of offers takes more; what is offered is found all the same."""
    lately_ms = 1_000 * FULL_NAMES // NAMES_PER_S_MAX
    assert tables_for(lately_ms) == 1
    assert tables_for(10 * lately_ms) == 10
    lately = OfferedLately(lately_ms)
    offered: list[SequenceHash] = []
    for now_ms in range(3):
        lately.tick(now_ms * lately_ms)
        offered = drawn(2 * FULL_NAMES)
        lately.add(offered)
        assert lately.table_bytes <= 2 * TABLE_BYTES
    assert all(lately.has_any([one]) for one in offered[::100])


def test_names_are_not_kept() -> None:
    """Goal: a million names are no million objects that a tick would have to free."""
    gone = 0

    class Freed(bytes):
        def __del__(self) -> None:
            nonlocal gone
            gone += 1

    lately = OfferedLately(100)
    lately.tick(0)
    for number in range(9 * WAITING_MAX):
        lately.add([SequenceHash(Freed(number.to_bytes(16, "big")))])
    assert gone >= 8 * WAITING_MAX
