"""A table of blocks is a dict, however large."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.tier.block_lookup import PARTS, WHOLE_MAX, BlockLookup

STEPS = st.lists(st.tuples(st.sampled_from("sed"), st.lists(st.integers(0, 400), max_size=40)))


def named(numbers: list[int]) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


@settings(max_examples=100, deadline=None)
@given(STEPS, st.sampled_from([0, 50]))
def test_it_is_a_dict_before_and_after_it_was_divided(
    steps: list[tuple[str, list[int]]], whole_max: int
) -> None:
    found: BlockLookup[int] = BlockLookup(whole_max)
    truth: dict[bytes, int] = {}
    for value, (verb, numbers) in enumerate(steps):
        if verb == "s":
            found.set(named(numbers), value)
            truth.update(dict.fromkeys(named(numbers), value))
        elif verb == "e":
            each = range(value, value + len(numbers))
            found.set_each(named(numbers), each)
            truth.update(zip(named(numbers), each, strict=True))
        else:
            found.drop(named(numbers))
            for block in named(numbers):
                truth.pop(block, None)
        assert len(found) == len(truth)
        assert {block: found.get(block) for block in found} == truth
        known = [truth.get(block) for block in named(numbers)]
        assert found.get_all(named(numbers)) == known
        missing = known.index(None) if None in known else len(known)
        assert found.leading(named(numbers)) == known[:missing]
        asked = set(named([0, 1, 2, 399]))
        assert found.among(asked) == truth.keys() & asked
        assert found.has_none_of(asked) == truth.keys().isdisjoint(asked)
        assert all((block in found) == (block in truth) for block in named([0, 1, 399]))


def test_a_large_one_is_divided_and_has_everything() -> None:
    found: BlockLookup[str] = BlockLookup()
    blocks = named(list(range(WHOLE_MAX + 1)))
    found.set(blocks[:-1], "first")
    found.set(blocks[-1:], "last")
    assert len(found) == len(blocks)
    assert [found.get(block) for block in blocks] == ["first"] * (len(blocks) - 1) + ["last"]


def test_it_is_shed_part_by_part() -> None:
    found: BlockLookup[str] = BlockLookup()
    found.set(named(list(range(WHOLE_MAX + 1))), "x")
    shed = []
    while found:
        shed.append(found.shed())
    assert sum(shed) == WHOLE_MAX + 1
    assert max(shed) < 200
    assert not found.shed()


def test_it_is_sifted_part_by_part() -> None:
    found: BlockLookup[int] = BlockLookup(0)
    numbers = list(range(1_000))
    for number in numbers:
        found.set(named([number]), number)
    gone: set[bytes] = set()
    looked_at = 0
    for part in range(PARTS):
        assert {block[-1] for block in found.part(part)} == {part}
        dropped, count = found.sift(part, lambda number: number % 3 > 0)
        assert count <= 4
        assert not any(block in found for block in dropped)
        looked_at += count
        gone |= dropped.keys()
    assert looked_at == len(numbers)
    assert gone == set(named(numbers[::3]))
    assert len(found) == len(numbers) - len(gone)
