"""Lanes that are served in turn, with small numbers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.runtime.fair_queue import DEBT_MAX, FRESH_MAX, FairQueue


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


def drain_costly(queue: FairQueue[str], costs: dict[str, float]) -> list[str]:
    """Drain a queue, where an item takes the turns that its lane says."""
    taken: list[str] = []
    while queue:
        taken.append(queue.popleft())
        queue.charge(costs[taken[-1][0]])
        queue.check()
    return taken


def test_small_items_of_a_lane_share_a_turn() -> None:
    queue = filled("a1", "a2", "b1", "b2", "b3", "b4")
    assert drain_costly(queue, {"a": 1, "b": 0.4}) == ["a1", "b1", "b2", "b3", "a2", "b4"]


def test_an_item_of_several_turns_costs_its_lane_as_many() -> None:
    queue = filled("a1", "a2", "b1", "b2", "b3", "b4")
    assert drain_costly(queue, {"a": 3, "b": 1}) == ["a1", "b1", "b2", "b3", "a2", "b4"]


def test_debt_has_an_end() -> None:
    """A step that was slow by accident is not held against its lane for long."""
    queue = filled("a1", "a2", *(f"b{number}" for number in range(20)))
    taken = drain_costly(queue, {"a": 1_000, "b": 1})
    assert taken.index("a2") == DEBT_MAX + 2


def test_a_lane_in_debt_that_comes_back_is_not_fresh() -> None:
    """Else one offer at a time would always be first."""
    queue = filled("a1", "b1", "b2", "b3", "b4")
    assert queue.popleft() == "a1"
    queue.charge(3)
    assert [queue.popleft(), queue.popleft()] == ["b1", "b2"]
    queue.append("a2", "a")
    queue.append("c1", "c")
    assert drain_costly(queue, dict.fromkeys("abc", 1)) == ["c1", "b3", "a2", "b4"]


@given(st.lists(st.floats(0.01, 4), min_size=1, max_size=60), st.integers(2, 4))
def test_lanes_that_always_wait_have_equal_shares(costs: list[float], lane_count: int) -> None:
    """Whatever their items cost: the difference is bounded, however long it goes on."""
    lanes = "abcd"[:lane_count]
    queue, spent, each = FairQueue[str](), dict.fromkeys(lanes, 0.0), len(costs)
    for lane in lanes:
        for _ in range(each + 1):
            queue.append(lane, lane)
    for cost in costs:
        lane = queue.popleft()
        queue.charge(cost)
        spent[lane] += cost
        queue.check()
        assert max(spent.values()) - min(spent.values()) <= 4 + 2
