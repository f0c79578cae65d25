"""A private stack with sim engines on it, for the integration tests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from kvbm_cli.demo.check import StackView
from kvbm_cli.demo.command import DemoOptions
from kvbm_cli.stack import Stack
from kvbm_common.nats.bus import Bus
from kvbm_common.runtime.metrics import Metrics
from kvbm_connectors.sim.control import Finished
from kvbm_connectors.sim.driver import EngineHandle, run_turns
from kvbm_connectors.sim.workload import Turn, conversations

HIT_DEADLINE_S = 60.0


@dataclass(slots=True)
class Running:
    """Everything that a test talks to."""

    stack: Stack
    engines: list[EngineHandle]
    view: StackView
    finished: list[Finished] = field(default_factory=list)
    on_count: dict[int, Callable[[], None]] = field(default_factory=dict)
    """Called when so many requests have finished."""

    def take(self, _turn: Turn, finished: Finished) -> None:
        """A request is done."""
        self.finished.append(finished)
        action = self.on_count.get(len(self.finished))
        if action is not None:
            action()

    async def run(self, *, requests: int, seed: int = 1, prefix: str = "r") -> None:
        """Run a workload to its end."""
        await run_turns(
            self.engines,
            conversations(requests=requests, seed=seed),
            concurrency=8,
            on_finished=self.take,
            prefix=prefix,
        )

    async def work(self, done: asyncio.Event, *, requests: int = 30, rounds: int = 12) -> None:
        """Rounds of requests until it is enough; after so many the first comes back.

        What it asks for is no longer in the device then, and of many rounds not in host memory.
        """
        for turn in itertools.count(2):
            if done.is_set():
                return
            await self.run(requests=requests, seed=turn % rounds, prefix=f"w{turn}-")

    async def until_hit(self, *tiers: Literal["host", "disk"]) -> None:
        """Rounds of requests until a block comes back from one of these tiers.

        Under pressure a tier keeps what it can, so what one round hits is chance. Raises
        TimeoutError.
        """
        before = len(self.finished)
        async with asyncio.timeout(HIT_DEADLINE_S):
            for turn in itertools.count(1):
                await self.run(requests=30, seed=turn % 4, prefix=f"until{before}-{turn}-")
                served = self.finished[before:]
                if any(getattr(one, f"{tier}_blocks") for one in served for tier in tiers):
                    return

    def mismatches(self) -> int:
        """Onboarded blocks that did not hold what they must."""
        return sum(finished.mismatches for finished in self.finished)

    def errors(self) -> set[str]:
        """What requests have failed with."""
        return {finished.error for finished in self.finished} - {""}


@asynccontextmanager
async def running(
    overrides: Mapping[str, object],
    *,
    engines: int = 2,
    tensor_parallel: int = 1,
    nats_url: str | None = None,
) -> AsyncIterator[Running]:
    """Start a stack and engines; ends them in order."""
    options = DemoOptions(engines=engines, block_kib=64, tensor_parallel=tensor_parallel)
    async with AsyncExitStack() as cleanup:
        stack = await cleanup.enter_async_context(Stack.private(overrides, nats_url=nats_url))
        bus = await Bus.connect(stack.admin, "test", counters=Metrics(), deadline_s=5)
        cleanup.push_async_callback(bus.close)
        handles: list[EngineHandle] = []
        for number in range(engines):
            config = options.engine_config(number, stack.settings)
            assert stack.log_dir is not None
            engine = EngineHandle(config, log_path=stack.log_dir / f"{config.name}.log")
            cleanup.push_async_callback(engine.stop)
            handles.append(engine)
        assert all(await asyncio.gather(*(engine.start() for engine in handles)))
        yield Running(stack, handles, StackView(bus, stack.settings))
