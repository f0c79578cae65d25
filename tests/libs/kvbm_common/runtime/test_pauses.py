"""Pauses of one host end at the same moments, those of hosts spread, and none is much too long."""

from __future__ import annotations

import statistics
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.runtime.pauses import EARLY, SHIFTS, has_turn, pause_s
from kvbm_common.wire.operator_verbs import SERVICES

PERIODS = st.sampled_from((0.1, 1.0, 5 / 3, 20.0))
TIMES = st.floats(0, 4e9)


@given(PERIODS, st.lists(TIMES, min_size=2, max_size=2), st.sampled_from(("", "a", "b")))
def test_pauses_end_at_the_same_moments(every_s: float, begun_s: list[float], of: str) -> None:
    """Whenever two have begun, their ends are whole periods apart."""
    one_s, other_s = (at + pause_s(every_s, of=of, now_s=at) for at in begun_s)
    apart = (one_s - other_s) / every_s
    assert abs(apart - round(apart)) < 0.001 * max(1.0, 1 / every_s)


@given(PERIODS, TIMES)
def test_a_pause_lasts_a_part_of_a_period_to_little_more_than_one(
    every_s: float, now_s: float
) -> None:
    assert 0.99 * EARLY * every_s <= pause_s(every_s, now_s=now_s) <= 1.01 * (1 + EARLY) * every_s


def test_a_timer_that_is_early_does_not_end_two_pauses_of_one_moment() -> None:
    assert pause_s(1.0, now_s=8.999) > 1


def test_hosts_are_spread_over_the_shifts_of_a_period() -> None:
    pauses = [pause_s(1.0, of=f"host-{number}", now_s=0.0) for number in range(800)]
    found = Counter(pauses)
    assert len(found) == SHIFTS
    assert max(found.values()) < 2 * 800 / SHIFTS
    assert 0.4 < statistics.mean(pauses) < 0.75


@given(PERIODS, st.integers(0, 10**6), st.sampled_from(("", "a", "b")), st.floats(-0.4, 0.4))
def test_one_moment_of_some_is_that_of_a_name(
    every_s: float, first: int, of: str, late: float
) -> None:
    """Goal: a timer that is early or late by less than half a period changes nothing."""
    moments = range(first, first + 2 * SHIFTS)
    own = [one for one in moments if has_turn(every_s, of=of, now_s=(one + late) * every_s)]
    assert len(own) == 2
    assert own[1] - own[0] == SHIFTS


@given(st.text(max_size=20))
def test_the_services_of_a_host_have_different_moments(instance: str) -> None:
    """Goal: services whose names are alike but for the kind never stand still together."""
    turns = [
        {
            moment
            for moment in range(SHIFTS)
            if has_turn(1.0, of=instance, place=place, now_s=float(moment))
        }
        for place in range(len(SERVICES))
    ]
    assert len(set.union(*turns)) == len(SERVICES) <= SHIFTS
