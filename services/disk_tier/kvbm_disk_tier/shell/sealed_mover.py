"""The mover of a sealed store: what is on disk is ciphertext, what is in the arena is not.

Blocks are sealed and opened in a pool of registered memory: the arena holds them in the clear, for
engines to read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate

from kvbm_common.copying.block_sums import sums_of
from kvbm_common.memory.arena import Arena
from kvbm_common.memory.huge_pages import make_huge, map_shared
from kvbm_common.nixl.mover_thread import MoverThread, TransferError, Transferred
from kvbm_common.nixl.spans import Registration
from kvbm_common.nixl.transfers import TransferFailed, TransferTimeout
from kvbm_common.runtime.loop import monotonic_ms
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slots import Block

from kvbm_disk_tier.core.effects import ReadSlots, WriteSlots
from kvbm_disk_tier.shell.cipher import Keys, seal, unseal
from kvbm_disk_tier.shell.mover import (
    CALL_DEADLINE_S,
    WRITE_DEADLINE_S,
    DiskMover,
    NotSettled,
    Put,
    Sums,
    left_s,
    lengths,
    parts_of,
    pieces_of,
    places,
    wait_settled,
)
from kvbm_disk_tier.shell.store_header import EXTRA_BYTES


class BouncePool:
    """Memory that is lent to transfers, a run of bytes to each. Page-aligned, as O_DIRECT wants."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = size_bytes
        memory = map_shared(-1, size_bytes)
        self._view = memory.data
        self.address: int = memory.ctypes.data
        make_huge(self.address, size_bytes)
        self._lent: dict[int, int] = {}
        """First place of a run that is lent → its end."""
        self._given_back = asyncio.Condition()

    @asynccontextmanager
    async def lend(self, size: int, *, deadline_s: float) -> AsyncIterator[int]:
        """Lend so many bytes to one transfer as soon as they are free; raises TransferError.

        Leave the context only when the transfer can touch them no more, or by NotSettled: they
        stay lent then, as they do where the transfer is cancelled.
        """
        if size > self.bytes:
            raise TransferFailed(f"{size} bytes at once: the pool has {self.bytes}")
        try:
            async with asyncio.timeout(deadline_s), self._given_back:
                await self._given_back.wait_for(lambda: self._gap(size) is not None)
                begin = self._gap(size)
                assert begin is not None, f"{size} bytes of {self._lent}"
                self._lent[begin] = begin + size
        except TimeoutError as error:
            raise TransferTimeout("other blocks are being sealed or opened") from error
        is_settled = True
        try:
            yield begin
        except (NotSettled, asyncio.CancelledError):  # Late bytes may still come.
            is_settled = False
            raise
        finally:
            if is_settled:
                del self._lent[begin]
                async with self._given_back:
                    self._given_back.notify_all()

    def _gap(self, size: int) -> int | None:
        """Return where the first run of so many bytes begins that is not lent; None: no run is."""
        begin = 0
        for lent, end in sorted(self._lent.items()):
            if lent - begin >= size:
                return begin
            begin = end
        return begin if self.bytes - begin >= size else None

    def view(self, begin: int, size: int) -> memoryview:
        """Return a view of bytes of the pool."""
        return self._view[begin : begin + size]


