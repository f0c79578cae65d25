"""The calendar: which running requests a step looks at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_connectors.vllm.calendar import GATHER_REQUESTS, GATHER_STEPS, Calendar

REQUESTS = ("a", "b", "c")
scheduled_steps = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(REQUESTS), st.integers(1, 3)),
        st.sampled_from([0, 1, 2, 5]),
        st.sampled_from(["", *REQUESTS]),
    ),
    max_size=30,
)
"""Of each step: the tokens of its requests, in how many steps those that it looks at are due (0: as
soon as can be), and a request that is forgotten before it."""


@given(scheduled_steps)
def test_a_step_looks_at_what_is_due_and_at_several_tokens(
    steps: list[tuple[dict[str, int], int, str]],
) -> None:
    """Goal: by brute force, each step looks at the requests that are due, each once."""
    calendar, due = Calendar(), dict.fromkeys(REQUESTS, 0)
    for name in REQUESTS:
        calendar.look_soon(name)
    for now, (scheduled, wait, forgotten) in enumerate(steps, 1):
        calendar.forget(forgotten)
        due.pop(forgotten, None)
        seen = calendar.begin_step(scheduled)
        wanted = {
            name for name, tokens in scheduled.items() if tokens > 1 or due.get(name, 99) <= now
        }
        assert sorted(seen) == sorted(wanted)
        for name in seen:
            due[name] = now + wait
            if wait:
                calendar.look_in(name, wait)
            else:
                calendar.look_soon(name)


def test_a_look_lies_ahead() -> None:
    with pytest.raises(AssertionError, match="0 steps from now"):
        Calendar().look_in("a", 0)


def test_a_request_is_looked_at_in_its_step_alone() -> None:
    calendar = Calendar()
    calendar.look_soon("a")
    assert calendar.begin_step({"a": 1, "b": 1}) == ["a"]
    calendar.look_in("a", 2)
    assert calendar.begin_step({"a": 1, "b": 1}) == []
    assert calendar.begin_step({"a": 1, "b": 1}) == ["a"]
    assert calendar.begin_step({"a": 1, "b": 1}) == []


def test_a_request_that_its_step_leaves_out_is_looked_at_later() -> None:
    calendar = Calendar()
    calendar.look_in("a", 1)
    assert calendar.begin_step({"b": 1}) == []
    assert calendar.begin_step({"a": 1}) == ["a"]


def test_a_request_with_several_tokens_is_looked_at_at_once() -> None:
    """Goal: an entry of before does not bring it twice."""
    calendar = Calendar()
    calendar.look_in("a", 2)
    assert calendar.begin_step({"a": 5}) == ["a"]
    calendar.look_in("a", 3)
    assert calendar.begin_step({"a": 1}) == []
    assert calendar.begin_step({"a": 1}) == []
    assert calendar.begin_step({"a": 1}) == ["a"]


def test_a_request_that_is_forgotten_does_not_come_back() -> None:
    calendar = Calendar()
    calendar.look_soon("a")
    calendar.look_in("b", 1)
    calendar.forget("a")
    calendar.forget("b")
    assert calendar.begin_step({"a": 1, "b": 1}) == []


def test_many_that_wait_do_not_hide_the_ones_that_run() -> None:
    calendar = Calendar()
    for number in range(10):
        calendar.look_soon(str(number))
    assert calendar.begin_step({"9": 1, "x": 1}) == ["9"]
    assert calendar.begin_step({"9": 1, "3": 1}) == ["3"]


def test_an_entry_may_count_on_steps_of_several_tokens() -> None:
    """1. An entry counts on three tokens a step: steps of three do not look. 2. One of four does.
    3. The next entry counts on one."""
    calendar = Calendar()
    calendar.look_in("a", 5, tokens=3)
    assert calendar.begin_step({"a": 3, "b": 1}) == []
    assert calendar.begin_step({"a": 4, "b": 1}) == ["a"]
    calendar.look_in("a", 5)
    assert calendar.begin_step({"a": 3}) == ["a"]
    calendar.look_in("a", 2, tokens=3)
    calendar.forget("a")
    assert calendar.begin_step({"a": 3}) == ["a"]


def test_many_requests_that_began_together_are_looked_at_in_turn() -> None:
    """Goal: no step has to look at all of them, and none waits longer than it may.

    1. All are due in the same step. 2. Each is looked at once, in a step that gathers some; the
    steps between these look at none. 3. So it is the next time.
    """
    calendar = Calendar(soon_steps=32, wait_steps=128)
    names = [str(number) for number in range(256)]
    for name in names:
        calendar.look_in(name, 128)
    last = dict.fromkeys(names, 0)
    looks: list[int] = []
    for now in range(1, 3 * 256):
        seen = calendar.begin_step(dict.fromkeys(names, 1))
        looks.append(len(seen))
        for name in seen:
            assert now - last[name] <= 128 + 128, f"{name} waits for too long"
            last[name] = now
            calendar.look_in(name, 128)
    share = len(names) * GATHER_STEPS // 128 + 1
    assert max(looks[128:]) <= share
    assert max(looks[:128]) <= GATHER_REQUESTS + share, "the first come before there are many"
    assert sum(not count for count in looks) >= len(looks) * (GATHER_STEPS - 1) // GATHER_STEPS


def test_what_is_due_soon_or_may_not_wait_is_looked_at_in_time() -> None:
    """1. Many are due within the steps in which nothing waits. 2. Nothing may wait at all."""
    names = [str(number) for number in range(2 * GATHER_REQUESTS)]
    for calendar, steps in ((Calendar(soon_steps=8, wait_steps=64), 8), (Calendar(), 9)):
        for name in names:
            calendar.look_in(name, steps)
        seen = [calendar.begin_step(dict.fromkeys(names, 1)) for _ in range(steps)]
        assert seen == [[]] * (steps - 1) + [names]
