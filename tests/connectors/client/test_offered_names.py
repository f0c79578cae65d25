"""Offered names: what is kept, and for how long."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from kvbm_connectors.client import offered_names
from kvbm_connectors.client.offered_names import OfferedNames

from tests.connectors.helpers import name


def test_the_oldest_names_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the last names are there, most of the others too, and the number has a bound."""
    monkeypatch.setattr(offered_names, "NAMES_MAX", 16)
    known = OfferedNames()
    for number in range(100):
        known.add([name(number)])
    kept = [number for number in range(100) if name(number) in known]
    assert kept == list(range(100 - len(kept), 100))
    assert 12 <= len(kept) <= 16


def test_a_prompt_that_is_loaded_again_and_again_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. Others are offered. 2. A prompt of a whole set is loaded often. 3. More come between."""
    monkeypatch.setattr(offered_names, "NAMES_MAX", 64)
    known, prompt = OfferedNames(), [name(number) for number in range(100, 108)]
    others = [name(number) for number in range(30)]
    for other in others:
        known.add([other])
    for _ in range(50):
        known.add(prompt)
    assert all(one in known for one in [*others, *prompt])
    more = [name(number) for number in range(200, 300)]
    for one in more:
        known.add(prompt)
        known.add([one])
    assert all(one in known for one in [*more[-40:], *prompt])
    assert known_of(known, range(300)) <= 64


@pytest.mark.parametrize("before", [0, 3, 7])
def test_a_single_call_keeps_no_more_than_many(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the bound holds for the names of a prompt that is longer than all there is room for."""
    monkeypatch.setattr(offered_names, "NAMES_MAX", 64)
    known = OfferedNames()
    known.add(name(number) for number in range(before))
    for first in (100, 200, 300):
        known.add(name(number) for number in range(first, first + 100))
        assert 56 <= known_of(known, range(400)) <= 64
    assert known_of(known, range(300)) <= 8


def known_of(known: OfferedNames, numbers: range) -> int:
    """Count the names that are known."""
    return sum(name(number) in known for number in numbers)


def test_names_are_forgotten_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Some that were discarded. 2. All, of another life of the host tier."""
    monkeypatch.setattr(offered_names, "NAMES_MAX", 16)
    known = OfferedNames()
    known.serve(1)
    for number in range(8):
        known.add([name(number)])
    known.discard(name(number) for number in (0, 7))
    assert [number for number in range(8) if name(number) in known] == [1, 2, 3, 4, 5, 6]
    known.serve(2)
    assert not any(name(number) in known for number in range(8))


def test_a_name_takes_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a step that asks for 2,048 names takes no second call, or generator, for each."""
    monkeypatch.setattr(offered_names, "NAMES_MAX", 16)
    known, calls = OfferedNames(), list[str]()
    for number in range(16):
        known.add([name(number)])

    def note(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    old, absent = name(8), name(99)
    sys.setprofile(note)
    try:
        assert (old in known, absent in known) == (True, False)
    finally:
        sys.setprofile(None)
    assert calls == ["__contains__"] * 2
