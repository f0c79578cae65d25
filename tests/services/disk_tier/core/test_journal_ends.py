"""The ends of the journal's numbers: its order of 64 bits, and places beyond 4 GiB."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_disk_tier.core.journal import Operation, Record, encode_records, replay
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_options import StoreOptions

from tests.services.disk_tier.helpers import SLOT_BYTES, block, layout, numbers

SLOTS = 4
HALF = 2**63
LAST = 2**64 - 1
FAR_SLOTS = 2**36
"""256 TiB of 4 KiB: places far beyond 32 bits."""


def committed(order: int, slot: int, number: int) -> Record:
    """Block `number` was written to a slot."""
    return Record(Operation.COMMITTED, order, slot, block(number))


@given(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=12), st.integers(0, 12))
def test_the_newest_record_wins_across_the_sign_bit(places: list[int], before: int) -> None:
    """As in a model by hand, wherever 2^63 lies between the records."""
    records = [
        committed(HALF - before + number, place, number + 1) for number, place in enumerate(places)
    ]
    found = replay(encode_records(records), layout(SLOTS))
    expected = {record.place: record.block for record in records}
    assert dict(found.blocks.items()) == expected
    assert found.next_order == records[-1].order + 1


def test_the_last_number_of_all_is_read_back() -> None:
    found = replay(encode_records([committed(LAST - 1, 0, 1), committed(LAST, 0, 2)]), layout(1))
    assert numbers(found.blocks.values()) == [2]
    assert found.next_order == LAST + 1, "a life that begins here must not write it"


def test_places_beyond_four_gigabytes_come_back() -> None:
    """Goal: no offset has 32 bits, in units or in bytes."""
    places = [2**20 - 1, 2**20, 2**31, 2**32 - 1, 2**32, FAR_SLOTS - 1]
    records = [committed(n, place, n) for n, place in enumerate(places, 1)]
    far = Layout.of(UNIT_BYTES, FAR_SLOTS)
    found = replay(encode_records(records), far)
    assert list(found.blocks) == places
    assert found.damaged == 0


def options(directory: Path) -> StoreOptions:
    """A store of four slots."""
    return StoreOptions(
        directory=directory / "store", capacity_bytes=SLOTS * SLOT_BYTES, direct=False
    )


@pytest.mark.parametrize("order", [HALF - 1, HALF, LAST - 3])
def test_a_store_near_the_end_of_its_order_goes_on(tmp_path: Path, order: int) -> None:
    """1. Two lives have counted far. 2. The next one opens, begins at 1 again where it must, and
    writes. 3. The one after has every block, and the newest of each place."""
    store = Store(options(tmp_path))
    store.create(SLOT_BYTES)
    store.append((committed(order, 0, 1), committed(order + 1, 1, 2)), commit=True)
    store.close()
    again = Store(options(tmp_path))
    found = again.recover()
    assert found is not None
    assert found.next_order == (3 if order >= HALF - 1 else order + 2)
    assert numbers(found.blocks.values()) == [1, 2]
    later = [committed(found.next_order + n, 1, 3 + n) for n in range(4)]
    again.append(tuple(later), commit=True)
    again.close()
    last = Store(options(tmp_path))
    final = last.recover()
    assert final is not None
    assert {place: numbers([one])[0] for place, one in final.blocks.items()} == {0: 1, 1: 6}
    last.close()
