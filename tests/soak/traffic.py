"""The traffic of a soak: sim engines that come, go and are killed, and many that stay a moment."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from kvbm_cli.demo.command import DemoOptions
from kvbm_cli.stack import Stack
from kvbm_common.errors import KvbmError
from kvbm_connectors.sim.control import Finished, Submit
from kvbm_connectors.sim.driver import EngineDied, EngineHandle
from kvbm_connectors.sim.workload import Turn, conversations

from benchmarks.probe import Probe

RESIDENTS = 2
ROUND_REQUESTS, ROUNDS = 40, 3
"""A round of conversations has a seed; the first comes back after so many. There are few different
blocks, so that what is remembered of blocks is full soon."""
REQUESTS_PER_S = 6.0
IN_FLIGHT_MAX = 12
VISITS_PER_S = 4.0
VISIT_BLOCKS, VISIT_CHAINS = 4, 16
MOVE_S = (12.0, 25.0)
"""A resident is replaced after a time between these."""


class Request(NamedTuple):
    """One request that has ended."""

    at_s: float
    finished: Finished


class Look(NamedTuple):
    """One lookup of the onlooker."""

    at_s: float
    took_ms: float
    ping_ms: float
    blocks: int
    work_us: float


class Traffic:
    """All engines of a soak; `run` until it is cancelled."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self.engines = 0
        """Engines that have come."""
        self.requests: list[Request] = []
        self.looks: list[Look] = []
        self.troubles: Counter[str] = Counter()
        """What went wrong for engines, by kind: most of it is meant."""
        self.residents: list[EngineHandle] = []
        self._stack, self._seed = stack, seed
        self._rng = random.Random(seed)
        self._options = DemoOptions(engines=RESIDENTS, block_kib=64)
        self._names = itertools.count()

    async def run(self) -> None:
        """Keep everything going; ends with its cancellation."""
        self.residents = [await self._come() for _ in range(RESIDENTS)]
        try:
            async with asyncio.TaskGroup() as tasks:
                for one in (self._work, self._visit, self._move, self._look):
                    tasks.create_task(one(), name=one.__name__)
        finally:
            for engine in self.residents:
                await engine.stop()

    async def _come(self) -> EngineHandle:
        name = f"sim-{next(self._names)}"
        config = self._options.engine_config(0, self._stack.settings, name=name)
        assert self._stack.log_dir is not None
        engine = EngineHandle(config, log_path=self._stack.log_dir / "engines.txt")
        self.engines += 1
        try:
            if not await engine.start():
                self.troubles["not attached"] += 1
        except KvbmError as error:
            self.troubles[f"start: {error.code}"] += 1
        return engine

    async def _move(self) -> None:
        """Replace a resident now and then, half of the times after a kill."""
        while True:
            await asyncio.sleep(self._rng.uniform(*MOVE_S))
            number = self._rng.randrange(RESIDENTS)
            gone, self.residents[number] = self.residents[number], await self._come()
            try:
                if self._rng.random() < 0.5:
                    await gone.kill()
            finally:
                await gone.stop()
            self._tidy(gone.config.name)

    def _tidy(self, name: str) -> None:
        """Remove the sockets of an engine that is gone: a killed one cannot."""
        for path in self._stack.settings.runtime_dir.glob(f"{name}[.-]*"):
            path.unlink(missing_ok=True)

    async def _work(self) -> None:
        """Send requests at their pace, each conversation to one engine."""
        places = asyncio.Semaphore(IN_FLIGHT_MAX)
        async with asyncio.TaskGroup() as tasks:
            began_s = time.monotonic()
            for number, turn in enumerate(self._turns()):
                due_s = began_s + number / REQUESTS_PER_S
                if (ahead_s := due_s - time.monotonic()) > 0:
                    await asyncio.sleep(ahead_s)
                else:
                    began_s -= ahead_s  # A pace, not a debt.
                await places.acquire()
                task = tasks.create_task(self._request(turn, number))
                task.add_done_callback(lambda _: places.release())

    def _turns(self) -> Iterator[Turn]:
        for number in itertools.count():
            seed = self._seed * ROUNDS + number % ROUNDS
            yield from conversations(requests=ROUND_REQUESTS, seed=seed)

    async def _request(self, turn: Turn, number: int) -> None:
        engine = self.residents[turn.conversation % RESIDENTS]
        submit = Submit(
            request=f"r{number}", prompt=turn.prompt.tobytes(), outputs=turn.outputs.tobytes()
        )
        try:
            finished = await engine.request(submit)
        except (EngineDied, KvbmError) as error:
            self.troubles[f"request: {error.code}"] += 1
        else:
            self.requests.append(Request(time.monotonic(), finished))

    async def _visit(self) -> None:
        """Have an engine come, offer and look up some blocks, and go, again and again."""
        while True:
            began_s = time.monotonic()
            self.engines += 1
            try:
                await asyncio.to_thread(self._stay, f"visit-{next(self._names)}")
            except (TimeoutError, AssertionError, KvbmError) as error:
                self.troubles[f"visit: {type(error).__name__}"] += 1
            await asyncio.sleep(max(0.0, began_s + 1 / VISITS_PER_S - time.monotonic()))

    def _stay(self, name: str) -> None:
        probe = Probe(self._stack.settings, name, block_bytes=65_536, block_count=VISIT_BLOCKS,
                      deadline_ms=2_000)  # fmt: skip
        with contextlib.closing(probe):
            probe.start()
            names = probe.chain(self.engines % VISIT_CHAINS, VISIT_BLOCKS)
            probe.offload(names)
            probe.lookup(name, names)
            probe.scheduler.forget(name)

    async def _look(self) -> None:
        """Take the lookups of the onlooker, which has a process of its own."""
        self.engines += 1
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.soak.onlooker",
            env=os.environ | self._stack.settings.as_environ(),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                at_s, took_ms, ping_ms, blocks, work_us = line.split()
                look = Look(
                    float(at_s), float(took_ms), float(ping_ms), int(blocks), float(work_us)
                )
                self.looks.append(look)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
