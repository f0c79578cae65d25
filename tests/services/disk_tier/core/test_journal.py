"""The journal: what is written comes back, and nothing that was not; torn, flipped, reordered."""

from __future__ import annotations

import os
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.checksum import block_checksum, pack_sums
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.parts import Grid
from kvbm_common.tier.slots import Block
from kvbm_disk_tier.core.journal import (
    RECORD_BYTES,
    Operation,
    Record,
    Replay,
    encode_record,
    encode_records,
    replay,
    replay_pieces,
)
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_options import StoreError, StoreOptions
from kvbm_disk_tier.shell.store_thread import StoreThread
from msgspec.structs import replace

from tests.services.disk_tier.helpers import SLOT_BYTES, block, layout, numbers

SLOTS = 4


BODY = struct.Struct("<4sB3xQ4xI16s16s32sQH6xQ8x")
"""A record without its checksum, as the journal's text describes it."""


def decode_record(data: bytes) -> Record | None:
    """A record read by the book, or None when its checksum, magic or operation is wrong."""
    body, check = data[:120], data[120:]
    magic, operation, order, size, name, parent, space, checksum, parts, place = BODY.unpack(body)
    sound = struct.unpack("<Q", check)[0] == block_checksum(body) and magic == b"KVJ3"
    if not sound or operation not in tuple(Operation):
        return None
    held = Block(SequenceHash(name), SequenceHash(parent), space, checksum, size, parts)
    return Record(Operation(operation), order, place, held)


def read_one_by_one(data: bytes) -> dict[int, Block]:
    """What a journal says, record by record."""
    newest: dict[int, Record] = {}
    for start in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        record = decode_record(data[start : start + RECORD_BYTES])
        if record is None or record.place >= SLOTS or record.block.bytes > SLOT_BYTES:
            continue
        if record.place not in newest or newest[record.place].order <= record.order:
            newest[record.place] = record
    live: dict[bytes, Record] = {}
    for record in sorted(newest.values(), key=lambda record: record.order):
        if record.operation is Operation.COMMITTED:
            live[record.block.hash] = record
    return {record.place: record.block for record in live.values()}


def committed(order: int, slot: int, number: int) -> Record:
    """Block `number`, which has one part or, if odd, two, was written to a slot."""
    return Record(Operation.COMMITTED, order, slot, replace(block(number), parts=1 + number % 2))


def removed(order: int, slot: int, number: int) -> Record:
    """… and was evicted."""
    return Record(Operation.REMOVED, order, slot, block(number))


def replayed(data: bytes) -> Replay:
    """What a restart makes of a journal, whether it is read at once or in pieces."""
    found = replay(data, layout(SLOTS))
    for count in (1, 3):
        pieces = replay_pieces(
            lambda start, stop: data[start:stop], len(data), layout(SLOTS), piece_records=count
        )
        assert (pieces, [*pieces.blocks]) == (found, [*found.blocks])
    return found


def slots(found: Replay) -> dict[int, int]:
    """Slot → block."""
    return {slot: numbers([found_block])[0] for slot, found_block in found.blocks.items()}


@st.composite
def histories(draw: st.DrawFn) -> list[Record]:
    """Records as a core makes them: a slot is emptied before it is used again."""
    held: dict[int, int] = {}
    records: list[Record] = []
    for order in range(1, draw(st.integers(0, 14)) + 1):
        slot = draw(st.integers(0, SLOTS - 1))
        if slot in held:
            records.append(removed(order, slot, held.pop(slot)))
        else:
            free = [number for number in range(1, 8) if number not in held.values()]
            held[slot] = draw(st.sampled_from(free))
            records.append(committed(order, slot, held[slot]))
    return records


def truth(records: list[Record]) -> dict[int, int]:
    """The live block of each slot after these records."""
    held: dict[int, int] = {}
    for record in records:
        if record.operation is Operation.COMMITTED:
            held[record.place] = numbers([record.block])[0]
        else:
            held.pop(record.place, None)
    return held


def check_nothing_invented(found: Replay, records: list[Record]) -> None:
    """Every block that comes back was once committed in that slot, to the last field.

    Its bytes may be gone since, if the newer record was damaged: then the checksum that came back
    with it tells on the first read. A block is in one slot only.
    """
    once = {(r.place, r.block) for r in records if r.operation is Operation.COMMITTED}
    assert set(found.blocks.items()) <= once
    names = [found_block.hash for found_block in found.blocks.values()]
    assert len(names) == len(set(names))


