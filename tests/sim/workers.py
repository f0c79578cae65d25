"""The worker half of a rank: its device memory, the arena that it reads, and its loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from kvbm_common.checksum import block_checksum, unpack_sums
from kvbm_common.tier.parts import Share
from kvbm_common.wire.local import Welcome
from kvbm_connectors.client.arena_access import Access
from kvbm_connectors.core.messages import Load, LoadResult

from tests.sim import invariants
from tests.sim.memory import Memory, copy

if TYPE_CHECKING:
    from tests.sim.engine_node import EngineNode

ATTACH_MS = 60.0
"""Mapping a large arena takes long: the first loads of its life wait for it."""
Ended = Callable[[LoadResult], None]
Waiting = tuple[Load, Ended]


class Worker:
    """One rank of one life of an engine. It follows ArenaAccess and WorkerHalf step by step."""

    def __init__(self, engine: EngineNode, rank: int, share: Share) -> None:
        self._engine, self._world, self.rank, self.share = engine, engine.world, rank, share
        self.parts = share.parts
        """The parts that it holds, in their order."""
        self.device = Memory(engine.world, engine.world.plan.device_blocks, parts=len(self.parts))
        self._welcome: Welcome | None = None
        self._attached = 0
        """The epoch of the arena that can be read."""
        self._left: set[int] = set()
        self._is_leaving = False
        self._parked: list[Waiting] = []
        self._given_up = 0
        self.loading = 0
        """Loads that have not ended."""

    # --- the arena --------------------------------------------------------------------------

    def welcomed(self, welcome: Welcome) -> None:
        """Begin to reach the arena of a life of a host tier."""
        known = self._welcome
        if known is not None and known.epoch == welcome.epoch:
            return
        if known is not None and known.instance != welcome.instance:
            self._left.add(known.epoch)
        self._welcome, self._is_leaving = welcome, False
        self._engine.later(self._world.delay(ATTACH_MS), partial(self._attach, welcome))

    def _attach(self, welcome: Welcome) -> None:
        if welcome is self._welcome:
            self._attached = welcome.epoch
        self.look()

    def leaving(self) -> None:
        """Another host tier is about to say where its arena is."""
        self._is_leaving = True

    def access(self, epoch: int) -> Access:
        """Return what a load of some life of the host tier can expect."""
        known = self._welcome
        if known is None or (self._is_leaving and epoch != known.epoch):
            return Access.COMING
        if epoch != known.epoch and epoch in self._left:
            return Access.GONE
        if epoch != known.epoch:
            return Access.COMING if known.epoch < epoch else Access.GONE
        return Access.READY if self._attached == epoch else Access.COMING

    # --- loads ------------------------------------------------------------------------------

    def start(self, load: Load, ended: Ended) -> None:
        """Pull the blocks of a load; `ended` is called once, when nothing is in flight any more."""
        self.loading += 1
        self._begin(load, ended)

    def look(self) -> None:
        """See whether what has waited for its arena can go on."""
        parked, self._parked = self._parked, []
        for load, ended in parked:
            self._begin(load, ended)

    def _begin(self, load: Load, ended: Ended) -> None:
        now_ms, access = self._world.now_ms, self.access(load.epoch)
        is_coming = access is Access.COMING and load.epoch != self._given_up
        if is_coming and now_ms < load.deadline_ms:
            self._world.marks["load parked"] += 1
            self._parked.append((load, ended))
            return
        if access is Access.COMING:
            self._given_up = load.epoch
        if access is not Access.READY:
            reason = "arena_changed" if access is Access.GONE else "no_arena"
            self._end(_failed(load, reason), ended)
        elif now_ms >= load.deadline_ms:
            self._world.marks["load began after its lease"] += 1
            self._end(_failed(load, "lease_ended"), ended)
        else:
            self._pull(load, ended)

    def _pull(self, load: Load, ended: Ended) -> None:
        arena = self._engine.cluster.arenas[load.epoch]
        duration_ms = self._world.transfer_ms("load")
        units, held = self._engine.units, self.parts
        slots = (arena, arena.some(load.slots, held, units))
        blocks = (self.device, self.device.some(load.blocks, range(len(held))))
        copy(self._engine, slots, blocks, duration_ms)
        self._engine.later(duration_ms, partial(self._pulled, load, ended))

    def _pulled(self, load: Load, ended: Ended) -> None:
        if self._world.now_ms >= load.deadline_ms:
            self._world.marks["load outlived its lease"] += 1
            self._end(_failed(load, "lease_ended"), ended)
            return
        wrong = [self._wrong(load, index) for index in range(len(load.blocks))]
        corrupt = [index for index, cells in enumerate(wrong) if cells]
        self._world.marks["host block corrupt"] += len(corrupt)
        if load.epoch in (tier.epoch for tier in self._engine.cluster.host_tiers):
            invariants.check_corrupt(chain.from_iterable(wrong))
        intact = tuple(index not in corrupt for index in range(len(load.blocks)))
        reason = "corrupt" if corrupt else ""
        self._end(LoadResult(load, intact, tuple(corrupt), reason), ended)

    def held(self, block: int) -> Iterable[tuple[int, bytes]]:
        """Return the parts of a device block, each with its content."""
        return zip(self.parts, self.device.content(block), strict=True)

    def _wrong(self, load: Load, index: int) -> list[bytes]:
        """Return this rank's parts that have not the checksum of when they were offloaded."""
        if not (self._world.plan.verified and self.verifies(self.rank)):
            return []
        sums = unpack_sums(load.checksums[index])
        self._world.marks["part verified"] += len(self.parts)
        self._world.marks["part verified by another rank"] += self.rank > 0
        return [
            content
            for part, content in self.held(load.blocks[index])
            if self.compares(part) and block_checksum(content) != sums[part]
        ]

    def compares(self, _part: int) -> bool:
        """Return whether a part is compared; a plant leaves one out."""
        return True

    def verifies(self, _rank: int) -> bool:
        """Return whether a rank compares what it loads; a plant makes one careless."""
        return True

    def _end(self, result: LoadResult, ended: Ended) -> None:
        self.loading -= 1
        if result.reason:
            self._world.marks[f"load failed: {result.reason}"] += 1
        ended(result)


def _failed(load: Load, reason: str) -> LoadResult:
    return LoadResult(load, (False,) * len(load.blocks), (), reason)
