"""The driver and a sim engine's process: requests, the engine's death, and the driver's own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from kvbm_connectors.sim.control import EngineConfig, Finished, Submit
from kvbm_connectors.sim.driver import (
    STOP_DEADLINE_S,
    EngineDied,
    EngineHandle,
    run_turns,
    stop_all,
)
from kvbm_connectors.sim.workload import Turn

from tests.waiting import lives, wait_until

PROMPT = np.arange(64, dtype=np.uint32)


def config_of(directory: Path) -> EngineConfig:
    """An engine without a connector: it needs no service."""
    return EngineConfig(
        name="sim-0", directory=str(directory), host_tier_endpoint="", consolidator_endpoint="",
        block_bytes=4096, block_count=16, prefill_us_per_token=1.0, connector=False,
    )  # fmt: skip


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EngineHandle]:
    engine = EngineHandle(config_of(tmp_path))
    await engine.start()
    yield engine
    await engine.stop()


def submit(request: str, prompt: np.ndarray = PROMPT) -> Submit:
    return Submit(request=request, prompt=prompt.tobytes())


async def test_a_request_is_computed_and_its_prefix_found_again(engine: EngineHandle) -> None:
    """Four blocks; of the same prompt again all but the last, which has a token to compute."""
    first = await engine.request(submit("a"))
    assert (first.blocks, first.device_blocks, first.error) == (4, 0, "")
    assert (await engine.request(submit("b"))).device_blocks == 3
    assert len(await engine.dump()) == 4
    assert await engine.reset()
    assert await engine.dump() == set()
    assert (await engine.request(submit("c"))).device_blocks == 0
    assert (await engine.stats()).idle


async def test_an_engine_that_ends_leaves_no_file(tmp_path: Path) -> None:
    engine = EngineHandle(config_of(tmp_path))
    await engine.start()
    assert "sim-0.sock" in os.listdir(tmp_path)
    await engine.stop()
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".sock")]


@pytest.mark.slow
async def test_engines_that_hang_are_ended_side_by_side(tmp_path: Path) -> None:
    """Goal: a demo that is ended does not wait for one engine after the other.

    Each has a deadline for its answer and one for its end, and is killed then.
    """
    engines = [
        EngineHandle(msgspec.structs.replace(config_of(tmp_path), name=f"sim-{number}"))
        for number in range(3)
    ]
    await asyncio.gather(*(engine.start() for engine in engines))
    for engine in engines:
        os.kill(engine.pid, signal.SIGSTOP)
    pids, begun_s = [engine.pid for engine in engines], time.monotonic()
    await stop_all(engines, deadline_s=0.2)
    assert time.monotonic() - begun_s < 2 * STOP_DEADLINE_S
    assert not any(lives(pid) for pid in pids)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".sock")]


async def test_a_late_answer_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: a demo that is ended while engines start shows its user nothing of its insides.

    Method: the question `stats` is given up; its answer comes before that to `stop`.
    """
    engine = EngineHandle(config_of(tmp_path))
    await engine.start()
    os.kill(engine.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.stats(), 0.1)
    os.kill(engine.pid, signal.SIGCONT)
    await engine.stop()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_engines_whose_stop_is_broken_off_are_killed(tmp_path: Path) -> None:
    """A second signal ends a demo at once: nothing of it stays, not even what hangs."""
    engine = EngineHandle(config_of(tmp_path))
    await engine.start()
    os.kill(pid := engine.pid, signal.SIGSTOP)
    stopping = asyncio.create_task(stop_all([engine]))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(stopping), 0.1)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await wait_until(lambda: not lives(pid))
    await engine.kill()  # Its exit is heard before the loop ends.


async def test_an_engine_whose_start_is_broken_off_is_killed(tmp_path: Path) -> None:
    """Goal: an engine that no one has got yet keeps neither process nor socket."""
    engine = EngineHandle(config_of(tmp_path))
    starting = asyncio.create_task(engine.start())
    await wait_until(lambda: engine.pid)
    pid = engine.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not lives(pid)
    await engine.stop()  # As those do who stop all engines that they have named.


