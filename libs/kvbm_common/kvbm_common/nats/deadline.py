"""A deadline for calls of the client library, which may take a cancellation for one of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

CANCEL_AGAIN_S = 0.1
"""A call that goes on after it was cancelled is cancelled again so much later."""


async def within(call: Coroutine[Any, Any, None], deadline_s: float) -> None:
    """Wait for a call of the library; raises TimeoutError after the deadline.

    The library swallows a cancellation that comes while it ends tasks of its own, and would then
    try to connect without an end. So the call is cancelled until it ends.
    """
    task = asyncio.create_task(call)
    try:
        await asyncio.wait({task}, timeout=deadline_s)
    finally:
        is_late = not task.done()
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
    if is_late:
        raise TimeoutError
    task.result()
