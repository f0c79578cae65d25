"""The journal: where in the store which block is, as a file of fixed-size records.

A record is 128 bytes, little-endian:

    offset  size  field
    0       4     magic "KVJ3"
    4       1     operation: 1 committed, 2 removed
    5       3     zero
    8       8     order: counts up over the life of the store
    16      4     zero
    20      4     bytes of the block
    24      16    sequence hash
    40      16    parent hash
    56      32    namespace digest
    88      8     checksum of the block
    96      2     how the block is cut into parts: the code of its grid
    98      6     zero
    104     8     place: where the block begins in the store, in units of 4 KiB
    112     8     zero
    120     8     xxh3-64 of bytes 0..119

The size class of a block follows from its bytes. A record with the magic "KVJ2" is of a release
whose stores had slots of one size: it has the number of the slot at 16 and nothing behind 98.

Replay takes the newest record of each place. The newest record in a slab says which class the slab
has: what older ones say of blocks of another class there is over. A torn or flipped record fails
its checksum and is skipped; what it said is then unknown, which is safe: an older record may name a
block whose bytes are gone, and the checksum of the block catches that on its first read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import msgspec
import numpy as np
from kvbm_common.checksum import block_checksum, record_checksums
from kvbm_common.tier.block_columns import COLUMNS, BlockColumns, Piece
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_common.tier.parts import are_divisible
from numpy.typing import NDArray

RECORD_BYTES = 128
_MAGIC = b"KVJ3"
_MAGIC_OF_SLOTS = b"KVJ2"
_BODY = struct.Struct("<4sB3xQ4xI16s16s32sQH6xQ8x")
_CHECK = struct.Struct("<Q")
assert _BODY.size + _CHECK.size == RECORD_BYTES
_RECORD = np.dtype(
    {
        "names": ["magic", "operation", "order", "number", *COLUMNS, "check"],
        "formats": ["S4", "u1", "<u8", "<u4", *COLUMNS.values(), "<u8"],
        "offsets": [0, 4, 8, 16, 104, 20, 24, 40, 56, 88, 96, 120],
        "itemsize": RECORD_BYTES,
    }
)  # fmt: skip
"""The layout of a record for numpy, which packs many at once."""
_HEAD = np.dtype(
    [("row", "<i8"), ("place", "<i8"), ("units", "<u4"), ("order", "<u8"), ("operation", "u1")]
)
"""The fields of a record that a replay keeps while it reads the others: a quarter of its bytes."""
PIECE_RECORDS = 1 << 12
"""512 KiB: records that are in memory at once."""

Read = Callable[[int, int], bytes]
"""Returns the bytes of a journal from one offset to another."""


class Operation(IntEnum):
    """The change that a record makes at its place."""

    COMMITTED = 1
    REMOVED = 2


class Record(msgspec.Struct, frozen=True, gc=False):
    """One line of the journal."""

    operation: Operation
    order: int
    place: int
    block: Block


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of reading a journal: the live block of each place, and where to go on."""

    blocks: Mapping[int, Block]
    """Place → its block, in the order in which blocks were committed."""
    next_order: int
    records: int
    damaged: int
    """Records that failed their checksum."""
    moved_bytes: int = 0
    """Bytes of slots that were copied, because the store has become smaller."""


def records_of(operation: Operation, blocks: Mapping[int, Block], first: int) -> tuple[Record, ...]:
    """Return a record for each block, by place; their orders begin with `first`."""
    assert first > 0, first
    return tuple(
        Record(operation, order, place, block)
        for order, (place, block) in enumerate(blocks.items(), first)
    )


def encode_record(record: Record) -> bytes:
    """Return the 128 bytes of a record."""
    block = record.block
    assert record.place >= 0, record
    assert record.order > 0, record
    body = _BODY.pack(
        _MAGIC,
        record.operation,
        record.order,
        block.bytes,
        block.hash,
        block.parent,
        block.namespace,
        block.checksum,
        block.code,
        record.place,
    )
    return body + _CHECK.pack(block_checksum(body))


def encode_records(records: Iterable[Record]) -> bytes:
    """Return many records, back to back."""
    return b"".join(map(encode_record, records))


def replay(data: bytes, layout: Layout) -> Replay:
    """Return the state that a journal in memory describes; see `replay_pieces`."""
    return replay_pieces(lambda start, stop: data[start:stop], len(data), layout)


def replay_pieces(
    read: Read, length: int, layout: Layout, piece_records: int = PIECE_RECORDS
) -> Replay:
    """Return the state that a journal of `length` bytes describes; it is read twice, in pieces.

    Records of places, sizes or parts that a store of this layout cannot have are damaged; so is a
    partial last one. So is one that the second reading finds changed: its place is empty then. If a
    block is in two places, the newer one has it. The blocks are in the order in which they were
    committed.
    """
    count = length // RECORD_BYTES
    pieces = partial(_pieces, read, count, piece_records)
    heads = _heads(pieces(), layout)
    sound = len(heads)
    damaged = count - sound + (1 if length % RECORD_BYTES else 0)
    next_order = int(heads["order"].max()) + 1 if len(heads) else 1
    heads = heads[np.argsort(heads["order"], kind="stable")]
    heads = heads[_newest(heads, layout.slab_units)]
    heads = heads[heads["operation"] == Operation.COMMITTED]
    same = np.zeros(len(heads), np.bool_)
    live = BlockColumns(heads["place"].copy(), _records_at(pieces(), heads, same))
    assert len(live) <= sound, f"{len(live)} blocks of {sound} records"
    if not same.all():
        live, damaged = live.only(same), damaged + len(same) - int(same.sum())
    return Replay(live.without_older(), next_order, count, damaged)