@pytest.mark.slow
async def test_an_engine_whose_stop_fails_keeps_no_other_from_its_end(tmp_path: Path) -> None:
    class Broken(EngineHandle):
        async def stop(self, *, deadline_s: float = STOP_DEADLINE_S) -> None:
            await super().stop(deadline_s=deadline_s)
            raise EngineDied("it is broken")

    broken, engine = Broken(config_of(tmp_path)), EngineHandle(config_of(tmp_path))
    await engine.start()
    os.kill(pid := engine.pid, signal.SIGSTOP)
    with pytest.raises(EngineDied, match="it is broken"):
        await stop_all([broken, engine])
    assert not lives(pid)


@pytest.mark.slow
async def test_a_prompt_that_cannot_fit_is_an_error_of_its_own(engine: EngineHandle) -> None:
    assert (await engine.request(submit("empty", PROMPT[:0]))).error
    assert (await engine.request(submit("large", np.arange(999, dtype=np.uint32)))).error
    assert not (await engine.request(submit("fits"))).error


async def test_turns_of_a_conversation_run_in_order(engine: EngineHandle) -> None:
    turns = [Turn(number % 2, PROMPT, PROMPT[:0]) for number in range(8)]
    ended: list[str] = []

    def on_finished(_turn: Turn, finished: Finished) -> None:
        ended.append(finished.request)

    await run_turns([engine], turns, concurrency=4, on_finished=on_finished)
    for conversation in (0, 1):
        mine = [name for name in ended if int(name[1:]) % 2 == conversation]
        assert mine == sorted(mine)
    assert len(ended) == 8


async def test_a_load_has_as_many_tasks_as_run_at_a_time(engine: EngineHandle) -> None:
    """Goal: a demo of 20,000 requests ends at a signal: no tasks of turns have to be ended first.

    First turns go before second ones, as they did when each turn was a task in a queue.
    """
    turns = [Turn(number // 2, PROMPT, PROMPT[:0]) for number in range(64)]
    ended: list[int] = []
    most = 0

    def on_finished(_turn: Turn, finished: Finished) -> None:
        nonlocal most
        ended.append(int(finished.request[1:]))
        most = max(most, len(asyncio.all_tasks()))

    before = len(asyncio.all_tasks())
    await run_turns([engine], turns, concurrency=1, on_finished=on_finished)
    assert ended == [*range(0, 64, 2), *range(1, 64, 2)]
    assert most <= before + 1


async def test_a_load_on_an_engine_that_dies_ends_with_that_error(engine: EngineHandle) -> None:
    """Goal: a demo whose engine is killed says so in a line: no traceback of eight requests."""
    turns = [Turn(number, PROMPT, PROMPT[:0]) for number in range(64)]

    def on_finished(_turn: Turn, _finished: Finished) -> None:
        if engine.pid:
            os.kill(engine.pid, signal.SIGKILL)

    with pytest.raises(EngineDied, match=r"^sim-0 ended with -9$"):
        await run_turns([engine], turns, concurrency=4, on_finished=on_finished)


async def test_a_killed_engine_ends_every_request(engine: EngineHandle) -> None:
    """Those that run, and those that come after."""
    slow = np.arange(250, dtype=np.uint32)
    waiting = [asyncio.create_task(engine.request(submit(f"r{i}", slow))) for i in range(50)]
    await waiting[0]
    await engine.kill()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(end, Finished | EngineDied) for end in ended)
    with pytest.raises(EngineDied):
        await engine.request(submit("late"))


DRIVER = """
import asyncio, sys, msgspec
from kvbm_connectors.sim.control import EngineConfig
from kvbm_connectors.sim.driver import EngineHandle

async def main():
    engine = EngineHandle(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    await engine.start()
    print(engine._process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_an_engine_does_not_outlive_its_driver(tmp_path: Path) -> None:
    """kill -9 of the driver: the kernel tells the engine."""
    config = msgspec.json.encode(config_of(tmp_path)).decode()
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, config, stdout=asyncio.subprocess.PIPE
    )
    assert driver.stdout is not None
    pid = int(await driver.stdout.readline())
    assert lives(pid)
    os.kill(driver.pid, signal.SIGKILL)
    await driver.wait()
    await wait_until(lambda: not lives(pid))
