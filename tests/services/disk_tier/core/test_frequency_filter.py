"""The frequency filter: KVBM's arithmetic, bounded in counts, entries and time."""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_disk_tier.core.frequency_filter import (
    COUNT_MAX,
    DECAY_STEP_MS,
    SIGHTS_MAX,
    FrequencyFilter,
)

from tests.services.disk_tier.helpers import name

if TYPE_CHECKING:
    from _typeshed import TraceFunction

STEP_MS = 10
"""A decay step of the property tests."""
Sights = list[tuple[int, int]]
"""Numbers of blocks, each with the time since the sight before it."""


def seen(
    numbers: Sights, *, entries_max: int = SIGHTS_MAX, pass_count: int = 2
) -> tuple[FrequencyFilter, int]:
    """A filter that has seen these, and the time."""
    frequency_filter = FrequencyFilter(entries_max=entries_max)
    frequency_filter.change(enabled=None, pass_count=pass_count, decay_ms=STEP_MS)
    now_ms = 0
    for number, waited_ms in numbers:
        now_ms += waited_ms
        frequency_filter.see(name(number), now_ms)
    return frequency_filter, now_ms


def sights(numbers: int = 20, *, most: int = 60) -> st.SearchStrategy[Sights]:
    """Sights of so many blocks."""
    return st.lists(st.tuples(st.integers(1, numbers), st.integers(0, 3 * STEP_MS)), max_size=most)


def test_a_new_block_counts_one_and_does_not_pass() -> None:
    """Once is chance."""
    frequency_filter = FrequencyFilter()
    assert not frequency_filter.see(name(1), 0)
    assert frequency_filter.count(name(1), 0) == 1
    assert len(frequency_filter) == 1


def test_each_further_sight_doubles_and_passes_from_two_on() -> None:
    """1, 2, 4."""
    frequency_filter = FrequencyFilter()
    passed = [frequency_filter.see(name(1), 0) for _ in range(3)]
    assert passed == [False, True, True]
    assert frequency_filter.count(name(1), 0) == 4


def test_each_step_takes_one_off_and_forgets_at_zero() -> None:
    """4, 3, 2, 1, gone; a millisecond early is too early."""
    frequency_filter = FrequencyFilter()
    for _ in range(3):
        frequency_filter.see(name(1), 5_000)
    assert frequency_filter.count(name(1), 5_000 + DECAY_STEP_MS - 1) == 4
    for left in (3, 2, 1, 0):
        now_ms = 5_000 + (4 - left) * DECAY_STEP_MS
        assert frequency_filter.count(name(1), now_ms) == left
    assert not frequency_filter.see(name(1), now_ms), "forgotten, it is new again"


def test_a_block_that_decayed_to_one_passes_when_it_doubles() -> None:
    """2, 1, 2."""
    frequency_filter = FrequencyFilter()
    for _ in range(2):
        frequency_filter.see(name(1), 0)
    assert frequency_filter.see(name(1), 2 * DECAY_STEP_MS - 1)


def test_a_step_begins_with_the_sight() -> None:
    """No clock of steps ticks between two sights that are a moment apart."""
    frequency_filter = FrequencyFilter()
    frequency_filter.see(name(2), 0)
    frequency_filter.see(name(1), DECAY_STEP_MS - 1)
    assert frequency_filter.see(name(1), DECAY_STEP_MS)


def test_what_returns_after_a_pause_of_hours_passes() -> None:
    """An agent that waits for people: three hours between two calls."""
    frequency_filter = FrequencyFilter()
    frequency_filter.see(name(1), 0)
    assert frequency_filter.see(name(1), 3 * 3600 * 1000)


def test_counts_saturate() -> None:
    """However often a block was seen, it is new again after so many steps."""
    frequency_filter = FrequencyFilter()
    for _ in range(100):
        frequency_filter.see(name(1), 0)
    assert frequency_filter.count(name(1), 0) == COUNT_MAX
    assert frequency_filter.count(name(1), COUNT_MAX * DECAY_STEP_MS) == 0


@pytest.mark.parametrize("pass_count", [3, 17, 1_000_000])
def test_every_pass_count_of_the_wire_can_be_reached(pass_count: int) -> None:
    """The bound of the counts is never below it."""
    frequency_filter = FrequencyFilter()
    frequency_filter.change(enabled=None, pass_count=pass_count, decay_ms=None)
    passed = [frequency_filter.see(name(1), 0) for _ in range(25)]
    assert passed.index(True) == (pass_count - 1).bit_length()
    assert passed[-1]


def test_switched_off_everything_passes_and_nothing_is_kept() -> None:
    """DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER."""
    frequency_filter = FrequencyFilter(enabled=False)
    assert frequency_filter.see(name(1), 0)
    assert len(frequency_filter) == 0


