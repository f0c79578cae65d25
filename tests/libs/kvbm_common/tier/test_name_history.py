"""Name histories, compared with an OrderedDict."""

from __future__ import annotations

import os
import random
import sys
from collections import OrderedDict
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.service.footprint import memory_bytes
from kvbm_common.tier.name_history import (
    ENTRIES_MOST,
    ENTRY_BYTES,
    FACTORS_BYTES,
    FEW,
    SHED_PER_NOTE,
    NameHistory,
    set_factors,
)

if TYPE_CHECKING:
    from _typeshed import TraceFunction

VALUES = 1 << 20
Oracle = OrderedDict[SequenceHash, tuple[int, int]]


def drawn_names(seed: object, count: int) -> list[SequenceHash]:
    rng = random.Random(str(seed))
    return [SequenceHash(rng.randbytes(16)) for _ in range(count)]


def note_in(oracle: Oracle, kept: int, name: SequenceHash, at_ms: int, value: int) -> list[object]:
    """The same note in a dict that keeps so many names; what it forgets."""
    forgotten: list[object] = []
    if oracle.pop(name, None) is None:
        while len(oracle) >= kept and len(forgotten) < SHED_PER_NOTE:
            oldest, numbers = oracle.popitem(last=False)
            forgotten.append((oldest, *numbers))
    oracle[name] = (at_ms, value)
    return forgotten


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("first", [1, 2, 3, 40, 300])
def test_it_is_an_ordered_dict_that_forgets(first: int, seed: int) -> None:
    """Goal: notes, questions and changes of the size, drawn; a small table has full stretches."""
    rng = random.Random(f"{first}/{seed}")
    names = drawn_names(f"{first}/{seed}", 2 * first + 2)
    history, oracle, kept = NameHistory(first, by_tail=seed % 2 == 0), Oracle(), first
    for at_ms in range(500):
        name, value = rng.choice(names), rng.randrange(VALUES)
        if rng.random() < 0.02:
            kept = rng.randrange(1, 3 * first)
            history.resize(kept)
        elif rng.random() < 0.1 and oracle:
            gone = rng.choice(list(oracle))
            history.remove(gone)
            del oracle[gone]
        elif rng.random() < 0.7:
            forgotten = history.note(name, at_ms, value)
            assert list(forgotten) == note_in(oracle, kept, name, at_ms, value)
        assert history.get(name) == oracle.get(name)
        asked = rng.sample(names, min(len(names), rng.choice((0, 1, 5, FEW, FEW + 1, 100))))
        assert history.has_none_of(asked) == oracle.keys().isdisjoint(asked)
        assert len(history) == len(oracle)
    assert [history.get(name) for name in names] == [oracle.get(name) for name in names]
    assert history.values(VALUES) == {value for _, value in oracle.values()}


def test_names_with_one_ending_are_found_in_the_order_in_which_they_came() -> None:
    """Goal: the table wraps around, others stand between, one leaves and comes again."""
    history, others = NameHistory(40, by_tail=True), drawn_names("others", 30)
    alike = [SequenceHash(bytes([number]) * 8 + b"\xff" * 8) for number in range(5)]
    for number, name in enumerate(alike):
        history.note(name, number, number)
        for other in others[6 * number : 6 * number + 6]:
            history.note(other, number, 0)
    history.remove(alike[1])
    history.note(alike[1], 9, 9)
    history.note(alike[0], 8, 8)
    assert [(one.at_ms, one.value) for one in history.alike(alike[3])] == [
        (8, 8), (2, 2), (3, 3), (4, 4), (9, 9),
    ]  # fmt: skip
    assert [one.name for one in history.alike(others[0])] == [others[0]]
    assert history.alike(SequenceHash(bytes(16))) == []


def name_at(number: int) -> SequenceHash:
    """Return the name whose last 8 bytes are the number's low half, and the first its high one."""
    high, low = divmod(number % (1 << 128), 1 << 64)
    return SequenceHash(high.to_bytes(8, "little") + low.to_bytes(8, "little"))


def lines_run(history: NameHistory, names: list[SequenceHash]) -> int:
    """Count the lines of the history's module that noting these names takes: some for a probe."""
    code, count = sys.modules[NameHistory.__module__].__file__, 0

    def trace(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        nonlocal count
        if frame.f_code.co_filename != code:
            return None
        count += event == "line"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        for name in names:
            history.note(name, 0, 0)
    finally:
        sys.settrace(former)
    return count


CHOSEN_ON_PURPOSE = {
    **{f"each {distance:#x} after the last": distance for distance in (
        1, 2, 3, 0x100, 0x1_0001, 1 << 32, 1 << 38, 3 << 37, 1 << 50, 0x0123_4567_89AB)},
    "with one ending": 1 << 64,
    "with one ending, far apart": 1 << 115,
}  # fmt: skip


@pytest.mark.parametrize("distance", CHOSEN_ON_PURPOSE.values(), ids=CHOSEN_ON_PURPOSE)
def test_names_that_are_chosen_on_purpose_take_no_more_probes_than_drawn_ones(
    distance: int,
) -> None:
    """Goal: an engine that names its blocks by a rule makes no note long; half of them leave.

    The factors are drawn anew, as a service does: one draw of thirty takes twice as long or more.
    """
    chosen, drawn = [name_at(number * distance) for number in range(2_000)], drawn_names("", 2_000)
    shares = []
    for _ in range(5):
        set_factors(os.urandom(FACTORS_BYTES))
        shares.append(lines_run(NameHistory(1_000), chosen) / lines_run(NameHistory(1_000), drawn))
    assert median(shares) < 1.5, shares


def test_a_history_that_is_made_smaller_before_its_first_note_takes_what_is_declared() -> None:
    """Goal: services learn the tier's slots later than they make its histories."""
    history, names = NameHistory(ENTRIES_MOST), drawn_names("empty", 4_096)
    history.resize(4_096)
    before = memory_bytes()
    for name in names:
        history.note(name, 0, 0)
    assert memory_bytes() - before < 4_096 * ENTRY_BYTES + (1 << 20)


def test_a_smaller_history_forgets_a_few_with_each_note() -> None:
    history, names = NameHistory(1_000), drawn_names("smaller", 1_400)
    for number, name in enumerate(names[:1_000]):
        history.note(name, number, 0)
    history.resize(10)
    for number, name in enumerate(names[1_000:]):
        forgotten = history.note(name, 1_000 + number, 0)
        assert len(forgotten) == SHED_PER_NOTE
        assert forgotten[0].name == names[SHED_PER_NOTE * number]
    assert len(history) == 600


def test_an_entry_takes_what_is_declared() -> None:
    """Goal: no more memory for each name than the bound says, and none for those to come."""
    before = memory_bytes()
    history = NameHistory(100_000)
    empty = memory_bytes()
    for number in range(100_000):
        history.note(SequenceHash(random.Random(number).randbytes(16)), number, number)
    assert empty - before < 1 << 20
    assert memory_bytes() - empty < 100_000 * ENTRY_BYTES + (1 << 20)
    assert len(history) == 100_000


@pytest.mark.parametrize("entries", [0, ENTRIES_MOST + 1])
def test_zero_or_more_than_a_million_entries_are_refused(entries: int) -> None:
    with pytest.raises(AssertionError, match="entries"):
        NameHistory(entries)
