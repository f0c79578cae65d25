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

LATE = 0.1
"""A look is later than what it waits for by this part of the wait at most: who waits for long looks
less often, and leaves the processor to what it waits for."""
LOOK_S_MAX = 0.01
"""The longest pause before a look, which costs nothing."""
ASK_S_MAX = 0.05
"""The longest pause before a question, which others answer."""


async def wait_until(
    condition: Callable[[], object], *, deadline_s: float = 10.0, poll_s: float = 0.002
) -> None:
    """Look again until the condition holds; raises TimeoutError."""
    begun_s = time.monotonic()
    async with asyncio.timeout(deadline_s):
        while not (found := condition()):  # noqa: ASYNC110 - what is waited for has no event.
            await asyncio.sleep(_pause_s(begun_s, poll_s, LOOK_S_MAX))
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
    begun_s = time.monotonic()
    async with asyncio.timeout(deadline_s):
        while True:
            with contextlib.suppress(despite) if despite else contextlib.nullcontext():
                if answer := await ask():
                    return answer
            await asyncio.sleep(_pause_s(begun_s, poll_s, ASK_S_MAX))


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
    begun_s = time.monotonic()
    while not condition():
        if time.monotonic() > begun_s + deadline_s:
            raise TimeoutError(what() if callable(what) else what)
        time.sleep(_pause_s(begun_s, poll_s, LOOK_S_MAX))


def _pause_s(begun_s: float, least_s: float, most_s: float) -> float:
    """Return the pause before the next look of a wait that began then."""
    return max(least_s, min(LATE * (time.monotonic() - begun_s), most_s))


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
