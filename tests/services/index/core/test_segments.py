"""A listing is a dict, however large."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_index.core import segments
from kvbm_index.core.segments import BlockLookup

STEPS = st.lists(st.tuples(st.sampled_from("sd"), st.lists(st.integers(0, 400), max_size=40)))


def named(numbers: list[int]) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_it_is_a_dict_before_and_after_it_was_divided(steps: list[tuple[str, list[int]]]) -> None:
    large_before, segments.WHOLE_MAX = segments.WHOLE_MAX, 50
    try:
        found: BlockLookup[int] = BlockLookup()
        truth: dict[bytes, int] = {}
        for value, (verb, numbers) in enumerate(steps):
            if verb == "s":
                found.set(named(numbers), value)
                truth.update(dict.fromkeys(named(numbers), value))
            else:
                found.drop(named(numbers))
                for block in named(numbers):
                    truth.pop(block, None)
            assert len(found) == len(truth)
            assert {block: found.get(block) for block in found} == truth
            asked = set(named([0, 1, 2, 399]))
            assert found.among(asked) == truth.keys() & asked
            assert all((block in found) == (block in truth) for block in named([0, 1, 399]))
    finally:
        segments.WHOLE_MAX = large_before


def test_a_large_one_is_divided_and_has_everything() -> None:
    found: BlockLookup[str] = BlockLookup()
    blocks = named(list(range(segments.WHOLE_MAX + 1)))
    found.set(blocks[:-1], "first")
    found.set(blocks[-1:], "last")
    assert len(found) == len(blocks)
    assert [found.get(block) for block in blocks] == ["first"] * (len(blocks) - 1) + ["last"]


def test_it_is_shed_part_by_part() -> None:
    found: BlockLookup[str] = BlockLookup()
    found.set(named(list(range(segments.WHOLE_MAX + 1))), "x")
    shed = []
    while found:
        shed.append(found.shed())
    assert sum(shed) == segments.WHOLE_MAX + 1
    assert max(shed) < 200
    assert not found.shed()
