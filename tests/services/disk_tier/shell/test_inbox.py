"""The way into a busy core: late, and never left out."""

from __future__ import annotations

import asyncio
import logging

import pytest
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.loop import CoreLoop
from kvbm_disk_tier.shell.inbox import hand_in

from tests.waiting import wait_until


class Recorder:
    """A core that wants nothing done."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def step(self, event: str, _now_ms: int) -> list[str]:
        self.seen.append(event)
        return []


async def test_what_finds_no_room_waits_and_is_handed_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1. The inbox is full for longer than a deadline: a warning says what waits. 2. There is room,
    and the core has it."""
    monkeypatch.setattr("kvbm_disk_tier.shell.inbox.INBOX_DEADLINE_S", 0.001)
    core = Recorder()
    loop = CoreLoop[str, str](core, lambda _: None, inbox_size=1)
    assert loop.offer_nowait("1")
    log = OncePerKind(logging.getLogger(__name__))
    waiting = asyncio.create_task(hand_in(loop, "2", log, "a snapshot"))
    await wait_until(lambda: "a snapshot waits" in caplog.text)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(loop.run())
        await waiting
        await wait_until(lambda: core.seen == ["1", "2"])
        running.cancel()
