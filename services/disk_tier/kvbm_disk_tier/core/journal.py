"""The journal: which slot of the store holds which block, as a file of fixed-size records.

A record is 128 bytes, little-endian:

    offset  size  field
    0       4     magic "KVJ2"
    4       1     operation: 1 committed, 2 removed
    5       3     zero
    8       8     order: counts up over the life of the store
    16      4     slot
    20      4     bytes of the block
    24      16    sequence hash
    40      16    parent hash
    56      32    namespace digest
    88      8     checksum of the block
    96      2     how many parts the block has
    98      22    zero
    120     8     xxh3-64 of bytes 0..119

Replay takes the newest record of each slot. A torn or flipped record fails its checksum and is
skipped; what it said about a slot is then unknown, which is safe: an older record for that slot may
name a block whose bytes are gone, and the checksum of the block catches that on its first read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np
from kvbm_common.checksum import block_checksum, record_checksums
from kvbm_common.tier.blocks import COLUMNS, Block, BlockColumns
from numpy.typing import NDArray

RECORD_BYTES = 128
_MAGIC = b"KVJ2"
_BODY = struct.Struct("<4sB3xQII16s16s32sQH22x")
_CHECK = struct.Struct("<Q")
assert _BODY.size + _CHECK.size == RECORD_BYTES
_RECORD = np.dtype(
    {
        "names": ["magic", "operation", "order", *COLUMNS, "check"],
        "formats": ["S4", "u1", "<u8", *COLUMNS.values(), "<u8"],
        "offsets": [0, 4, 8, 16, 20, 24, 40, 56, 88, 96, 120],
        "itemsize": RECORD_BYTES,
    }
)  # fmt: skip
"""The same for many records at once."""


class Operation(IntEnum):
    """What a record says about its slot."""

    COMMITTED = 1
    REMOVED = 2


class Record(msgspec.Struct, frozen=True, gc=False):
    """One line of the journal."""

    operation: Operation
    order: int
    slot: int
    block: Block


@dataclass(frozen=True, slots=True)
class Replay:
    """What a journal says: the live block of each slot, and where to go on."""

    blocks: Mapping[int, Block]
    """In the order in which they were committed."""
    next_order: int
    records: int
    damaged: int
    """Records that failed their checksum."""


def encode_record(record: Record) -> bytes:
    """Return the 128 bytes of a record."""
    block = record.block
    assert record.slot >= 0, record
    body = _BODY.pack(
        _MAGIC,
        record.operation,
        record.order,
        record.slot,
        block.bytes,
        block.hash,
        block.parent,
        block.namespace,
        block.checksum,
        block.part_count,
    )
    return body + _CHECK.pack(block_checksum(body))


def encode_records(records: Iterable[Record]) -> bytes:
    """Return many records, back to back."""
    return b"".join(map(encode_record, records))


def replay(data: bytes, *, slot_count: int, slot_bytes: int) -> Replay:
    """Return the state that a journal describes; a partial last record counts as damaged.

    Records of slots, sizes or parts that this store cannot have are damaged, too. If a block is in
    two slots, the newer one has it. The blocks are in the order in which they were committed.
    """
    assert slot_count >= 0
    assert slot_bytes >= 0
    count = len(data) // RECORD_BYTES
    records = np.frombuffer(data, _RECORD, count)
    fits = (records["slot"] < slot_count) & (records["bytes"] <= slot_bytes)
    fits &= records["bytes"] % np.maximum(records["parts"], 1) == 0
    fits &= records["parts"] > 0
    kept = np.flatnonzero(_sound(data, records) & fits)
    damaged = count - len(kept) + (1 if len(data) % RECORD_BYTES else 0)
    next_order = int(records["order"][kept].max()) + 1 if len(kept) else 1
    live = _live(records, _newest(records, kept, slot_count))
    return Replay(live, next_order, count, damaged)


def _sound(data: bytes, records: NDArray[np.void]) -> NDArray[np.bool_]:
    """Tell which records have the right checksum, magic and operation."""
    check = record_checksums(data, RECORD_BYTES, _BODY.size)
    known = np.isin(records["operation"], [int(operation) for operation in Operation])
    sound: NDArray[np.bool_] = (records["check"] == check) & (records["magic"] == _MAGIC) & known
    return sound


def _newest(records: NDArray[np.void], kept: NDArray[np.intp], slot_count: int) -> NDArray[np.intp]:
    """Return the index of the newest of these records for each slot, oldest first."""
    kept = _by_order(records, kept)
    newest = np.full(slot_count, -1)
    newest[records["slot"][kept]] = kept  # Of several for one slot the last stays.
    return _by_order(records, newest[newest >= 0])


def _by_order(records: NDArray[np.void], indices: NDArray[np.intp]) -> NDArray[np.intp]:
    return indices[np.argsort(records["order"][indices], kind="stable")]


def _live(records: NDArray[np.void], newest: NDArray[np.intp]) -> BlockColumns:
    """Return the committed blocks by slot."""
    chosen = newest[records["operation"][newest] == Operation.COMMITTED]
    return BlockColumns(records, chosen).without_older()
