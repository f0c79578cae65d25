"""KVBM's counters over all instances, against what each life has counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.runtime.metrics import Metrics
from kvbm_metrics.core import kvbm_totals
from kvbm_metrics.core.kvbm_totals import LIVES_MAX, Totals

from tests.services.metrics.samples import counted, snapshot


def matched(totals: Totals) -> float:
    """One of the totals."""
    return totals.values()["kvbm_matched_tokens"]


def test_totals_never_go_back() -> None:
    """1. Two tiers count. 2. One dies. 3. It comes back in a new life. 4. Old news arrives."""
    totals = Totals()
    totals.take([counted("kvbm_matched_tokens", 100), counted("kvbm_matched_tokens", 50, host="b")])
    assert matched(totals) == 150
    totals.take([counted("kvbm_matched_tokens", 60, host="b")])
    assert matched(totals) == 160
    totals.take([counted("kvbm_matched_tokens", 7, epoch=2)])
    assert matched(totals) == 167
    totals.take([counted("kvbm_matched_tokens", 100, epoch=1)])
    assert matched(totals) == 167
    totals.take([counted("kvbm_matched_tokens", 9, epoch=2)])
    assert matched(totals) == 169


def test_totals_begin_at_zero_with_their_process() -> None:
    """Goal: `increase()` stays right over a restart, also with an instance that is seen late.

    A reset to 0 is exact for Prometheus, whatever came before. A start with what live instances say
    would be counted once more, and less than before is not what the dead ones had.
    """
    totals = Totals(since_epoch=10)
    totals.take([counted("kvbm_matched_tokens", 100, epoch=9)])
    assert matched(totals) == 0
    totals.take([counted("kvbm_matched_tokens", 130, epoch=9)])
    assert matched(totals) == 30
    late = counted("kvbm_matched_tokens", 1000, epoch=5, host="b")
    totals.take([late])
    assert matched(totals) == 30
    totals.take([counted("kvbm_matched_tokens", 7, epoch=11, host="c")])
    assert matched(totals) == 37, "a life that began after this process counts from its start"
    totals.take([counted("kvbm_matched_tokens", 3, epoch=12, host="b"), late])
    assert matched(totals) == 40


def test_totals_take_both_spellings_and_only_counters() -> None:
    """A service may or may not write `_total`; a gauge of the same name is somebody's mistake."""
    totals = Totals()
    totals.take([counted("kvbm_matched_tokens_total", 5)])
    wrong = Metrics()
    wrong.gauge("kvbm_matched_tokens", "Wrong.").set(99)
    totals.take([snapshot(wrong, "host-tier", host="b")])
    assert matched(totals) == 5


def test_totals_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest silent instance is forgotten first, what it has counted is not."""
    monkeypatch.setattr(kvbm_totals, "INSTANCES_MAX", 2)
    totals = Totals()
    for host in ("a", "b", "c"):
        totals.take([counted("kvbm_matched_tokens", 1, host=host)])
    totals.take([counted("kvbm_matched_tokens", 1, host="c")])
    assert matched(totals) == 3


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.integers(0, 100))))
@settings(deadline=None)
def test_totals_only_grow(history: list[tuple[str, int, int]]) -> None:
    """Whatever arrives in whatever order."""
    totals, last = Totals(), 0.0
    for host, epoch, value in history:
        totals.take([counted("kvbm_matched_tokens", value, host=host, epoch=epoch)])
        assert matched(totals) >= last
        last = matched(totals)


def test_a_life_with_a_lower_epoch_counts() -> None:
    """1. A tier counts. 2. Another registry names its next lives from 1 on. 3. Old news arrives."""
    totals = Totals(since_epoch=10)
    totals.take([counted("kvbm_matched_tokens", 100, epoch=12)])
    totals.take([counted("kvbm_matched_tokens", 7, epoch=1)])
    assert matched(totals) == 100, "it may be an answer of a life before, which was counted"
    totals.take([counted("kvbm_matched_tokens", 20, epoch=1)])
    assert matched(totals) == 113
    totals.take([counted("kvbm_matched_tokens", 104, epoch=12)])
    assert matched(totals) == 117
    totals.take([counted("kvbm_matched_tokens", 5, epoch=2)])
    assert matched(totals) == 117, "the life that answered last has a higher one"
    totals.take([counted("kvbm_matched_tokens", 9, epoch=3)])
    assert matched(totals) == 126


ANSWERS = st.tuples(st.sampled_from("ab"), st.integers(1, LIVES_MAX), st.integers(0, 9))


@given(st.lists(ANSWERS, max_size=40))
@settings(deadline=None)
def test_nothing_is_counted_twice(answers: list[tuple[str, int, int]]) -> None:
    """Answers of several lives, in any order: at most what all lives together have counted, and at
    least what each has counted between its first answer and its last."""
    totals, seen = Totals(), dict[tuple[str, int], list[int]]()
    for host, epoch, more in answers:
        values = seen.setdefault((host, epoch), [0])
        values.append(values[-1] + more)
        totals.take([counted("kvbm_matched_tokens", values[-1], host=host, epoch=epoch)])
    least = sum(values[-1] - values[1] for values in seen.values())
    assert least <= matched(totals) <= sum(values[-1] for values in seen.values())
