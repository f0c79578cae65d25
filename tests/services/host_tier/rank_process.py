"""Ranks in processes of their own: each has device memory and a worker half, and nothing else."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from kvbm_common.tier.parts import Share
from kvbm_common.wire.local import Region
from kvbm_connectors.client.worker import WorkerHalf
from kvbm_connectors.core.messages import Load
from numpy.typing import NDArray

from tests.services.host_tier.engine import DEVICE_BLOCKS
from tests.services.host_tier.helpers import NAMESPACE

DEADLINE_S = 60.0
"""A process has Python and NIXL to load."""


@dataclass(frozen=True)
class Outcome:
    """How a load has ended: which blocks were intact, and what is in the device blocks then."""

    intact: tuple[bool, ...]
    content: NDArray[np.uint8]
    """By layer, block and byte of what the rank holds of it."""


@dataclass(frozen=True)
class Task:
    """What a rank is."""

    endpoint: str
    engine: str
    incarnation: str
    rank: int
    world_size: int
    share: Share
    memory: NDArray[np.uint8]
    """By layer, block and byte."""


class RankProcess:
    """The process of one rank, as its engine sees it."""

    def __init__(self, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, task), daemon=True)
        self._process.start()
        theirs.close()

    async def wait_started(self) -> None:
        """Wait until its worker half says hello."""
        assert await self._received() == "started"

    def start_load(self, load: Load) -> None:
        """Have it load blocks."""
        self._pipe.send(load)

    async def outcome(self) -> Outcome:
        """Return how the load has ended."""
        outcome = await self._received()
        assert isinstance(outcome, Outcome), outcome
        return outcome

    async def _received(self) -> object:
        # The host tier that the rank talks to may be in this event loop.
        if not await asyncio.to_thread(self._pipe.poll, DEADLINE_S):
            raise TimeoutError("the rank does not answer")
        found: object = self._pipe.recv()
        return found

    def kill(self) -> None:
        """Kill it with signal 9, and wait until it is gone."""
        self._process.kill()
        self._process.join(DEADLINE_S)
        self._pipe.close()
        self._process.close()


def ranks_of(
    endpoint: str, engine: str, incarnation: str, shares: Sequence[Share],
    memories: Sequence[NDArray[np.uint8]],
) -> list[RankProcess]:  # fmt: skip
    """Start all ranks of an engine."""
    return [
        RankProcess(Task(endpoint, engine, incarnation, rank, len(shares), share, memory))
        for rank, (share, memory) in enumerate(zip(shares, memories, strict=True))
    ]


def _serve(pipe: Connection, task: Task) -> None:
    """Be a rank until the pipe ends."""
    memory = task.memory.copy()
    stride = memory.shape[2]
    regions = [
        Region(address=layer.ctypes.data, stride=stride, piece_bytes=stride, blocks=DEVICE_BLOCKS)
        for layer in memory
    ]
    news = threading.Semaphore(0)
    worker = WorkerHalf(
        engine=task.engine, incarnation=task.incarnation, namespace=NAMESPACE, regions=regions,
        host_tier_endpoint=task.endpoint, rank=task.rank, world_size=task.world_size,
        share=task.share, on_news=news.release,
    )  # fmt: skip
    worker.start()
    pipe.send("started")
    while True:
        try:
            load: Load = pipe.recv()
        except EOFError:
            break
        worker.start_load(load)
        while not (ended := worker.drain_ended()):
            news.acquire(timeout=DEADLINE_S)
        [result] = ended
        pipe.send(Outcome(result.intact, memory[:, list(load.blocks)]))
    worker.close()
