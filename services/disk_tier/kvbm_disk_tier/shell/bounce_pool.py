"""The bounce pool: registered memory in which blocks are sealed on their way to disk and opened on
their way back, because the arena holds them in the clear for engines to read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvbm_common.memory.huge_pages import make_huge, map_shared
from kvbm_common.nixl.transfers import TransferFailed, TransferTimeout


class BouncePool:
    """Slots of one size, lent to transfers. Page-aligned, as O_DIRECT wants."""

    def __init__(self, slot_count: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.bytes = slot_count * slot_bytes
        memory = map_shared(-1, self.bytes)
        self._view = memory.data
        self.address: int = memory.ctypes.data
        make_huge(self.address, self.bytes)
        self._slot_count = slot_count
        self._free = list(range(slot_count))
        self._given_back = asyncio.Condition()

    @asynccontextmanager
    async def lend(self, count: int, *, deadline_s: float) -> AsyncIterator[list[int]]:
        """Lend slots to one transfer as soon as `count` are free; raises TransferError.

        Leave the context only when the transfer can touch them no more.
        """
        if count > self._slot_count:
            raise TransferFailed(f"{count} blocks at once: the pool has {self._slot_count} slots")
        try:
            async with asyncio.timeout(deadline_s), self._given_back:
                await self._given_back.wait_for(lambda: len(self._free) >= count)
                self._free, taken = self._free[:-count], self._free[-count:]
                slots = sorted(taken)  # Neighbours, where there are some, become one piece.
        except TimeoutError as error:
            raise TransferTimeout("other blocks are being sealed or opened") from error
        try:
            yield slots
        finally:
            self._free += slots
            async with self._given_back:
                self._given_back.notify_all()

    def slot(self, number: int) -> memoryview:
        """Return a view of the bytes of a slot."""
        start = number * self.slot_bytes
        return self._view[start : start + self.slot_bytes]
