"""The NATS of a stack: what becomes of it when its streams cannot be made, or when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from kvbm_cli import nats_process
from kvbm_cli.nats_process import NatsProcess
from kvbm_common.errors import DeadlineExceeded, ServiceFailed
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.jetstream import JetStreamError

from tests.waiting import wait_until

FULL = JetStreamError("insufficient storage resources available", 10047)
LATE = DeadlineExceeded("no answer within 5 s")
SLOW = 20.0
"""A bound in seconds for what takes less than one; the deadline of a connection is 60."""


def process_of(
    directory: Path, make_streams: Callable[[], Awaitable[None]], *, restart: bool = True
) -> NatsProcess:
    return NatsProcess(NatsServer(directory), restart=restart, make_streams=make_streams)


@pytest.mark.parametrize("error", [FULL, LATE])
async def test_a_nats_whose_streams_cannot_be_made_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:  # fmt: skip
    """Goal: on a full disk, NATS serves what it has, and its streams are tried again alone."""
    monkeypatch.setattr(nats_process, "STREAMS_PAUSE_S", 0.01)
    pids: list[int] = []

    async def make_streams() -> None:
        pids.append(nats.pid)
        if 1 < len(pids) < 5:
            raise error

    nats = process_of(tmp_path / "nats", make_streams)
    await nats.start()
    os.kill(nats.pid, signal.SIGKILL)
    await wait_until(lambda: len(pids) == 5, deadline_s=SLOW)
    assert len(set(pids[1:])) == 1, "each try has another server"
    assert nats.pid == pids[-1]
    assert caplog.text.count("nats-server has ended") == 1
    assert caplog.text.count(f"its streams could not be made: {error}") == 3
    assert "cannot be started" not in caplog.text
    await nats.stop(deadline_s=1.0)


@pytest.mark.slow
async def test_a_nats_that_ends_before_it_has_its_streams_is_restarted_at_once(
    tmp_path: Path,
) -> None:
    """Goal: nothing waits for a connection to a server that is dead."""
    lives = 0

    async def make_streams() -> None:
        nonlocal lives
        lives += 1
        if lives == 2:
            await asyncio.Event().wait()

    nats = process_of(tmp_path / "nats", make_streams)
    await nats.start()
    os.kill(nats.pid, signal.SIGKILL)
    await wait_until(lambda: lives == 2, deadline_s=SLOW)
    os.kill(nats.pid, signal.SIGKILL)
    await wait_until(lambda: lives == 3, deadline_s=SLOW)
    await nats.stop(deadline_s=1.0)


async def test_a_nats_that_ends_in_its_first_start_is_an_error_at_once(tmp_path: Path) -> None:
    """Goal: `kvbm up` ends with the path of the log."""

    async def make_streams() -> None:
        os.kill(nats.pid, signal.SIGKILL)
        await asyncio.Event().wait()

    nats = process_of(tmp_path / "nats", make_streams, restart=False)
    with pytest.raises(ServiceFailed, match=r"ended before it had its streams.*nats-server\.log"):
        async with asyncio.timeout(SLOW):
            await nats.start()
    await nats.stop(deadline_s=1.0)


async def test_a_stop_ends_the_tries_for_streams(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: a stop waits for no pause, and leaves no process."""
    lives = 0

    async def make_streams() -> None:
        nonlocal lives
        lives += 1
        if lives > 1:
            raise FULL

    nats = process_of(tmp_path / "nats", make_streams)
    await nats.start()
    os.kill(nats.pid, signal.SIGKILL)
    await wait_until(lambda: "streams could not be made" in caplog.text, deadline_s=SLOW)
    await nats.stop(deadline_s=1.0)
    assert nats.pid == 0