class SealedMover(DiskMover):
    """Seals what it writes and opens what it reads, in a pool of slots of its own."""

    def __init__(
        self,
        *,
        mover: MoverThread,
        counters: Metrics,
        keys: Keys,
        pool_bytes: Callable[[Layout], int],
    ) -> None:
        """Take over `mover`; `pool_bytes` returns how large the pool of a store is."""
        super().__init__(mover=mover, counters=counters)
        self._keys = keys
        self._pool_bytes = pool_bytes
        self._pool: BouncePool | None = None
        self._pool_known: Registration | None = None

    def use_file(self, fd: int, layout: Layout) -> None:
        super().use_file(fd, layout)
        size = self._pool_bytes(layout)
        if self._pool is not None and self._pool.bytes == size:
            return
        if self._pool_known is not None:
            self._mover.deregister(self._pool_known).result(CALL_DEADLINE_S)
        self._pool = pool = BouncePool(size)
        known = self._mover.register_memory(pool.address, pool.bytes)
        self._pool_known = known.result(CALL_DEADLINE_S)

    async def _put(self, arena: Arena, effect: WriteSlots) -> Put:
        pool = self._pool
        assert pool is not None
        sizes = sealed_lengths(effect.blocks)
        async with pool.lend(sum(sizes), deadline_s=WRITE_DEADLINE_S) as begin:
            near = list(accumulate(sizes[:-1], initial=begin))

            def seal_all(arena: Arena, effect: WriteSlots) -> tuple[int, ...]:
                entries = zip(effect.sources, effect.blocks, near, sizes, strict=True)
                done = [
                    seal(
                        self._keys, block, arena.view(source * effect.unit_bytes, block.bytes),
                        pool.view(at, size),
                    )
                    for source, block, at, size in entries
                ]  # fmt: skip
                return tuple(index for index, sealed in enumerate(done) if not sealed)

            lost = await self._in_thread(seal_all, arena, effect)
            memory, file = pieces_of(pool.address, near, places(effect.targets), sizes)
            try:
                return await self._to_file(memory, file), lost
            except TransferError as error:
                await wait_settled(error)  # The pool is read until then.
                raise

    async def _get(self, arena: Arena, effect: ReadSlots) -> tuple[Transferred, Sums]:
        """Read a batch in parts, each by way of its own run of the pool."""
        parts = parts_of(effect)
        landing = itertools.count(1)

        def landed() -> None:
            if next(landing) == len(parts):
                self.on_landed(effect.read)

        getting = [self._get_part(arena, part, landed) for part in parts]
        got = await asyncio.gather(*getting, return_exceptions=True)
        failed = [one for one in got if isinstance(one, BaseException)]
        if failed:  # What must end this process comes before what fails a read.
            raise next((one for one in failed if isinstance(one, NotSettled)), failed[0])
        ended = [one for one in got if not isinstance(one, BaseException)]
        seconds = max(moved.seconds for moved, _ in ended)
        whole = Transferred(sum(moved.bytes for moved, _ in ended), seconds)
        return whole, tuple(sums for _, part in ended for sums in part)

    async def _get_part(
        self, arena: Arena, effect: ReadSlots, landed: Callable[[], None]
    ) -> tuple[Transferred, Sums]:
        pool = self._pool
        assert pool is not None
        sizes = sealed_lengths(effect.blocks)
        async with pool.lend(sum(sizes), deadline_s=left_s(effect)) as begin:
            near = list(accumulate(sizes[:-1], initial=begin))

            def open_all(arena: Arena, effect: ReadSlots) -> Sums:
                opened: list[bytes | None] = []
                entries = zip(near, sizes, effect.targets, effect.blocks, strict=True)
                for at, size, target, block in entries:
                    start = target * effect.unit_bytes
                    plain = arena.view(start, block.bytes)
                    if monotonic_ms() >= effect.until_ms:
                        raise TransferTimeout("the slots may hold other blocks by now")
                    opens = unseal(self._keys, block, pool.view(at, size), plain)
                    opened.append(sums_of([block], [arena.address + start])[0] if opens else None)
                return tuple(opened)

            memory, file = pieces_of(pool.address, near, places(effect.sources), sizes)
            try:
                moved = await self._from_file(memory, file, left_s(effect))
                landed()
            except TransferError as error:
                await wait_settled(error)
                raise
            return moved, await self._in_thread(open_all, arena, effect)


def sealed_lengths(blocks: Sequence[Block]) -> list[int]:
    """Return how long the slot of each block is in a sealed store."""
    return [length + EXTRA_BYTES for length in lengths(blocks)]
