"""Lanes that are served in turn, with small numbers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.runtime.fair_queue import FRESH_MAX, FairQueue


def filled(*items: str) -> FairQueue[str]:
    """Return a queue of these; an item's first letter is its lane."""
    queue = FairQueue[str]()
    for item in items:
        queue.append(item, item[0])
    return queue


def drain(queue: FairQueue[str]) -> list[str]:
    return [queue.popleft() for _ in range(len(queue))]


def test_one_lane_keeps_its_order() -> None:
    assert drain(filled("a1", "a2", "a3")) == ["a1", "a2", "a3"]


def test_lanes_take_turns() -> None:
    assert drain(filled("a1", "a2", "a3", "b1", "b2")) == ["a1", "b1", "a2", "b2", "a3"]


def test_fresh_lane_goes_before_those_that_wait_on() -> None:
    queue = filled("a1", "a2", "b1", "b2")
    assert [queue.popleft(), queue.popleft()] == ["a1", "b1"]
    queue.append("c1", "c")
    assert drain(queue) == ["c1", "a2", "b2"]


def test_lane_that_comes_back_at_once_is_not_fresh() -> None:
    """A flood of single items gets no more than its turn."""
    queue = filled("a1", "b1", "b2")
    assert queue.popleft() == "a1"
    queue.append("a2", "a")
    assert drain(queue) == ["b1", "a2", "b2"]


def test_empty_lanes_are_forgotten() -> None:
    """Memory follows what waits: names of lanes come from outside."""
    queue = FairQueue[int]()
    for number in range(100):
        queue.append(number, number)
        assert queue.popleft() == number
    queue.check()
    assert queue.lanes == 0
    assert queue.depth(3) == 0


def test_new_lanes_without_end_do_not_starve_the_others() -> None:
    """And what they leave is forgotten while others wait on."""
    queue = filled("a1", "a2", "a3")
    assert queue.popleft() == "a1"
    taken: list[str] = []
    for number in range(3 * FRESH_MAX):
        queue.append(f"new {number}", number)
        taken.append(queue.popleft())
        queue.check()
    assert taken.index("a2") <= FRESH_MAX
    assert taken.index("a3") <= 2 * FRESH_MAX + 1
    assert queue.lanes <= 2 * (FRESH_MAX + 1)


@given(st.lists(st.one_of(st.none(), st.sampled_from("abcd")), max_size=60))
def test_every_item_waits_for_one_of_each_other_lane(steps: list[str | None]) -> None:
    """None takes an item; order within a lane holds, and none overtakes twice."""
    queue, number = FairQueue[str](), Counter[str]()
    passed: dict[str, Counter[str]] = {}
    heads: dict[str, list[str]] = {}
    for step in steps:
        if step is None:
            if not queue:
                continue
            item = queue.popleft()
            assert heads[item[0]].pop(0) == item
            for lane, waiting in heads.items():
                if waiting and lane != item[0]:
                    passed.setdefault(waiting[0], Counter())[item[0]] += 1
                    assert passed[waiting[0]][item[0]] <= 2, f"{item} overtakes {waiting[0]}"
        else:
            number[step] += 1
            item = f"{step}{number[step]}"
            queue.append(item, step)
            heads.setdefault(step, []).append(item)
        queue.check()
        assert len(queue) == sum(map(len, heads.values()))
