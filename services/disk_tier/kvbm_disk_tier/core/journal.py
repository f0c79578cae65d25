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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np
from kvbm_common.checksum import block_checksum, record_checksums
from kvbm_common.tier.block_columns import COLUMNS, BlockColumns
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
    """Return the state that a journal describes; a partial last record counts as damaged.

    Records of places, sizes or parts that a store of this layout cannot have are damaged, too. If a
    block is in two places, the newer one has it. The blocks are in the order in which they were
    committed.
    """
    count = len(data) // RECORD_BYTES
    records = np.frombuffer(data, _RECORD, count)
    places = _places(records, layout)
    sizes = records["bytes"].astype(np.int64)
    units = -(-sizes // UNIT_BYTES) + layout.extra_bytes // UNIT_BYTES
    fits = _in_a_slot(places, units, layout) & (sizes > 0)
    fits &= (records["magic"] == _MAGIC) | (units * UNIT_BYTES == layout.slot_bytes)
    fits &= are_divisible(sizes, records["parts"])
    kept = np.flatnonzero(_sound(data, records) & fits)
    damaged = count - len(kept) + (1 if len(data) % RECORD_BYTES else 0)
    next_order = int(records["order"][kept].max()) + 1 if len(kept) else 1
    by_order = _by_order(records, kept)
    newest = _by_order(records, _newest(by_order, places, units, layout.slab_units))
    chosen = newest[records["operation"][newest] == Operation.COMMITTED]
    live = BlockColumns(records, chosen, places[chosen]).without_older()
    assert len(live) <= len(kept), f"{len(live)} blocks of {len(kept)} records"
    return Replay(live, next_order, count, damaged)


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


def _newest(
    kept: NDArray[np.intp], places: NDArray[np.int64], units: NDArray[np.int64], slab_units: int
) -> NDArray[np.intp]:
    """Return the index of the newest of these records, oldest first, for each slot.

    Only those of the class that their slab has now: the last one in a slab is of that.
    """
    slabs = places[kept] // slab_units
    units_of = np.zeros(int(slabs.max(initial=-1)) + 1, np.int64)
    units_of[slabs] = units[kept]  # Of several for one slab the last stays.
    kept = kept[units_of[slabs] == units[kept]]
    slabs = places[kept] // slab_units
    counts = np.where(units_of > 0, slab_units // np.maximum(units_of, 1), 0)
    firsts = np.cumsum(counts) - counts  # Slots of all slabs with records, numbered in a row.
    slots = firsts[slabs] + (places[kept] - slabs * slab_units) // units[kept]
    newest = np.full(int(counts.sum()), -1)
    newest[slots] = kept
    return newest[newest >= 0]


def _by_order(records: NDArray[np.void], indices: NDArray[np.intp]) -> NDArray[np.intp]:
    return indices[np.argsort(records["order"][indices], kind="stable")]
