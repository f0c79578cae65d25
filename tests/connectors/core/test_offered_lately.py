"""Names offered lately: for how long they are remembered."""

from __future__ import annotations

import itertools
import os

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_connectors.core import offered_lately
from kvbm_connectors.core.offered_lately import OfferedLately

from tests.connectors.helpers import name


def test_names_are_remembered_for_a_time_and_at_most_twice_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. More names than a set holds. 2. The time is over once: they are kept. 3. Twice."""
    monkeypatch.setattr(offered_lately, "SET_NAMES", 2)
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


class Asked(bytes):
    """A name that counts in how many sets it was looked for."""

    looks = 0

    def __hash__(self) -> int:
        Asked.looks += 1
        return super().__hash__()


def test_a_long_prompt_is_looked_for_in_few_sets() -> None:
    """Goal: 2,048 names take less than 0.5 ms of a step where 60,000 others were offered lately."""
    lately = OfferedLately(100)
    for now_ms in (0, 100):
        lately.tick(now_ms)
        for _ in range(500):
            lately.add([SequenceHash(os.urandom(16)) for _ in range(60)])
    Asked.looks = 0
    assert not lately.has_any([SequenceHash(Asked(os.urandom(16))) for _ in range(2_048)])
    assert Asked.looks <= 4 * 2_048


class Freed(bytes):
    """A name that counts how many have gone."""

    gone = 0

    def __del__(self) -> None:
        Freed.gone += 1


def test_names_are_freed_some_at_a_time() -> None:
    """Goal: no tick frees more than a quarter of a set, and all names go in the end."""
    lately, left = OfferedLately(100), 2 * offered_lately.SET_NAMES
    lately.tick(0)
    for number in range(left):
        lately.add([SequenceHash(Freed(number.to_bytes(16, "big")))])
    lately.tick(100)
    lately.tick(200)
    Freed.gone = 0
    while left:
        lately.tick(201)
        assert 0 < Freed.gone <= offered_lately.SET_NAMES // 4
        left -= Freed.gone
        Freed.gone = 0


def test_names_that_wait_to_be_freed_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: 60,000 names a second, with ten ticks, do not pile up; no tick frees more than half a
    set. A hundredth of each number is the same test."""
    for number, of in (("SET_NAMES", 164), ("FREED_NAMES", 20), ("FREED_NAMES_MAX", 82)):
        monkeypatch.setattr(offered_lately, number, of)
    lately, names = OfferedLately(60_000), itertools.count()
    left_after: list[int] = []
    Freed.gone = 0
    for tick in range(7 * 600):
        lately.add([SequenceHash(Freed(next(names).to_bytes(16, "big"))) for _ in range(60)])
        before = Freed.gone
        lately.tick(100 * tick)
        assert Freed.gone - before <= 82
        if tick % 600 == 599:
            left_after.append((tick + 1) * 60 - Freed.gone)
    assert max(left_after) < 3.5 * 600 * 60, left_after
    assert left_after[-1] < 1.01 * left_after[-2], left_after
