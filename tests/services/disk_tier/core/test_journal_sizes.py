"""The journal of several sizes: slabs change their size, and releases before knew one size."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.checksum import block_checksum
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_disk_tier.core.journal import (
    Operation,
    Record,
    Replay,
    encode_record,
    encode_records,
    replay,
)
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_header import FORMAT, Header
from kvbm_disk_tier.shell.store_options import StoreOptions
from msgspec.structs import replace

from tests.services.disk_tier.helpers import SLOT_BYTES, block, numbers

LARGE = Layout(SLOT_BYTES, 16, 4)
"""Four slabs of four units."""


def slots(found: Replay) -> dict[int, int]:
    """Place → block."""
    return {place: numbers([found_block])[0] for place, found_block in found.blocks.items()}


def of_slot(order: int, slot: int, number: int) -> bytes:
    """A committed block as releases before have recorded it, by the number of its slot."""
    held = block(number)
    body = struct.pack(
        "<4sB3xQII16s16s32sQH22x", b"KVJ2", 1, order, slot, held.bytes, held.hash, held.parent,
        held.namespace, held.checksum, held.part_count,
    )  # fmt: skip
    return body + struct.pack("<Q", block_checksum(body))


def of_units(order: int, place: int, number: int, units: int) -> Record:
    """A committed block that takes so many units."""
    held = replace(block(number), bytes=units * UNIT_BYTES)
    return Record(Operation.COMMITTED, order, place, held)


def test_a_journal_of_a_release_before_is_read_by_its_slots() -> None:
    """Slots of two units: slot 3 begins at unit 6. New records follow old ones in one file."""
    two_units = Layout(2 * UNIT_BYTES, 8, 2)
    old = [of_slot(1, 3, 1), of_slot(2, 7, 2)]
    held = replace(block(1), bytes=2 * UNIT_BYTES)
    first = replace(held, hash=block(3).hash)
    data = b"".join(_resized(one, 2 * UNIT_BYTES) for one in old)
    data += encode_record(Record(Operation.COMMITTED, 3, 6, first))
    found = replay(data, two_units)
    assert (found.damaged, sorted(found.blocks)) == (0, [6, 14])
    assert found.blocks[6] == first, "the newer record has the place"
    assert found.blocks[14].hash == block(2).hash


def _resized(data: bytes, block_bytes: int) -> bytes:
    """The same record of a larger block."""
    body = data[:20] + struct.pack("<I", block_bytes) + data[24:120]
    return body + struct.pack("<Q", block_checksum(body))


def test_an_old_record_of_another_size_is_damaged() -> None:
    """Its store had slots of one size: a block of two units was in none of them."""
    assert replay(_resized(of_slot(1, 3, 1), 2 * UNIT_BYTES), LARGE).damaged == 1


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


def test_a_store_of_a_release_before_is_kept(tmp_path: Path) -> None:
    """1. Two of its blocks are found where they were. 2. It has this release's format now."""
    options = StoreOptions(tmp_path, capacity_bytes=8 * SLOT_BYTES)
    with_blocks(tmp_path, [of_slot(1, 3, 1), of_slot(2, 7, 2)])
    store = Store(options)
    try:
        found = store.recover()
    finally:
        store.close()
    assert found is not None
    assert (slots(found), found.damaged) == ({3: 1, 7: 2}, 0)
    header = msgspec.json.decode((tmp_path / "header").read_bytes(), type=Header)
    assert (header.format, header.slab_slots) == (FORMAT, header.layout.slab_slots)


def with_blocks(directory: Path, records: list[bytes]) -> None:
    """A store of format 2 as a release before has left it."""
    (directory / "header").write_text('{"format":2,"slot_bytes":4096,"slot_count":8}')
    (directory / "journal").write_bytes(b"".join(records))
    (directory / "slots").write_bytes(bytes(8 * SLOT_BYTES))
