"""LMBenchmark's shape of questions: rates, users who come and go, prompts that grow."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.multi_round_shape import Shape, beginning, question_of, questions

SHAPE = Shape(
    users=4, rounds=3, per_s=2.0, requests=40, system_tokens=10, history_tokens=30,
    question_tokens=5, answer_tokens=7,
)  # fmt: skip
SHAPES = st.builds(
    Shape, users=st.integers(1, 9), rounds=st.integers(1, 9), per_s=st.floats(0.1, 50),
    requests=st.integers(1, 200), system_tokens=st.just(0), history_tokens=st.just(3),
    question_tokens=st.just(1), answer_tokens=st.just(1),
)  # fmt: skip


@given(SHAPES)
def test_all_users_together_ask_at_the_rate(shape: Shape) -> None:
    due = sorted(one.due_s for mine in questions(shape).values() for one in mine)
    assert due == pytest.approx([count / shape.per_s for count in range(shape.requests)])


@given(SHAPES)
def test_a_user_asks_each_round_at_the_users_share_of_the_rate(shape: Shape) -> None:
    for user, mine in questions(shape).items():
        assert [one.user for one in mine] == [user] * len(mine)
        assert [one.number for one in mine] == list(range(len(mine)))
        gaps = [after.due_s - before.due_s for before, after in pairwise(mine)]
        assert gaps == pytest.approx([shape.users / shape.per_s] * len(gaps))


@given(SHAPES)
def test_so_many_users_are_there_at_any_time(shape: Shape) -> None:
    """Users who have asked all rounds make room; only those of the beginning ask fewer."""
    asked = questions(shape)
    turns = sorted((one.due_s, one.user) for mine in asked.values() for one in mine)
    for first in range(0, len(turns) - shape.users + 1, shape.users):
        assert len({user for _, user in turns[first : first + shape.users]}) == shape.users
    for user, mine in asked.items():
        assert len(mine) <= shape.rounds
        ended = mine[-1].due_s + (shape.users + 0.5) / shape.per_s < turns[-1][0]
        if ended and user >= shape.users:
            assert len(mine) == shape.rounds


def test_users_leave_one_after_the_other() -> None:
    lives = {user: len(mine) for user, mine in questions(SHAPE).items()}
    assert [lives[user] for user in range(8)] == [3, 3, 2, 1, 3, 3, 3, 3]


def test_the_system_prompt_is_shared_and_histories_are_not() -> None:
    first, second = (beginning(SHAPE, 0, user) for user in (0, 1))
    assert len(first) == SHAPE.system_tokens + SHAPE.history_tokens
    assert first[: SHAPE.system_tokens] == second[: SHAPE.system_tokens]
    assert first[SHAPE.system_tokens :] != second[SHAPE.system_tokens :]
    assert first == beginning(SHAPE, 0, 0)


def test_runs_share_no_prompt() -> None:
    """Else the second run of a server would find what the first has left."""
    first, second = (beginning(SHAPE, run, 0) for run in (0, 1))
    assert first[: SHAPE.system_tokens] != second[: SHAPE.system_tokens]


def test_questions_differ_by_user_and_number() -> None:
    asked = [one for mine in questions(SHAPE).values() for one in mine]
    texts = {tuple(question_of(SHAPE, 0, one)) for one in asked}
    assert len(texts) == len(asked) == SHAPE.requests
    assert {len(text) for text in texts} == {SHAPE.question_tokens}


def test_longest_prompt_counts_all_rounds() -> None:
    assert SHAPE.longest == 10 + 30 + 3 * (5 + 7)


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [("users", 0, "above 0"), ("per_s", 0, "above 0"), ("history_tokens", -1, "0 or more")],
)
def test_impossible_shape_names_the_field(field: str, value: int, least: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}; it must be {least}"):
        replace(SHAPE, **{field: value})
