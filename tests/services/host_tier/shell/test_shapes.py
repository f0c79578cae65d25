"""Engines of several shapes on one host tier, over real NIXL: a worker half for each rank."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.nats.bus import Bus
from kvbm_common.tier.parts import Grid, Share
from kvbm_common.wire.local import Found, Hello, Region, Welcome
from kvbm_connectors.client.worker import WorkerHalf
from kvbm_connectors.core.answers import checksums_of
from kvbm_connectors.core.messages import Load, LoadResult
from numpy.typing import NDArray

from tests.services.host_tier.engine import BLOCK_BYTES, DEADLINE_S, DEVICE_BLOCKS, RealEngine
from tests.services.host_tier.helpers import NAMESPACE, name
from tests.services.host_tier.rank_process import Outcome, ranks_of
from tests.services.host_tier.running import held as blocks_held
from tests.services.host_tier.running import stats_of
from tests.sim.shapes import shape

GRID = Grid(ranges=2, layers=2, heads=4)
RUN_BYTES = BLOCK_BYTES // GRID.run_count

SHAPES = {
    "tp1": shape(GRID),
    "tp2": shape(GRID, ranks=2),
    "tp4": shape(GRID, ranks=4),
    "pp2": shape(GRID, stages=2),
    "pp2 tp2": shape(GRID, stages=2, ranks=2),
    "two alike": shape(GRID, replicas=2),
    "tp8 of four heads": shape(GRID, ranks=4, replicas=2),
}


class Rank:
    """One rank: its device memory, and its worker half."""

    def __init__(self, engine: ShapedEngine, settings: Settings, rank: int) -> None:
        self.share = engine.shares[rank]
        layers = (self.share.end_range - self.share.first_range) * GRID.layers
        row_bytes = (self.share.end_head - self.share.first_head) * RUN_BYTES
        self.memory = np.zeros((layers, DEVICE_BLOCKS, row_bytes), dtype=np.uint8)
        regions = [
            Region(address=layer.ctypes.data, stride=row_bytes, piece_bytes=row_bytes,
                   blocks=DEVICE_BLOCKS)
            for layer in self.memory
        ]  # fmt: skip
        self.worker = WorkerHalf(
            engine=engine.engine, incarnation=engine.incarnation, namespace=NAMESPACE,
            regions=regions, host_tier_endpoint=settings.host_tier_endpoint, rank=rank,
            world_size=len(engine.shares), share=self.share, on_news=engine.ring,
        )  # fmt: skip

    def of(self, contents: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """What this rank has of blocks [block, byte], as it lies in its memory."""
        return held(self.share, contents)


def held(share: Share, contents: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What a rank has of blocks [block, byte]: by layer, block and byte."""
    runs = contents.reshape(len(contents), -1, GRID.heads, RUN_BYTES)
    layers = slice(share.first_range * GRID.layers, share.end_range * GRID.layers)
    mine = runs[:, layers, share.first_head : share.end_head].transpose(1, 0, 2, 3)
    return np.ascontiguousarray(mine).reshape(len(mine), len(contents), -1)


class ShapedEngine(RealEngine):
    """An engine of several ranks. `memory` is what its device blocks hold together."""

    def __init__(self, settings: Settings, shares: Sequence[Share], *, engine: str) -> None:
        super().__init__(settings, engine=engine)
        self.worker.close()
        self.shares = shares
        self.ended = asyncio.Event()
        self._running = asyncio.get_running_loop()
        self.ranks = [Rank(self, settings, rank) for rank in range(len(shares))]
        for rank in self.ranks:
            rank.memory[:] = rank.of(self.memory)

    def ring(self) -> None:
        """Take note that a worker half has news."""
        self._running.call_soon_threadsafe(self.ended.set)

    def hello(self) -> Hello:
        """The scheduler half's introduction."""
        return Hello(engine=self.engine, incarnation=self.incarnation, role="scheduler",
                     namespace=NAMESPACE, world_size=len(self.shares))  # fmt: skip

    async def attach_all(self) -> None:
        """Introduce every half."""
        for rank in self.ranks:
            rank.worker.start()
        await self.greet()

    async def load_all(self, found: Found, *blocks: int) -> list[LoadResult]:
        """Pull what was found into device blocks of every rank."""
        load = Load("r", found.epoch, found.lease, tuple(found.slots), blocks,
                    tuple(name(i) for i in range(len(blocks))), checksums_of(found),
                    found.block_bytes, 2**60)  # fmt: skip
        for rank in self.ranks:
            rank.worker.start_load(load)
        results: list[LoadResult] = []
        async with asyncio.timeout(DEADLINE_S):
            while True:
                self.ended.clear()
                for rank in self.ranks:
                    results += rank.worker.drain_ended()
                if len(results) == len(self.ranks):
                    return results
                await self.ended.wait()

    def close(self) -> None:
        """Fall silent."""
        for rank in self.ranks:
            rank.worker.close()
        super().close()


