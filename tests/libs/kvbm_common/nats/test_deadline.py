"""A deadline that holds for a call which swallows cancellations."""

from __future__ import annotations

import asyncio

import pytest
from kvbm_common.nats.deadline import within


async def test_a_call_that_swallows_a_cancellation_ends() -> None:
    """It is cancelled again; the caller has a TimeoutError."""
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if swallowed == 2:
                    raise
                swallowed += 1

    with pytest.raises(TimeoutError):
        await within(stubborn(), 0.01)
    assert swallowed == 2


async def test_an_error_in_time_is_raised() -> None:
    """Of the call itself."""

    async def broken() -> None:
        raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        await within(broken(), 5.0)