def _pieces(read: Read, count: int, piece_records: int) -> Iterator[tuple[int, bytes]]:
    """Yield some records after others, each time with the number of the first one."""
    assert piece_records > 0, f"pieces of {piece_records} records"
    for first in range(0, count, piece_records):
        stop = min(first + piece_records, count)
        data = read(first * RECORD_BYTES, stop * RECORD_BYTES)
        assert len(data) == (stop - first) * RECORD_BYTES, f"{len(data)} bytes from {first} on"
        yield first, data


def _heads(pieces: Iterable[tuple[int, bytes]], layout: Layout) -> NDArray[np.void]:
    """Return the heads of the records that are valid in a store of this layout."""
    found = [np.zeros(0, _HEAD)]
    for first, data in pieces:
        records = np.frombuffer(data, _RECORD)
        places = _places(records, layout)
        sizes = records["bytes"].astype(np.int64)
        units = -(-sizes // UNIT_BYTES) + layout.extra_bytes // UNIT_BYTES
        fits = _in_a_slot(places, units, layout) & (sizes > 0)
        fits &= (records["magic"] == _MAGIC) | (units * UNIT_BYTES == layout.slot_bytes)
        fits &= are_divisible(sizes, records["parts"])
        kept = np.flatnonzero(_sound(data, records) & fits)
        heads = np.zeros(len(kept), _HEAD)
        heads["row"], heads["place"], heads["units"] = first + kept, places[kept], units[kept]
        heads["order"], heads["operation"] = records["order"][kept], records["operation"][kept]
        found.append(heads)
    return np.concatenate(found)


def _records_at(
    pieces: Iterable[tuple[int, bytes]], heads: NDArray[np.void], same: NDArray[np.bool_]
) -> Iterator[Piece]:
    """Yield the records of these heads, some after others, and set in `same` which are unchanged.

    A disk may return other bytes than it did for the heads: their checksums are compared again.
    """
    by_row = np.argsort(heads["row"], kind="stable")
    ascending = heads["row"][by_row]
    for first, data in pieces:
        begin, end = np.searchsorted(ascending, (first, first + len(data) // RECORD_BYTES))
        rows = by_row[begin:end]
        whole = np.frombuffer(data, f"V{RECORD_BYTES}")[ascending[begin:end] - first].tobytes()
        records = np.frombuffer(whole, _RECORD)
        same[rows] = _sound(whole, records) & (records["order"] == heads["order"][rows])
        yield rows, records


def _places(records: NDArray[np.void], layout: Layout) -> NDArray[np.int64]:
    """Return where the block of each record begins, whatever release has written it."""
    numbers = records["number"].astype(np.int64) * (layout.slot_bytes // UNIT_BYTES)
    places: NDArray[np.int64] = records["slot"].astype(np.int64)
    return np.where(records["magic"] == _MAGIC_OF_SLOTS, numbers, places)


def _in_a_slot(
    places: NDArray[np.int64], units: NDArray[np.int64], layout: Layout
) -> NDArray[np.bool_]:
    """Tell which records are of a slot that a slab of their class has."""
    total_units = layout.total_bytes // UNIT_BYTES
    is_inside = (places >= 0) & (places < total_units) & (units > 0)
    begins = places - places % layout.slab_units
    # Of a place near 2^63 the sum wraps around; it is not inside.
    ends = np.minimum(begins + layout.slab_units, total_units)
    begins_slot = (places - begins) % np.maximum(units, 1) == 0
    found: NDArray[np.bool_] = is_inside & (units <= ends - places) & begins_slot
    return found


def _sound(data: bytes, records: NDArray[np.void]) -> NDArray[np.bool_]:
    """Tell which records have the right checksum, magic and operation."""
    check = record_checksums(data, RECORD_BYTES, _BODY.size)
    known = np.isin(records["operation"], [int(operation) for operation in Operation])
    known &= (records["magic"] == _MAGIC) | (records["magic"] == _MAGIC_OF_SLOTS)
    sound: NDArray[np.bool_] = (records["check"] == check) & known
    return sound


def _newest(heads: NDArray[np.void], slab_units: int) -> NDArray[np.intp]:
    """Return which of these records, oldest first, is the newest of each slot, in their order.

    Only those of the class that their slab has now: the last one in a slab is of that.
    """
    places, units = heads["place"], heads["units"].astype(np.int64)
    slabs = places // slab_units
    units_of = np.zeros(int(slabs.max(initial=-1)) + 1, np.int64)
    units_of[slabs] = units  # Of several for one slab the last stays.
    kept = np.flatnonzero(units_of[slabs] == units)
    places, units, slabs = places[kept], units[kept], slabs[kept]
    counts = np.where(units_of > 0, slab_units // np.maximum(units_of, 1), 0)
    firsts = np.cumsum(counts) - counts  # Slots of all slabs with records, numbered in a row.
    slots = places - slabs * slab_units
    slots //= units
    slots += firsts[slabs]
    newest = np.full(int(counts.sum()), -1)
    newest[slots] = kept
    return np.sort(newest[newest >= 0])