@given(sights(), st.integers(1, 40))
def test_counts_are_those_of_the_rule_over_all_sights(numbers: Sights, pass_count: int) -> None:
    """Against the rule, worked out from all sights of a block each time."""
    frequency_filter, _ = seen([], pass_count=pass_count)
    past: list[tuple[int, int]] = []
    now_ms = 0
    for number, waited_ms in numbers:
        now_ms += waited_ms
        past.append((number, now_ms))
        passes = frequency_filter.see(name(number), now_ms)
        assert passes == (_counted(past, number, now_ms, pass_count) >= pass_count)
        for other in range(1, 21):
            expected = _counted(past, other, now_ms, pass_count)
            assert frequency_filter.count(name(other), now_ms) == expected


def _counted(past: Sights, number: int, now_ms: int, pass_count: int) -> int:
    """What a block counts, by the rule: of (block, time) of all sights."""
    count, before_ms = 0, 0
    for at_ms in [at_ms for one, at_ms in past if one == number]:
        count = max(0, count - (at_ms - before_ms) // STEP_MS)
        count, before_ms = min(2 * count, max(COUNT_MAX, pass_count)) or 1, at_ms
    return max(0, count - (now_ms - before_ms) // STEP_MS)


@given(sights(), st.lists(st.tuples(st.integers(2, 20), st.just(0)), max_size=30), st.data())
def test_seen_twice_within_a_step_passes_whatever_the_map_holds(
    before: Sights, between: Sights, data: st.DataObject
) -> None:
    """Others were seen before, often, and half as many as there is room for in between."""
    distinct = len({number for number, _ in between})
    entries_max = 2 * data.draw(st.integers(max(1, distinct), max(1, distinct) + 3))
    frequency_filter, first_ms = seen(before, entries_max=entries_max)
    frequency_filter.see(name(1), first_ms)
    for number, _ in between:
        frequency_filter.see(name(number), first_ms)
    second_ms = first_ms + data.draw(st.integers(0, STEP_MS - 1))
    assert frequency_filter.see(name(1), second_ms)


def test_a_million_blocks_of_high_count_let_new_ones_pass() -> None:
    """As many as fit, each at its highest count: a new one still passes at its second sight."""
    frequency_filter = FrequencyFilter(entries_max=1_000)
    for _ in range(COUNT_MAX):
        for number in range(1, 1_001):
            frequency_filter.see(name(number), 0)
    for new in range(2_001, 2_401):
        assert not frequency_filter.see(name(new), 0)
    for new in range(2_001, 2_401):
        assert frequency_filter.see(name(new), 0)


@given(sights(), st.integers(2, 8))
def test_a_small_map_forgets_and_never_invents(numbers: Sights, entries_max: int) -> None:
    """It holds no more than it may, and no block counts more than in a map with room for all."""
    small, now_ms = seen(numbers, entries_max=entries_max)
    large, _ = seen(numbers)
    assert len(small) <= entries_max
    for number in range(1, 21):
        assert small.count(name(number), now_ms) <= large.count(name(number), now_ms)


def _operations(call: Callable[[], object]) -> int:
    """Count the instructions of Python that a call runs; finalizers of earlier tests wait."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: object) -> TraceFunction:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
        gc.enable()
    return count


def _worst_sight(entries_max: int) -> int:
    """The most operations of one sight, while the map is full and while it turns over."""
    frequency_filter = FrequencyFilter(entries_max=entries_max)
    for _ in range(COUNT_MAX):
        for number in range(entries_max):
            frequency_filter.see(_hash(number), 0)
    numbers = range(2 * entries_max, 4 * entries_max)
    return max(_operations(lambda n=n: frequency_filter.see(_hash(n), 1)) for n in numbers)  # type: ignore[misc]


def _hash(number: int) -> SequenceHash:
    """A name as they are: a digest."""
    return SequenceHash(hashlib.sha256(number.to_bytes(8, "big")).digest()[:16])


def test_a_sight_costs_the_same_whatever_the_map_holds() -> None:
    """A map of 2,048 blocks of the highest counts: a loop over them would be 2,048 instructions."""
    assert max(_worst_sight(2_048), _worst_sight(16)) < 2_048


def test_a_filter_follows_the_size_of_its_store() -> None:
    """Of a small store it notes few blocks: it had a million of them whatever the store's size."""
    frequency_filter = FrequencyFilter()
    for slot_count, noted in ((1, 16_384), (10_000, 80_000), (1_000_000, SIGHTS_MAX)):
        frequency_filter.size_for(slot_count)
        assert frequency_filter.entries_max == noted
    frequency_filter = FrequencyFilter(entries_max=10)
    frequency_filter.size_for(100)
    assert frequency_filter.entries_max == 10


def test_a_filter_that_noted_too_much_begins_again() -> None:
    frequency_filter = FrequencyFilter()
    for number in range(20_000):
        frequency_filter.see(name(number), 0)
    frequency_filter.size_for(10_000)
    assert frequency_filter.count(name(1), 0) == 1
    frequency_filter.size_for(1)
    assert len(frequency_filter) == 0
    for number in range(40_000):
        frequency_filter.see(name(number), 0)
    assert len(frequency_filter) <= 16_384
