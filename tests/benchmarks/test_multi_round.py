"""The figures of the multi-round load, from answers that are given."""

from __future__ import annotations

import pytest

from benchmarks.multi_round import rows
from benchmarks.multi_round_client import Answered
from benchmarks.multi_round_shape import Question


def answered(due_s: float, *, first_s: float, cached: int, late_s: float = 0.0) -> Answered:
    """A question for 100 tokens; three tokens answer it, a tenth of a second apart."""
    return Answered(
        question=Question(due_s, 0, 0), prompt_tokens=100, cached_tokens=cached, tokens=[3, 4, 5],
        late_s=late_s, first_s=first_s, all_s=first_s + 0.2,
    )  # fmt: skip


def test_figures_of_both_servers_stand_beside_each_other() -> None:
    fast = [answered(0.0, first_s=0.1, cached=90), answered(1.0, first_s=0.3, cached=70)]
    slow = [answered(0.0, first_s=0.4, cached=40),
            answered(1.0, first_s=1.2, cached=0, late_s=0.6)]  # fmt: skip
    by_name = {row.name.split(" (")[0]: row for row in rows({"kvbm": [fast], "plain": [slow]}, 1.5)}
    first = by_name["time to first token, mean"]
    assert (first.value, first.reference, first.ratio) == pytest.approx((200.0, 800.0, 0.25))
    assert first.met is True
    assert by_name["time to first token, p90"].value == 300.0
    assert by_name["each further token, mean"].value == 100.0
    assert by_name["questions answered"].value == round(2 / 1.5, 3)
    assert by_name["questions answered"].reference == round(2 / 3.0, 3)
    assert by_name["prompt tokens that came from a cache, KVBM"].value == 80.0
    assert by_name["prompt tokens that came from a cache, vLLM alone"].value == 20.0
    assert by_name["questions that waited, KVBM"].value == 0.0
    assert by_name["questions that waited, vLLM alone"].value == 50.0
    assert by_name["questions asked"].value == 1.5


def test_ratio_is_the_median_of_the_runs_ratios() -> None:
    """Another load on the machine meets both servers of a run, and not all runs."""
    kvbm = [[answered(0.0, first_s=first_s, cached=0)] for first_s in (1.0, 20.0, 3.0)]
    plain = [[answered(0.0, first_s=first_s, cached=0)] for first_s in (2.0, 10.0, 4.0)]
    first = rows({"kvbm": kvbm, "plain": plain}, 1.0)[0]
    assert first.ratio == 0.75
    slower = rows({"kvbm": plain, "plain": kvbm}, 1.0)[0]
    assert slower.met is False
