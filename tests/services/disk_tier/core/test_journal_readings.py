"""The two readings of a journal: what the second one finds changed is left out, and counted."""

from __future__ import annotations

import pytest
from kvbm_disk_tier.core.journal import (
    RECORD_BYTES,
    Operation,
    Record,
    encode_records,
    replay_pieces,
)

from tests.services.disk_tier.helpers import block, layout, numbers

SLOTS = 4
ORDER, NAME, PARENT, SPACE = 8, 24, 40, 56


def committed(order: int, slot: int, number: int) -> Record:
    """Block `number` was written to a slot."""
    return Record(Operation.COMMITTED, order, slot, block(number))


def found_after(first: bytes, second: bytes, piece_records: int) -> tuple[dict[int, int], int, int]:
    """Slot → block, damaged records and the next order, of a journal that is read differently."""
    readings: dict[int, int] = {}

    def read(start: int, stop: int) -> bytes:
        readings[start] = readings.get(start, 0) + 1
        return (first if readings[start] == 1 else second)[start:stop]

    found = replay_pieces(read, len(first), layout(SLOTS), piece_records)
    assert set(readings.values()) == {2}
    blocks = {slot: numbers([held])[0] for slot, held in found.blocks.items()}
    return blocks, found.damaged, found.next_order


@pytest.mark.parametrize("piece_records", [1, 2, 9])
@pytest.mark.parametrize("offset", [ORDER, NAME, PARENT, SPACE])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_byte_flipped_before_the_second_reading_costs_its_record_only(
    lost: int, offset: int, piece_records: int
) -> None:
    """Goal: no name, parent or namespace of a changed record comes into the table."""
    journal = encode_records(committed(1 + slot, slot, 1 + slot) for slot in range(3))
    changed = bytearray(journal)
    changed[lost * RECORD_BYTES + offset] ^= 1
    kept = {slot: 1 + slot for slot in range(3) if slot != lost}
    assert found_after(journal, bytes(changed), piece_records) == (kept, 1, 4)
    assert found_after(bytes(changed), journal, piece_records)[:2] == (kept, 1)


def test_a_record_of_another_place_in_the_journal_is_not_taken() -> None:
    """A second reading returns sound records that are not those of the first one."""
    journal = encode_records(committed(1 + slot, slot, 1 + slot) for slot in range(3))
    turned = journal[RECORD_BYTES:] + journal[:RECORD_BYTES]
    assert found_after(journal, turned, 9) == ({}, 3, 4)


def test_a_block_whose_newer_record_changed_is_where_it_was_before() -> None:
    """Block 1 moves from slot 0 to slot 1, and the second reading loses that."""
    journal = encode_records([committed(1, 0, 1), committed(2, 1, 1)])
    assert found_after(journal, journal, 9) == ({1: 1}, 0, 3)
    changed = bytearray(journal)
    changed[RECORD_BYTES + NAME] ^= 1
    assert found_after(journal, bytes(changed), 9) == ({0: 1}, 1, 3)