@pytest.mark.slow
@pytest.mark.parametrize("writer", SHAPES)
async def test_what_one_shape_stores_every_other_reads(
    host: None, settings: Settings, bus: Bus, writer: str
) -> None:
    """Goal: byte for byte, verified by every rank; of ranks that hold the same, one is pulled.

    1. One engine stores two blocks. 2. An engine of every shape loads them.
    """
    source = ShapedEngine(settings, SHAPES[writer], engine="writer")
    try:
        await source.attach_all()
        await source.store(bus, 1, 2)
        expected = source.memory[1:3]
        await source.release(await source.found(1, 2))
        assert (await stats_of(bus)).figures["bytes.d2h"] == 2 * BLOCK_BYTES
    finally:
        source.close()
    for number, shares in enumerate(SHAPES.values()):
        reader = ShapedEngine(settings, shares, engine=f"reader-{number}")
        try:
            await reader.attach_all()
            found = await reader.found(1, 2)
            assert found.block_bytes == BLOCK_BYTES
            assert len(found.part_sums) == 2 * 8 * GRID.count
            results = await reader.load_all(found, 11, 12)
            assert [one.intact for one in results] == [(True, True)] * len(shares)
            for rank in reader.ranks:
                assert np.array_equal(rank.memory[:, 11:13], rank.of(expected)), rank.share
                assert rank.worker.counts["verified_blocks"] == 2
            await reader.release(found)
        finally:
            reader.close()


# --- ranks in processes of their own --------------------------------------------------------------


class ProcessEngine(RealEngine):
    """An engine whose ranks are processes. `memory` is what its device blocks hold together."""

    def __init__(self, settings: Settings, shares: Sequence[Share], *, life: int = 1) -> None:
        super().__init__(settings, engine="far", life=life)
        self.worker.close()
        self.shares = shares
        memories = [held(share, self.memory) for share in shares]
        endpoint = settings.host_tier_endpoint
        self.ranks = ranks_of(endpoint, self.engine, self.incarnation, shares, memories)

    def hello(self) -> Hello:
        """The scheduler half's introduction."""
        return Hello(engine=self.engine, incarnation=self.incarnation, role="scheduler",
                     namespace=NAMESPACE, world_size=len(self.shares))  # fmt: skip

    async def greet(self) -> Welcome:
        """Introduce the scheduler half, once the ranks say hello."""
        for rank in self.ranks:
            await rank.wait_started()
        return await super().greet()

    async def load_all(self, found: Found, *blocks: int) -> list[Outcome]:
        """Have every rank load what was found."""
        load = Load("r", found.epoch, found.lease, tuple(found.slots), blocks,
                    tuple(name(i) for i in range(len(blocks))), checksums_of(found),
                    found.block_bytes, 2**60)  # fmt: skip
        for rank in self.ranks:
            rank.start_load(load)
        return [await rank.outcome() for rank in self.ranks]

    def close(self) -> None:
        """Fall silent, as if killed."""
        for rank in self.ranks:
            rank.kill()
        super().close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "readers"), [("pp2 tp2", ["tp1", "two alike"]), ("two alike", ["tp4"])]
)
async def test_ranks_in_processes_read_what_others_have_written(
    host: None, settings: Settings, bus: Bus, writer: str, readers: Sequence[str]
) -> None:
    """Goal: nothing but the arena and the wire is between the ranks.

    1. The processes of one engine are killed once two blocks are stored. 2. Those of other shapes
    load and verify them.
    """
    source = ProcessEngine(settings, SHAPES[writer])
    await source.greet()
    await source.store(bus, 1, 2)
    await source.release(await source.found(1, 2))
    assert (await stats_of(bus)).figures["bytes.d2h"] == 2 * BLOCK_BYTES
    source.close()
    for life, shape_name in enumerate(readers, 2):
        reader = ProcessEngine(settings, SHAPES[shape_name], life=life)
        try:
            await reader.greet()
            outcomes = await reader.load_all(await reader.found(1, 2), 11, 12)
            for share, outcome in zip(reader.shares, outcomes, strict=True):
                assert outcome.intact == (True, True), share
                assert np.array_equal(outcome.content, held(share, source.memory[1:3])), share
        finally:
            reader.close()


@pytest.mark.slow
async def test_a_rank_that_is_killed_leaves_no_half_of_a_block(
    host: None, settings: Settings, bus: Bus
) -> None:
    """1. Two ranks are attached; one is killed, and blocks are offered: none is stored. 2. The
    engine's next life stores the same blocks, and their bytes are its own."""
    first = ProcessEngine(settings, SHAPES["tp2"])
    await first.greet()
    first.ranks.pop().kill()
    pulled = await first.publish(bus, first.offer(1, 2))
    assert (pulled.pulled, pulled.confirm) == (0, False)
    assert await blocks_held(bus) == set()
    first.close()
    second = ProcessEngine(settings, SHAPES["tp2"], life=2)
    try:
        await second.greet()
        await second.store(bus, 1, 2)
        outcomes = await second.load_all(await second.found(1, 2), 11, 12)
        for share, outcome in zip(second.shares, outcomes, strict=True):
            assert outcome.intact == (True, True)
            assert np.array_equal(outcome.content, held(share, second.memory[1:3]))
    finally:
        second.close()
