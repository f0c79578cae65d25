"""The mover of a sealed store: what is on disk is ciphertext, what is in the arena is not."""

from __future__ import annotations

from collections.abc import Callable

from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.mover_thread import MoverThread, TransferError, Transferred
from kvbm_common.nixl.spans import Registration
from kvbm_common.runtime.metrics import Metrics

from kvbm_disk_tier.core.effects import ReadSlots, WriteSlots
from kvbm_disk_tier.core.pieces import pieces_of
from kvbm_disk_tier.shell.bounce_pool import BouncePool
from kvbm_disk_tier.shell.cipher import Keys, seal, unseal
from kvbm_disk_tier.shell.mover import (
    CALL_DEADLINE_S,
    WRITE_DEADLINE_S,
    DiskMover,
    Put,
    Sums,
    left_s,
    wait_settled,
)


class SealedMover(DiskMover):
    """Seals what it writes and opens what it reads, in a pool of slots of its own."""

    def __init__(
        self,
        *,
        mover: MoverThread,
        counters: Metrics,
        keys: Keys,
        pool_slots: Callable[[int], int],
    ) -> None:
        """Take over `mover`; `pool_slots(slot_bytes)` returns how many slots a pool has."""
        super().__init__(mover=mover, counters=counters)
        self._keys = keys
        self._pool_slots = pool_slots
        self._pool: BouncePool | None = None
        self._pool_known: Registration | None = None

    def use_file(self, fd: int, slot_count: int, stride: int) -> None:
        super().use_file(fd, slot_count, stride)
        if self._pool is not None and self._pool.slot_bytes == stride:
            return
        if self._pool_known is not None:
            self._mover.deregister(self._pool_known).result(CALL_DEADLINE_S)
        self._pool = pool = BouncePool(self._pool_slots(stride), stride)
        known = self._mover.register_memory(pool.address, pool.bytes)
        self._pool_known = known.result(CALL_DEADLINE_S)

    async def _put(self, arena: Arena, effect: WriteSlots) -> Put:
        pool = self._pool
        assert pool is not None
        async with pool.lend(len(effect.targets), deadline_s=WRITE_DEADLINE_S) as slots:

            def seal_all(arena: Arena, effect: WriteSlots) -> tuple[int, ...]:
                entries = zip(effect.sources, effect.blocks, slots, strict=True)
                done = [
                    seal(
                        self._keys, block, _slot(arena, source, effect.slot_bytes), pool.slot(slot)
                    )
                    for source, block, slot in entries
                ]
                return tuple(index for index, sealed in enumerate(done) if not sealed)

            lost = await self._in_thread(seal_all, arena, effect)
            memory, file = pieces_of(pool.address, slots, effect.targets, pool.slot_bytes)
            try:
                return await self._to_file(memory, file), lost
            except TransferError as error:
                await wait_settled(error)  # The pool's slots are read until then.
                raise

    async def _get(self, arena: Arena, effect: ReadSlots) -> tuple[Transferred, Sums]:
        pool = self._pool
        assert pool is not None
        async with pool.lend(len(effect.sources), deadline_s=left_s(effect)) as slots:

            def open_all(arena: Arena, effect: ReadSlots) -> Sums:
                opened: list[tuple[int, ...] | None] = []
                entries = zip(slots, effect.targets, effect.blocks, strict=True)
                for slot, target, block in entries:
                    plain = _slot(arena, target, effect.slot_bytes)
                    opens = unseal(self._keys, block, pool.slot(slot), plain)
                    opened.append(block.sums_in(plain) if opens else None)
                return tuple(opened)

            memory, file = pieces_of(pool.address, slots, effect.sources, pool.slot_bytes)
            try:
                moved = await self._from_file(memory, file, effect)
            except TransferError as error:
                await wait_settled(error)
                raise
            return moved, await self._in_thread(open_all, arena, effect)


def _slot(arena: Arena, slot: int, slot_bytes: int) -> memoryview:
    return arena.view(slot * slot_bytes, slot_bytes)
