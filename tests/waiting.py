"""Waiting for something that nobody announces, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path


async def wait_until(condition: Callable[[], object], *, deadline_s: float = 10.0) -> None:
    """Look again until the condition holds; raises TimeoutError."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event.
            await asyncio.sleep(0.002)


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
