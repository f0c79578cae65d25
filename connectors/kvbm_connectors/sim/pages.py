"""Pages: the paged memory of one rank of a sim engine, on host or GPU, and what is in it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from kvbm_common.identity import SequenceHash

if TYPE_CHECKING:
    from kvbm_common.cuda.runtime import Runtime

COPY_DEADLINE_S = 10.0
"""One block to or from a GPU."""
POLL_S = 0.00002


class Pages(Protocol):
    """Memory for a number of equal parts of blocks, one after the other."""

    address: int

    def fill(self, content: Content, block: int, name: SequenceHash) -> None:
        """Write what the block of this name holds; there when this returns."""

    def holds(self, content: Content, block: int, name: SequenceHash) -> bool:
        """Return whether the block holds what its name demands."""


class HostPages:
    """In this process's memory."""

    def __init__(self, block_count: int, part_bytes: int) -> None:
        self.array: npt.NDArray[np.uint64] = np.zeros(
            (block_count, part_bytes // WORD_BYTES), dtype=np.uint64
        )
        self.address = self.array.ctypes.data

    def fill(self, content: Content, block: int, name: SequenceHash) -> None:
        content.fill(self.array[block], name)

    def holds(self, content: Content, block: int, name: SequenceHash) -> bool:
        return content.holds(self.array[block], name)


class DevicePages:
    """In a GPU's memory, written and compared through pinned memory on the engine's stream."""

    def __init__(self, runtime: Runtime, stream: int, block_count: int, part_bytes: int) -> None:
        self._runtime, self._stream, self._part_bytes = runtime, stream, part_bytes
        self._staging = runtime.pinned(part_bytes).view(np.uint64)
        self.address = runtime.allocate(block_count * part_bytes)

    def fill(self, content: Content, block: int, name: SequenceHash) -> None:
        content.fill(self._staging, name)
        self._copy(self.address + block * self._part_bytes, self._staging.ctypes.data)

    def holds(self, content: Content, block: int, name: SequenceHash) -> bool:
        self._copy(self._staging.ctypes.data, self.address + block * self._part_bytes)
        return content.holds(self._staging, name)

    def _copy(self, target: int, source: int) -> None:
        event = self._runtime.event()
        self._runtime.copy(target, source, self._part_bytes, self._stream)
        self._runtime.record(event, self._stream)
        give_up_s = time.monotonic() + COPY_DEADLINE_S
        while not self._runtime.is_done(event):
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"a block was not copied in {COPY_DEADLINE_S} s")
            time.sleep(POLL_S)
        self._runtime.end_event(event)


Words = npt.NDArray[np.uint64]
WORD_BYTES = 8


class Content:
    """Fills and checks blocks of one size. `first_word` is where this rank's part begins."""

    def __init__(self, part_bytes: int, *, rank: int = 0) -> None:
        assert part_bytes % WORD_BYTES == 0
        count = part_bytes // WORD_BYTES
        self._index = np.arange(rank * count, (rank + 1) * count, dtype=np.uint64)
        self._expected = np.empty(count, dtype=np.uint64)

    def fill(self, block: Words, name: SequenceHash) -> None:
        """Write what the block of this name holds."""
        factor = np.uint64(int.from_bytes(name[:8], "little") | 1)
        offset = np.uint64(int.from_bytes(name[8:], "little"))
        np.multiply(self._index, factor, out=block)
        np.add(block, offset, out=block)

    def holds(self, block: Words, name: SequenceHash) -> bool:
        """Return whether the block holds exactly what its name demands."""
        self.fill(self._expected, name)
        return bool(np.array_equal(block, self._expected))
