"""The checksums of blocks and of their parts: xxh3-64, and the only place that imports xxhash.

A *part* is the share of a block that one rank of an engine has. Every part has a checksum of its
own, so that a rank can verify what it has read; a block has the checksum of these checksums.

It finds accidents (a torn copy, a wrong slot, a rotten sector), not attacks. xxhash 4.1 releases
the GIL for large buffers: two threads on two cores hashed 8 MiB buffers at 1.6 to 1.8 times the
speed of one (50 to 90 GB/s in cache; 5 GB/s from cold memory), and a third thread went on running.
Blocks of 64 KiB gained nothing from a second thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

PIECE_RECORDS = 8_192
"""So many are summed up at a time: their copies stay in the processor's cache."""


def block_checksum(data: bytes | memoryview | NDArray[Any]) -> int:
    """Return the xxh3-64 (seed 0) of a contiguous buffer, as an unsigned 64-bit number."""
    return xxhash.xxh3_64_intdigest(cast(bytes, data))


def combined_checksum(parts: Sequence[int]) -> int:
    """Return the checksum of a block from the checksums of its parts, in the order of the ranks.

    A block of one part has the checksum of that part. Of several parts it is the xxh3-64 of their
    checksums as little-endian unsigned 64-bit numbers back to back.
    """
    assert parts, "a block has at least one part"
    if len(parts) == 1:
        return parts[0]
    return xxhash.xxh3_64_intdigest(np.asarray(parts, dtype="<u8").tobytes())


def part_checksums(data: memoryview | NDArray[Any], part_count: int) -> tuple[int, ...]:
    """Return the checksum of each of the `part_count` equal parts of a block's bytes."""
    part_bytes, rest = divmod(len(data), part_count)
    assert not rest, f"{len(data)} bytes are not {part_count} equal parts"
    ends = range(part_bytes, len(data) + 1, part_bytes)
    return tuple(block_checksum(data[end - part_bytes : end]) for end in ends)


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


def checksums(arena_array: NDArray[np.uint8], offsets: Iterable[int], length: int) -> list[int]:
    """Return the checksums of the blocks of `length` bytes at `offsets`, in that order."""
    digests = []
    for offset in offsets:
        block = arena_array[offset : offset + length]
        assert len(block) == length, (offset, length, len(arena_array))
        digests.append(xxhash.xxh3_64_intdigest(block.data))
    return digests
