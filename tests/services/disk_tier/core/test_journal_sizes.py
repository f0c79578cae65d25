"""The journal of several sizes: slabs change their size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_disk_tier.core.journal import (
    Operation,
    Record,
    Replay,
    encode_record,
    encode_records,
    replay,
)
from msgspec.structs import replace

from tests.services.disk_tier.helpers import SLOT_BYTES, block, numbers

LARGE = Layout(SLOT_BYTES, 16, 4)
"""Four slabs of four units."""


def slots(found: Replay) -> dict[int, int]:
    """Place → block."""
    return {place: numbers([found_block])[0] for place, found_block in found.blocks.items()}


def of_units(order: int, place: int, number: int, units: int) -> Record:
    """A committed block that takes so many units."""
    held = replace(block(number), bytes=units * UNIT_BYTES)
    return Record(Operation.COMMITTED, order, place, held)


def test_the_newest_record_in_a_slab_says_of_which_size_it_is() -> None:
    """1. Four small blocks. 2. Their slab is for large ones: what is said of the small is over."""
    records = [*(of_units(n + 1, n, n + 1, 1) for n in range(4)), of_units(9, 2, 9, 2)]
    records.append(of_units(10, 8, 10, 4))
    found = replay(encode_records(records), LARGE)
    assert slots(found) == {2: 9, 8: 10}
    assert found.damaged == 0


@pytest.mark.parametrize(
    ("place", "units"),
    [
        (1, 2),
        (3, 2),
        (1, 4),
        (0, 5),
        (15, 2),
        (16, 1),
        (2**62, 1),
        *((2**63 - n, 1) for n in range(5)),
    ],
)
def test_a_block_that_is_in_no_slot_of_its_size_is_damaged(place: int, units: int) -> None:
    """It begins between two slots, reaches over the end of its slab, or is outside the store."""
    found = replay(encode_record(of_units(1, place, 1, units)), LARGE)
    assert (found.blocks, found.damaged) == ({}, 1)


SIZED = st.tuples(st.integers(0, 3), st.sampled_from((1, 2, 4)), st.integers(0, 3), st.booleans())


@given(st.lists(SIZED, max_size=30))
def test_every_history_of_slabs_comes_back(history: list[tuple[int, int, int, bool]]) -> None:
    """Blocks come to slots of slabs that change their size when they are empty, as a tier does."""
    held: dict[int, tuple[int, int]] = {}
    records: list[Record] = []
    for number, (slab, units, index, stays) in enumerate(history, start=1):
        place = 4 * slab + index * units % 4
        others = {p: one for p, one in held.items() if p // 4 == slab and one[1] != units}
        for gone, (old, size) in {**others, **{p: held[p] for p in held if p == place}}.items():
            record = of_units(len(records) + 1, gone, old, size)
            records.append(replace(record, operation=Operation.REMOVED))
            held.pop(gone)
        if stays:
            records.append(of_units(len(records) + 1, place, number, units))
            held[place] = (number, units)
    found = replay(encode_records(records), LARGE)
    assert slots(found) == {place: number for place, (number, _) in held.items()}
    assert found.damaged == 0
