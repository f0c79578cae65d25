"""Waiting for something that nobody announces, with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


async def wait_until(
    condition: Callable[[], object], *, deadline_s: float = 10.0, poll_s: float = 0.002
) -> None:
    """Look again until the condition holds; raises TimeoutError."""
    async with asyncio.timeout(deadline_s):
        while not (found := condition()):  # noqa: ASYNC110 - what is waited for has no event.
            await asyncio.sleep(poll_s)
    assert not isinstance(found, Awaitable), "a question that is awaited belongs to `ask_until`"


async def ask_until(
    ask: Callable[[], Awaitable[T | None]],
    *,
    deadline_s: float = 10.0,
    poll_s: float = 0.01,
    despite: type[Exception] | None = None,
) -> T:
    """Ask again until the answer is true, and return it; raises TimeoutError.

    An error of `despite` counts as "not yet".
    """
    async with asyncio.timeout(deadline_s):
        while True:
            with contextlib.suppress(despite) if despite else contextlib.nullcontext():
                if answer := await ask():
                    return answer
            await asyncio.sleep(poll_s)


def wait_for(
    condition: Callable[[], object],
    what: str | Callable[[], str] = "the condition does not hold",
    *,
    deadline_s: float = 10.0,
    poll_s: float = 0.002,
) -> None:
    """Look again until other threads or processes have made the condition true.

    Raises TimeoutError with `what` after the deadline.
    """
    give_up_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > give_up_s:
            raise TimeoutError(what() if callable(what) else what)
        time.sleep(poll_s)


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def stop_child(pid: int, *, deadline_s: float = 10.0) -> None:
    """Stop a child process, and return when all of its threads stand still.

    The signal alone is not enough: a thread on another processor goes on for a moment.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + deadline_s
    while os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is None:
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)
