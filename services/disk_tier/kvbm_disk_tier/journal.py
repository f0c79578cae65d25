"""The journal: which slot of the store holds which block, as a file of fixed-size records.

A record is 128 bytes, little-endian:

    offset  size  field
    0       4     magic "KVJ1"
    4       1     operation: 1 committed, 2 removed
    5       3     zero
    8       8     order: counts up over the life of the store
    16      4     slot
    20      4     bytes of the block
    24      16    sequence hash
    40      16    parent hash
    56      32    namespace digest
    88      8     xxh3-64 of the block
    96      24    zero
    120     8     xxh3-64 of bytes 0..119

Replay takes the newest record of each slot. A torn or flipped record fails its checksum and is
skipped; what it said about a slot is then unknown, which is safe: an older record for that slot may
name a block whose bytes are gone, and the checksum of the block catches that on its first read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from kvbm_common.checksum import block_checksum
from kvbm_common.identity import SequenceHash
from kvbm_common.slots import Block

RECORD_BYTES = 128
_MAGIC = b"KVJ1"
_BODY = struct.Struct("<4sB3xQII16s16s32sQ24x")
_CHECK = struct.Struct("<Q")
assert _BODY.size + _CHECK.size == RECORD_BYTES


class Operation(IntEnum):
    """What a record says about its slot."""

    COMMITTED = 1
    REMOVED = 2


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the journal."""

    operation: Operation
    order: int
    slot: int
    block: Block


@dataclass(frozen=True, slots=True)
class Replay:
    """What a journal says: the live block of each slot, and where to go on."""

    blocks: dict[int, Block]
    next_order: int
    records: int
    damaged: int
    """Records that failed their checksum."""


def encode_record(record: Record) -> bytes:
    """The 128 bytes of a record."""
    block = record.block
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
    )
    return body + _CHECK.pack(block_checksum(body))


def encode_records(records: Iterable[Record]) -> bytes:
    """Many records, back to back."""
    return b"".join(map(encode_record, records))


def decode_record(data: bytes) -> Record | None:
    """A record, or None when its checksum, magic or operation is wrong."""
    body = data[: _BODY.size]
    if len(data) != RECORD_BYTES or _CHECK.unpack(data[_BODY.size :])[0] != block_checksum(body):
        return None
    magic, operation, order, slot, size, name, parent, namespace, checksum = _BODY.unpack(body)
    if magic != _MAGIC or operation not in (Operation.COMMITTED, Operation.REMOVED):
        return None
    block = Block(SequenceHash(name), SequenceHash(parent), namespace, checksum, size)
    return Record(Operation(operation), order, slot, block)


def replay(data: bytes, *, slot_count: int, slot_bytes: int) -> Replay:
    """The state that a journal describes; a partial last record counts as damaged.

    Records of slots or sizes that this store does not have are damaged, too. If a block is in two
    slots, the newer one has it.
    """
    newest: dict[int, Record] = {}
    damaged = 1 if len(data) % RECORD_BYTES else 0
    next_order = 1
    for start in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        record = decode_record(data[start : start + RECORD_BYTES])
        if record is None or record.slot >= slot_count or record.block.bytes > slot_bytes:
            damaged += 1
            continue
        next_order = max(next_order, record.order + 1)
        known = newest.get(record.slot)
        if known is None or known.order < record.order:
            newest[record.slot] = record
    return Replay(_live(newest), next_order, len(data) // RECORD_BYTES, damaged)


def _live(newest: dict[int, Record]) -> dict[int, Block]:
    slot_of: dict[SequenceHash, int] = {}
    committed = [r for r in newest.values() if r.operation is Operation.COMMITTED]
    for record in sorted(committed, key=lambda record: record.order):
        slot_of[record.block.hash] = record.slot
    return {slot: newest[slot].block for slot in slot_of.values()}
