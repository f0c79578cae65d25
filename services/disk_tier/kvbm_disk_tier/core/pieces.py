"""Pieces: a batch of slots as the transfer that moves it, in the order of the file.

Slots that are neighbours in the file and in memory become one piece of at most `PIECE_BYTES_MAX`:
every piece costs the kernel a request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from kvbm_common.nixl.spans import Spans

PIECE_BYTES_MAX = 512 * 1024
"""Longer pieces were not faster, and a lone batch has fewer of them side by side."""


def pieces_of(
    address: int, memory_slots: Sequence[int], file_slots: Sequence[int], slot_bytes: int
) -> tuple[Spans, Spans]:
    """Return the spans of both sides: slots of the memory at `address` pair with slots of a file.

    In plain Python: for a batch of 16, what numpy costs is more than what merging gains.
    """
    assert slot_bytes > 0
    most = max(1, PIECE_BYTES_MAX // slot_bytes)
    memory: list[tuple[int, int, int]] = []
    file: list[tuple[int, int, int]] = []
    first = near = count = 0
    for far_slot, near_slot in sorted(zip(file_slots, memory_slots, strict=True)):
        if 0 < count < most and far_slot == first + count and near_slot == near + count:
            count += 1
            memory[-1] = (memory[-1][0], count * slot_bytes, 0)
            file[-1] = (file[-1][0], count * slot_bytes, 0)
            continue
        first, near, count = far_slot, near_slot, 1
        memory.append((address + near * slot_bytes, slot_bytes, 0))
        file.append((first * slot_bytes, slot_bytes, 0))
    return Spans(np.array(memory, dtype=np.uint64)), Spans(np.array(file, dtype=np.uint64))
