"""The frequency filter: KVBM's arithmetic, exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvbm_disk_tier.core.frequency_filter import COUNT_MAX, DECAY_STEP_MS, FrequencyFilter

from tests.services.disk_tier.helpers import name


def count(frequency_filter: FrequencyFilter, number: int) -> int:
    """What a block counts: how many decay steps it takes to forget it."""
    return frequency_filter.count(name(number))


def test_a_new_block_counts_one_and_does_not_pass() -> None:
    """Once is chance."""
    frequency_filter = FrequencyFilter()
    assert not frequency_filter.see(name(1))
    assert count(frequency_filter, 1) == 1
    assert name(1) in frequency_filter


def test_each_further_sight_doubles_and_passes_from_two_on() -> None:
    """1, 2, 4, 8."""
    frequency_filter = FrequencyFilter()
    passed = [frequency_filter.see(name(1)) for _ in range(4)]
    assert passed == [False, True, True, True]
    assert count(frequency_filter, 1) == 8


def test_each_step_of_ten_minutes_takes_one_off_and_forgets_at_zero() -> None:
    """4, 3, 2, 1, gone; a millisecond early is too early."""
    assert DECAY_STEP_MS == 600_000
    frequency_filter = FrequencyFilter()
    frequency_filter.decay_until(5_000)
    for _ in range(3):
        frequency_filter.see(name(1))
    frequency_filter.decay_until(5_000 + DECAY_STEP_MS - 1)
    assert count(frequency_filter, 1) == 4
    for left in (3, 2, 1, 0):
        frequency_filter.decay_until(5_000 + (4 - left) * DECAY_STEP_MS)
        assert count(frequency_filter, 1) == left
    assert len(frequency_filter) == 0
    assert not frequency_filter.see(name(1)), "forgotten, it is new again"


def test_a_block_that_decayed_to_one_passes_when_it_doubles() -> None:
    """2, 1, 2."""
    frequency_filter = FrequencyFilter()
    frequency_filter.decay_until(0)
    frequency_filter.see(name(1))
    frequency_filter.see(name(1))
    frequency_filter.decay_until(DECAY_STEP_MS)
    assert frequency_filter.see(name(1))


def test_steps_that_were_missed_are_made_up_for() -> None:
    """A service that slept for an hour."""
    frequency_filter = FrequencyFilter()
    frequency_filter.decay_until(0)
    for _ in range(4):
        frequency_filter.see(name(1))
    frequency_filter.decay_until(6 * DECAY_STEP_MS)
    assert count(frequency_filter, 1) == 2


def test_over_its_cap_it_decays_until_it_fits() -> None:
    """Three fit. 1 counts 4; the blocks that were seen once are forgotten first."""
    frequency_filter = FrequencyFilter(entries_max=3)
    for _ in range(3):
        frequency_filter.see(name(1))
    for number in (2, 3):
        frequency_filter.see(name(number))
    assert not frequency_filter.see(name(4))
    assert len(frequency_filter) == 1
    assert count(frequency_filter, 1) == 3


def test_counts_saturate() -> None:
    """KVBM's are 64 bits wide."""
    frequency_filter = FrequencyFilter()
    for _ in range(100):
        frequency_filter.see(name(1))
    assert count(frequency_filter, 1) == COUNT_MAX


def test_switched_off_everything_passes_and_nothing_is_kept() -> None:
    """DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER."""
    frequency_filter = FrequencyFilter(enabled=False)
    assert frequency_filter.see(name(1))
    assert len(frequency_filter) == 0


@given(
    st.lists(st.one_of(st.integers(1, 5), st.just("decay")), max_size=40),
    st.integers(1, 4),
)
def test_it_is_kvbms_filter(sights: list[object], entries_max: int) -> None:
    """Against the rule, written down once more."""
    frequency_filter = FrequencyFilter(entries_max=entries_max)
    frequency_filter.decay_until(0)
    model: dict[int, int] = {}
    now_ms = 0
    for sight in sights:
        if sight == "decay":
            now_ms += DECAY_STEP_MS
            frequency_filter.decay_until(now_ms)
            model = {number: left - 1 for number, left in model.items() if left > 1}
            continue
        assert isinstance(sight, int)
        model[sight] = 2 * model[sight] if sight in model else 1
        assert frequency_filter.see(name(sight)) == (model[sight] >= 2)
        while len(model) > entries_max:
            model = {number: left - 1 for number, left in model.items() if left > 1}
        assert len(frequency_filter) == len(model) <= entries_max
        assert all(count(frequency_filter, number) == left for number, left in model.items())