def test_a_record_is_128_bytes_and_comes_back() -> None:
    """Every field at its limit."""
    largest = Record(Operation.REMOVED, 2**64 - 1, 2**64 - 1, block(255))
    data = encode_record(largest)
    assert len(data) == RECORD_BYTES == 128
    assert decode_record(data) == largest


def test_an_empty_journal_is_an_empty_store() -> None:
    """The first start."""
    assert replayed(b"") == Replay(blocks={}, next_order=1, records=0, damaged=0)


def test_the_newest_record_of_a_slot_counts_and_of_a_block() -> None:
    """Slot 0 is used twice; block 3 moves from slot 1 to slot 2."""
    records = [committed(1, 0, 1), committed(2, 1, 3), removed(3, 0, 1), committed(4, 0, 2),
               committed(5, 2, 3)]  # fmt: skip
    found = replayed(encode_records(records))
    assert slots(found) == {0: 2, 2: 3}
    assert list(found.blocks) == [0, 2], "the oldest is first"
    assert found.next_order == 6


@pytest.mark.parametrize("record", [committed(1, SLOTS, 1), Record(
    Operation.COMMITTED, 1, 0, type(block(1))(block(1).hash, block(1).parent, block(1).namespace,
                                              1, SLOT_BYTES + 1))])  # fmt: skip
def test_a_record_that_this_store_cannot_hold_is_damaged(record: Record) -> None:
    """A slot beyond the end, or a block larger than a slab."""
    found = replayed(encode_record(record))
    assert (found.blocks, found.damaged) == ({}, 1)


@pytest.mark.parametrize("parts", [0, 3])
def test_a_record_of_parts_that_cannot_be_is_damaged(parts: int) -> None:
    """No part, or parts that are not of equal size: 64 bytes in three."""
    found = replayed(
        encode_record(Record(Operation.COMMITTED, 1, 0, replace(block(1), parts=parts)))
    )
    assert (found.blocks, found.damaged) == ({}, 1)


def test_a_journal_says_how_a_block_is_cut() -> None:
    """Their checksums it does not say: the bytes do, when they are read."""
    for grid in (Grid(heads=2), Grid(ranges=2, layers=2, heads=4)):
        parts = grid.code.to_bytes(2, "little") + pack_sums(range(grid.count))
        parted = replace(block(1), parts=parts)
        found = replayed(encode_record(Record(Operation.COMMITTED, 1, 2, parted)))
        assert found.blocks[2] == replace(block(1), parts=grid.code)
        assert (found.blocks[2].grid, found.blocks[2].part_sums) == (grid, b"")


@pytest.mark.parametrize("offset", [0, 4])
def test_another_format_or_operation_is_not_misread_even_with_a_good_checksum(offset: int) -> None:
    """A journal of an earlier version, `KVJ1`, or an operation that we do not know."""
    data = bytearray(encode_record(committed(1, 0, 1)))
    data[offset : offset + 4] = b"KVJ1" if offset == 0 else b"\x07\0\0\0"
    body = bytes(data[: RECORD_BYTES - 8])
    sealed = body + struct.pack("<Q", block_checksum(body))
    assert decode_record(sealed) is None
    found = replayed(sealed + encode_record(committed(2, 1, 2)))
    assert (slots(found), found.damaged) == ({1: 2}, 1)


@given(histories())
def test_a_whole_journal_comes_back_whole(records: list[Record]) -> None:
    """The restart after an orderly end."""
    found = replayed(encode_records(records))
    assert slots(found) == truth(records)
    assert (found.records, found.damaged) == (len(records), 0)
    assert found.next_order == max((record.order for record in records), default=0) + 1


