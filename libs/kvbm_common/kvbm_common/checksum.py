"""The block checksum: xxh3-64, from a block's first arrival in host memory on.

It is no defence against an attacker (names are cryptographic, see identity) but against disks,
wires and our own mistakes. xxhash releases the GIL over a large buffer, so a thread of checksums
runs beside transfers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash


def block_checksum(data: bytes | memoryview | npt.NDArray[Any]) -> int:
    """xxh3-64 (seed 0) of a contiguous buffer, as an unsigned 64-bit integer."""
    return int(xxhash.xxh3_64_intdigest(cast(bytes, data)))


def parts_checksum(parts: Iterable[memoryview | npt.NDArray[Any]]) -> int:
    """The checksum of contiguous buffers as if they lay back to back."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(cast(bytes, part))
    return int(state.intdigest())


def checksums(memory: npt.NDArray[np.uint8], offsets: Iterable[int], length: int) -> list[int]:
    """The checksums of `length` bytes at each offset of a flat array of bytes."""
    return [
        block_checksum(memory[offset : offset + length]) for offset in (int(o) for o in offsets)
    ]
