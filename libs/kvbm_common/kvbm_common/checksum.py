"""The checksums of blocks and of their parts: xxh3-64, and the only place that imports xxhash.

Every part of a block (`tier/parts.py`) has a checksum of its own, so that a rank can verify what it
has read; a block has the checksum of these checksums. Those of several parts are *packed*: as
little-endian unsigned 64-bit numbers, back to back.

It finds accidents (a torn copy, a wrong slot, a rotten sector), not attacks. xxhash 4.1 releases
the GIL for large buffers: two threads on two cores hashed 8 MiB buffers at 1.6 to 1.8 times the
speed of one (50 to 90 GB/s in cache; 5 GB/s from cold memory), and a third thread went on running.
Blocks of 64 KiB gained nothing from a second thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

if TYPE_CHECKING:  # It imports msgspec, which a machine that only tries its GPU may lack.
    from kvbm_common.tier.parts import Grid

PIECE_RECORDS = 8_192
"""Records that are summed up at a time: their copies stay in the processor's cache."""
SUM_BYTES = 8
"""Bytes of a packed checksum."""


def block_checksum(data: bytes | memoryview | NDArray[Any]) -> int:
    """Return the xxh3-64 (seed 0) of a contiguous buffer, as an unsigned 64-bit number."""
    return xxhash.xxh3_64_intdigest(cast(bytes, data))


def pack_sums(sums: Iterable[int]) -> bytes:
    """Pack checksums: little-endian unsigned 64-bit numbers, back to back."""
    return np.fromiter(sums, dtype="<u8").tobytes()


def unpack_sums(packed: bytes) -> tuple[int, ...]:
    """Return the checksums that `pack_sums` has packed."""
    assert len(packed) % SUM_BYTES == 0, f"{len(packed)} bytes are not whole checksums"
    return tuple(np.frombuffer(packed, dtype="<u8").tolist())


def combined_checksum(packed: bytes) -> int:
    """Return the checksum of a block from those of its parts.

    A block of one part has the checksum of that part; of several parts it is the xxh3-64 of their
    packed checksums.
    """
    assert packed, "a block has at least one part"
    if len(packed) == SUM_BYTES:
        return int.from_bytes(packed, "little")
    return xxhash.xxh3_64_intdigest(packed)


def part_checksums(data: memoryview | NDArray[Any], grid: Grid) -> bytes:
    """Return the packed checksums of the parts of a block, which is all of `data`.

    A part that is scattered is copied together first: `copying.block_sums` is faster, and impure.
    """
    run_bytes, rest = divmod(len(data), grid.run_count)
    assert not rest, f"{len(data)} bytes are not cut by {grid}"
    shape = grid.ranges, grid.layers, grid.heads, run_bytes
    runs = np.frombuffer(data, np.uint8).reshape(shape).transpose(0, 2, 1, 3)
    parts = np.ascontiguousarray(runs).reshape(grid.count, -1)
    return pack_sums(map(block_checksum, parts))


def parts_checksum(parts: Iterable[memoryview | NDArray[Any]]) -> int:
    """Return the checksum of contiguous buffers as if they lay back to back."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(cast(bytes, part))
    return state.intdigest()


def record_checksums(data: bytes, record_bytes: int, body_bytes: int) -> NDArray[np.uint64]:
    """Return the checksums of the first `body_bytes` of each whole record in `data`.

    The shape is (records,).
    """
    count = len(data) // record_bytes
    shape = np.dtype({"names": ["body"], "formats": [f"V{body_bytes}"], "itemsize": record_bytes})
    bodies = np.frombuffer(data, shape, count)["body"]
    digest = xxhash.xxh3_64_digest  # Big-endian.
    digests = [
        b"".join(map(digest, bodies[start : start + PIECE_RECORDS].tolist()))
        for start in range(0, count, PIECE_RECORDS)
    ]
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)
