"""What a soak calls growth, and what it does not."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from tests.soak.faults import KILLS_END, plan
from tests.soak.judge import (
    BOUNDS,
    Bound,
    Finding,
    Point,
    Tenth,
    compare,
    judge,
    judge_returns,
    pace,
)

BOUND = Bound(noise=50.0)
SERVICES = ("consolidator", "index", "host-tier")


def points(values: list[float], *, life: int = 1, first: int = 0) -> list[Point]:
    """Samples a second apart, with ten engines between two."""
    return [Point(first + at, 10 * (first + at), life, value) for at, value in enumerate(values)]


def judged(found: list[Point], bound: Bound = BOUND) -> Finding:
    """The verdict on all but the first ten seconds."""
    finding = judge("memory", bound, found, after_s=10.0, settle_s=5.0)
    assert finding is not None
    return finding


def test_noise_is_no_growth() -> None:
    rng = random.Random(1)
    assert not judged(points([1000 + rng.gauss(0, 100) for _ in range(200)])).is_red


def test_an_entry_for_each_engine_is_growth() -> None:
    rng = random.Random(1)
    finding = judged(points([1000 + at + rng.gauss(0, 100) for at in range(200)]))
    assert finding.is_red
    assert 150 < finding.growth < 230


def test_what_grows_before_the_judged_time_is_no_growth() -> None:
    assert not judged(points([min(10.0, at) * 100 for at in range(200)])).is_red


def test_what_fills_is_no_growth() -> None:
    """A history that is full in the middle of the judged time grows no more."""
    assert not judged(points([min(at, 90) * 10.0 for at in range(200)])).is_red


def test_what_a_fault_leaks_is_growth_though_quiet_time_follows() -> None:
    """Five reconnections leak a descriptor each; then there are none, and all is flat."""
    busy = points([14.0 + min(at // 16, 5) for at in range(100)], life=1)
    calm = points([19.0] * 100, life=1, first=100)
    bound = Bound(2.5)

    def found(faults_end_s: float | None) -> bool:
        one = judge(
            "descriptors", bound, busy + calm, after_s=10.0, settle_s=5.0,
            faults_end_s=faults_end_s,
        )  # fmt: skip
        assert one is not None
        return one.is_red

    assert not found(None), "the quiet half has hidden it"
    assert found(100.0)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_descriptor_for_each_return_of_nats_is_growth(kept: int) -> None:
    """NATS comes back three times in one life, and twice in the next, which is short."""
    found = [
        Point(float(at), 3 * at, int(at >= 60), 9.0 + kept * (at % 60 // 15), at // 15)
        for at in range(100)
    ]
    one = judge_returns("descriptors", Bound(2.5), found, after_s=0.0)
    assert one is not None
    assert (one.growth, one.is_red) == (5.0 * kept, bool(kept))


@pytest.mark.parametrize("engines", [80, 250, 5_000])
def test_an_entry_for_each_engine_is_red_however_many_come(engines: int) -> None:
    found = [Point(float(at), engines * at // 20, 1, float(engines * at // 20)) for at in range(20)]
    one = judge("kept", BOUNDS["entries"], found, after_s=0.0, settle_s=0.0)
    assert one is not None
    assert one.is_red


@pytest.mark.parametrize("length_max", [300, 5_000])
def test_a_queue_with_a_random_length_is_red_by_no_chance(length_max: int) -> None:
    """Goal: of hundreds in a soak none is, which sees three lives, two of them for a minute."""
    rng = random.Random(length_max)
    for _ in range(400):
        found = [
            Point(12.0 * at, 33 * at, int(at >= 5) + int(at >= 10), rng.randint(1, length_max))
            for at in range(22)
        ]
        one = judge("queue", BOUNDS["entries"], found, after_s=0.0, settle_s=0.0)
        assert one is not None
        assert not one.is_red, found


def test_a_leak_beside_a_random_length_is_red() -> None:
    rng = random.Random(1)
    for _ in range(30):
        found = [Point(12.0 * at, 33 * at, 1, 33 * at + rng.randint(1, 100)) for at in range(36)]
        one = judge("queue", BOUNDS["entries"], found, after_s=0.0, settle_s=0.0)
        assert one is not None
        assert one.is_red, found


def test_the_median_pace_ignores_a_burst() -> None:
    """Forty a request, and once a thousand for something else."""
    samples = [(float(at), 40.0 * at + 1_000 * (at >= 8)) for at in range(10)]
    assert pace(samples) == 40
    assert pace(samples[:3]) == 0, "three pairs are too few"


def test_one_sample_decides_nothing() -> None:
    values = [1000.0] * 200
    values[-1] = 100_000.0
    assert not judged(points(values)).is_red


def test_a_restart_hides_no_growth() -> None:
    """Each life begins low and grows, and the last one ends where the first one began."""
    lives = [points([500.0 + 2 * at for at in range(50)], life=life, first=50 * life)
             for life in range(4)]  # fmt: skip
    assert judged([point for life in lives for point in life]).is_red


def test_what_a_start_takes_is_no_growth() -> None:
    """The first seconds of a life are left out."""
    lives = [points([min(at, 5) * 100.0 for at in range(50)], life=life, first=50 * life)
             for life in range(1, 5)]  # fmt: skip
    assert not judged([point for life in lives for point in life]).is_red


def test_what_a_new_life_fills_counts_once() -> None:
    """A life that is killed late fills again what the one before it held, and no more than that."""
    before = points([100.0] * 30, life=1)
    after = points([2.0 * at for at in range(50)], life=2, first=30)
    assert judged(before + after, Bound(100.0)).growth <= 100
    assert not judged(before + after, Bound(100.0)).is_red


def test_a_bound_may_allow_something_for_each_engine() -> None:
    found = points([float(20 * at) for at in range(200)])
    assert judged(found, Bound(50.0, 1.9)).is_red
    assert not judged(found, Bound(50.0, 2.2)).is_red


def test_too_little_is_not_judged() -> None:
    assert judge("memory", BOUND, points([1.0, 2.0]), after_s=0.0, settle_s=0.0) is None


SECOND = Tenth(requests=100, hit_rate=0.5, lookup_p50_ms=2.0, lookup_p99_ms=20.0, ping_p50_ms=0.1,
               ping_p99_ms=1.0, cpu_ms_per_request=40.0, cpu_ms_by_service={}, work_us=100.0,
               log_lines_per_hour=0.0)  # fmt: skip


def red(last: Tenth, *, tenth_s: float = 720) -> list[str]:
    """What is red of a last tenth."""
    return [one.what for one in compare(SECOND, last, tenth_s) if one.is_red]


def test_tenths_that_differ_are_red() -> None:
    last = replace(SECOND, hit_rate=0.4, lookup_p50_ms=2.4, cpu_ms_per_request=60.0)
    assert red(last) == ["hit_rate", "cpu_ms_per_request"]


def test_a_slower_machine_is_taken_off_lookups() -> None:
    last = replace(SECOND, lookup_p50_ms=4.0, lookup_p99_ms=70.0)
    assert red(last) == ["lookup_p50_ms", "lookup_p99_ms"]
    assert red(last, tenth_s=24) == ["lookup_p50_ms", "lookup_p99_ms"]
    assert red(replace(last, ping_p50_ms=0.2, ping_p99_ms=2.0)) == []


def test_a_machine_that_computes_slower_is_taken_off_processor_time() -> None:
    last = replace(SECOND, cpu_ms_per_request=52.0)
    assert red(last) == ["cpu_ms_per_request"]
    assert red(replace(last, work_us=125.0)) == []


def test_processor_time_may_grow_by_a_tenth_where_the_machine_is_the_same() -> None:
    """The machine is as it was, slower, then faster; and in short tenths nothing is so exact."""
    last = replace(SECOND, cpu_ms_per_request=46.0)
    assert red(last) == ["cpu_ms_per_request"]
    assert red(replace(last, cpu_ms_per_request=43.9)) == []
    assert red(replace(last, ping_p50_ms=0.14)) == []
    assert red(replace(last, ping_p50_ms=0.07)) == []
    assert red(last, tenth_s=24) == []


def test_a_short_run_ends_nats_again_and_again() -> None:
    """Every other fault after the kills, and more rarely in a long run."""
    ends = [
        sum(what == "nats" and at_s > KILLS_END * seconds
            for at_s, what in plan(1, SERVICES, seconds=seconds)) / seconds
        for seconds in (108, 4_320)
    ]  # fmt: skip
    assert ends[0] > 2 * ends[1]


def test_the_median_of_a_short_tenth_may_wander() -> None:
    last = replace(SECOND, lookup_p50_ms=3.0)
    assert (red(last, tenth_s=24), red(last, tenth_s=120)) == ([], ["lookup_p50_ms"])


def test_a_plan_is_drawn_from_its_seed() -> None:
    assert plan(1, SERVICES, seconds=300) == plan(1, SERVICES, seconds=300)
    assert plan(1, SERVICES, seconds=300) != plan(2, SERVICES, seconds=300)


def test_every_service_is_killed_early_and_lives_on_after_that() -> None:
    for seed in range(20):
        kills = [one for one in plan(seed, SERVICES, seconds=150) if one[1].startswith("kill")]
        assert {what for _, what in kills} == {f"kill {name}" for name in SERVICES}
        assert max(at_s for at_s, _ in kills) < KILLS_END * 150
