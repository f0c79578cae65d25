"""The host tier where shared memory is small, full, or slow to come."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.errors import RequestFailed
from kvbm_common.memory import arena as arena_module
from kvbm_common.nats.bus import Bus
from kvbm_common.service.process import serve
from kvbm_host_tier.shell import service

from tests.services.host_tier.engine import DEADLINE_S, RealEngine
from tests.services.host_tier.helpers import hello
from tests.services.host_tier.running import living, stats_of, wait_ready
from tests.small_tmpfs import fill, free_bytes, small_tmpfs
from tests.waiting import wait_until

ROOM = 8 << 20
ARENA_BYTES = 4_000_000
LIMIT_S = 30.0


@pytest.fixture
def small(settings: Settings, tmp_path: Path) -> Iterator[Settings]:
    """An arena of 4 MB in a file system of 8 MB."""
    with small_tmpfs(tmp_path / "small", ROOM) as shm_dir:
        yield replace(settings, shm_dir=shm_dir, cpu_cache_gb=ARENA_BYTES / 1e9)


@asynccontextmanager
async def process(settings: Settings, *arguments: str) -> AsyncIterator[Process]:
    """A process with these settings; SIGKILL at the end."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments,
        env=os.environ | settings.as_environ(), stdin=PIPE, stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.mark.slow
async def test_a_file_system_that_fills_after_ready_ends_neither_side(small: Settings) -> None:
    """1. The host tier is ready. 2. Shared memory fills. 3. An engine attaches, which measures by

    reading the arena, stores ten blocks and loads them. 4. The host tier stops in order.
    """
    module = "tests.services.host_tier.unpopulated"
    async with asyncio.timeout(LIMIT_S), process(small, module, "host") as host:
        assert host.stdout is not None
        assert (await host.stdout.readline()).startswith(b"ready host-tier")
        fill(small.shm_dir)
        async with process(small, module, "engine") as engine:
            output, errors = await engine.communicate()
            assert (engine.returncode, output) == (0, b"loaded\n"), errors.decode()[-2000:]
        assert host.returncode is None
        host.send_signal(signal.SIGTERM)
        assert await host.wait() == 0
    assert [path.name for path in small.shm_dir.iterdir()] == ["filler"]


@pytest.mark.slow
async def test_too_little_space_is_an_error_that_says_what_to_set(small: Settings) -> None:
    """No signal, no traceback, nothing left."""
    small = replace(small, cpu_cache_gb=0.02)
    module = "kvbm_cli.main"
    async with asyncio.timeout(LIMIT_S), process(small, module, "serve", "host-tier") as host:
        _, errors = await host.communicate()
    assert host.returncode == 1
    last = errors.decode().strip().splitlines()[-1]
    for part in (f"20000000 bytes does not fit into {small.shm_dir}", f"{ROOM} bytes free",
                 "DYN_KVBM_CPU_CACHE_GB", "--shm-size"):  # fmt: skip
        assert part in last
    assert list(small.shm_dir.iterdir()) == []


async def test_a_number_of_blocks_that_does_not_fit_is_refused_with_the_reason(
    small: Settings, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the space runs out while it is allocated. The host tier serves on.

    The arena fits when shared memory has been emptied.
    """
    monkeypatch.setattr(arena_module, "_check_space", lambda *_: None)
    filler = fill(small.shm_dir)
    os.truncate(filler, ROOM - ARENA_BYTES // 2)
    free = free_bytes(small.shm_dir)
    blocks = 400
    half = hello(engine="bob", piece_bytes=8192)
    async with living(replace(small, cpu_cache_gb=0.0, cpu_cache_override_num_blocks=blocks)):
        await wait_ready(bus)
        engine = RealEngine(small)
        async with asyncio.timeout(DEADLINE_S):
            assert (await engine.refused(half)).code == "arena_pending"
            while (refused := await engine.refused(half)).code == "arena_pending":
                pass
        assert refused.code == "arena_refused"
        for part in (f"{blocks * 8192} bytes does not fit", f"{free} bytes free",
                     "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS"):  # fmt: skip
            assert part in refused.message
        # That hello has asked for the arena again.
        await wait_until(lambda: list(small.shm_dir.iterdir()) == [filler])
        filler.unlink()
        async with asyncio.timeout(DEADLINE_S):
            while (await engine.refused(half)).code != "agent":  # The last thing that is checked.
                pass
        await engine.attach()
        engine.close()


async def test_a_stop_is_heard_while_the_arena_is_allocated(
    settings: Settings, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A kernel that takes its time. 2. The event loop answers meanwhile. 3. Stopped: the end is

    in order and leaves no file.
    """
    allocating, go_on = threading.Event(), threading.Event()

    def slow(_address: int, _length: int) -> None:
        allocating.set()
        go_on.wait(DEADLINE_S)

    monkeypatch.setattr(arena_module, "make_huge", slow)
    monkeypatch.setattr(arena_module, "ALLOCATE_SLICE_BYTES", 65536)
    stopping = asyncio.Event()
    life = asyncio.create_task(serve("host-tier", service.serve, settings, stopping))
    await wait_until(allocating.is_set)
    with pytest.raises(RequestFailed) as caught:
        await stats_of(bus)
    assert caught.value.code == "not_ready"
    stopping.set()
    go_on.set()
    assert await life == 0
    assert list(settings.shm_dir.iterdir()) == []