@given(histories(), st.data())
def test_everything_before_a_torn_tail_comes_back(
    records: list[Record], data: st.DataObject
) -> None:
    """The power fails in mid-append: exactly the whole records count."""
    whole = encode_records(records)
    size = data.draw(st.integers(0, len(whole)))
    found = replayed(whole[:size])
    assert slots(found) == truth(records[: size // RECORD_BYTES])
    assert found.damaged == (1 if size % RECORD_BYTES else 0)


@given(histories(), st.data())
def test_a_flipped_bit_costs_its_record_only(records: list[Record], data: st.DataObject) -> None:
    """… and is never taken for another record."""
    damaged = bytearray(encode_records(records))
    if not damaged:
        return
    at = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[at // 8] ^= 1 << at % 8
    lost = at // 8 // RECORD_BYTES
    found = replayed(bytes(damaged))
    kept = records[:lost] + records[lost + 1 :]
    assert found.damaged == 1
    assert found == Replay(replayed(encode_records(kept)).blocks, found.next_order, len(records), 1)
    check_nothing_invented(found, records)


@given(histories(), st.data())
def test_garbage_anywhere_invents_nothing(records: list[Record], data: st.DataObject) -> None:
    """A page of the file came from elsewhere, or the tail is noise of any length."""
    damaged = bytearray(encode_records(records))
    start = data.draw(st.integers(0, len(damaged)))
    noise = data.draw(st.binary(max_size=300))
    damaged[start : start + len(noise)] = noise
    found = replayed(bytes(damaged))
    check_nothing_invented(found, records)
    assert found.blocks == read_one_by_one(bytes(damaged))


@given(histories(), st.data())
def test_records_in_another_order_say_the_same(records: list[Record], data: st.DataObject) -> None:
    """Their place in the file means nothing, nor does a repetition: they are numbered."""
    shuffled = data.draw(st.permutations(records + records[:3]))
    found = replayed(encode_records(shuffled))
    assert slots(found) == truth(records)


# --- in the store's file --------------------------------------------------------------------------


def options(directory: Path, **changes: object) -> StoreOptions:
    """A store of four slots of 4 KiB, through the page cache."""
    values: dict[str, object] = {"capacity_bytes": SLOTS * 4096, "direct": False} | changes
    return StoreOptions(directory=directory / "store", **values)  # type: ignore[arg-type]


def test_what_is_appended_after_a_torn_record_is_in_step(tmp_path: Path) -> None:
    """Half a record is cut off at the restart, or all later ones would be unreadable."""
    store = Store(options(tmp_path))
    store.create(4096)
    store.append((committed(1, 0, 1), committed(2, 1, 2)), commit=True)
    store.close()
    journal = tmp_path / "store/journal"
    journal.write_bytes(journal.read_bytes()[:-40])
    again = Store(options(tmp_path))
    found = again.recover()
    assert found is not None
    assert (slots(found), found.damaged) == ({0: 1}, 1)
    again.append((committed(3, 2, 3),), commit=True)
    again.close()
    last = Store(options(tmp_path))
    found = last.recover()
    assert found is not None
    assert (slots(found), found.damaged) == ({0: 1, 2: 3}, 0)
    last.close()


def test_a_journal_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """It may have many more records than the store has slots."""
    store = Store(options(tmp_path))
    store.create(4096)
    store.close()
    records = [committed(1, 0, 1), removed(2, 0, 1), committed(3, 1, 2)]
    journal = encode_records(records) * 20_000 + encode_record(committed(4, 2, 3))
    (tmp_path / "store/journal").write_bytes(journal)
    again = Store(options(tmp_path))
    tracemalloc.start()
    found = again.recover()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    again.close()
    assert found is not None
    assert (slots(found), found.records) == ({1: 2, 2: 3}, 60_001)
    assert most < len(journal), f"{most} bytes for a journal of {len(journal)}"


def test_a_rewritten_journal_replaces_the_old_one_and_is_appended_to(tmp_path: Path) -> None:
    """Compaction."""
    store = Store(options(tmp_path))
    store.create(4096)
    store.append((committed(1, 0, 1), removed(2, 0, 1), committed(3, 0, 2)), commit=True)
    store.rewrite((committed(4, 0, 2),))
    store.append((committed(5, 1, 3),), commit=True)
    store.close()
    assert (tmp_path / "store/journal").stat().st_size == 2 * RECORD_BYTES
    again = Store(options(tmp_path))
    found = again.recover()
    assert found is not None
    assert slots(found) == {0: 2, 1: 3}
    again.close()


@pytest.mark.parametrize(
    ("header", "changes", "reason"),
    [
        (b'{"format":1,"slot_bytes":4096,"slot_count":4}', {}, "format 1"),
        (b'{"format":4,"slot_bytes":4096,"slot_count":4}', {}, "format 4"),
        (b'{"format":2,"slot_bytes":8192,"slot_count":2}', {}, "too short"),
        (b'{"format":2,"slot_bytes":0,"slot_count":4}', {}, "slot_bytes"),
        (b'{"format":3,"slot_bytes":4092,"slot_count":4}', {}, "slots of 4092 bytes"),
        (
            b'{"format":3,"slot_bytes":4096,"slot_count":4,"slab_slots":1000000000000000000}',
            {},
            "slabs of 1000000000000000000 slots",
        ),
        (b'{"format":3,"slot_bytes":4096,"slot_count":4000000000000000000}', {}, "too short"),
        (b"\xff", {}, "store"),
        (b'{"format":2,"slot_bytes":4096,"slot_count":4}', {"capacity_bytes": 1}, "not one block"),
    ],
)
def test_a_store_of_another_kind_is_refused_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, header: bytes, changes: dict[str, object],
    reason: str,
) -> None:  # fmt: skip
    """Another version, another size, damage: its journal is not read, its files are left alone."""
    store = Store(options(tmp_path))
    store.create(4096)
    store.append((committed(1, 0, 1),), commit=True)
    store.close()
    (tmp_path / "store/header").write_bytes(header)
    if b"8192" in header:
        os.truncate(tmp_path / "store/slots", 8192)
    again = Store(options(tmp_path, **changes))
    assert again.recover() is None
    assert reason in caplog.text
    assert (tmp_path / "store/journal").stat().st_size == RECORD_BYTES
    again.close()


def test_a_number_of_blocks_wins_over_the_size(tmp_path: Path) -> None:
    """DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS, also without a size and beyond it."""
    for capacity_bytes in (0, 4096, 1 << 30):
        store = Store(options(tmp_path, capacity_bytes=capacity_bytes, slot_count=3))
        store.create(4096)
        assert store.header is not None
        assert store.header.slot_count == 3
        store.close()


def test_a_store_has_one_owner(tmp_path: Path) -> None:
    """The second is refused, with the directory and what to change."""
    store, other = Store(options(tmp_path)), Store(options(tmp_path))
    store.acquire()
    with pytest.raises(
        StoreError, match=f"{tmp_path}/store is used by another disk tier.*DYN_KVBM"
    ):
        other.acquire()
    store.close()
    other.acquire()
    other.close()


def test_what_waits_together_is_synchronised_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is held up while five appends and a rewrite gather: two groups, one order."""
    store = Store(options(tmp_path))
    store.create(4096)
    thread = StoreThread(store)
    go_on = threading.Event()
    thread.call(go_on.wait)
    synchronised: list[int] = []
    monkeypatch.setattr("os.fdatasync", synchronised.append)
    first = [thread.append((committed(1 + i, i, 1 + i),), write=i) for i in range(3)]
    rewritten = thread.call(lambda: store.rewrite((committed(4, 0, 1),)))
    second = [thread.append((committed(5 + i, 1 + i, 5 + i),), write=i) for i in range(2)]
    go_on.set()
    rewritten.result(5.0)
    told = [done.result(5.0) for done in (*first, *second)]
    assert told == [(0, 1, 2), (), (), (0, 1), ()]
    thread.close()
    # Data and journal for each of the two groups, and the new journal in between.
    assert len(synchronised) == 5
    monkeypatch.undo()
    store.close()
    again = Store(options(tmp_path))
    found = again.recover()
    assert found is not None
    assert slots(found) == {0: 1, 1: 5, 2: 6}
    again.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty one."""
    made = Store(options(tmp_path))
    made.create(4096)
    yield made
    made.close()


def test_data_and_journal_are_synchronised_at_the_same_time(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other to be under way; the record is written by then."""
    both = threading.Barrier(2, timeout=5.0)
    sizes: list[int] = []

    def synchronise(_: int) -> None:
        both.wait()
        sizes.append((tmp_path / "store" / "journal").stat().st_size)

    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", synchronise)
        store.append((committed(1, 0, 1),), commit=True)
    assert sizes == [RECORD_BYTES] * 2


def test_data_that_cannot_be_synchronised_is_not_committed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronise(fd: int) -> None:
        if fd == store.fd:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", synchronise)
        with pytest.raises(OSError, match="Input/output"):
            store.append((committed(1, 0, 1),), commit=True)


def test_a_group_that_fails_fails_for_each_and_leaves_no_torn_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full in mid-record; what comes later is in step."""
    store = Store(options(tmp_path))
    store.create(4096)
    thread = StoreThread(store)
    go_on = threading.Event()
    thread.call(go_on.wait)
    write = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if len(data) < RECORD_BYTES:
            raise OSError(28, "No space left on device")
        return write(fd, bytes(data)[: RECORD_BYTES + 40], offset)

    monkeypatch.setattr("os.pwrite", full)
    failed = [thread.append((committed(1 + i, i, 1 + i),), write=i) for i in range(2)]
    go_on.set()
    for done in failed:
        with pytest.raises(OSError, match="No space"):
            done.result(5.0)
    monkeypatch.undo()
    thread.append((committed(3, 3, 3),), write=3).result(5.0)
    thread.close()
    store.close()
    again = Store(options(tmp_path))
    found = again.recover()
    assert found is not None
    assert (slots(found), found.damaged) == ({3: 3}, 0)
    again.close()
