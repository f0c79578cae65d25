"""Lanes: who gets one, in which order, and that none is lost."""

from __future__ import annotations

import asyncio

import pytest
from kvbm_common.errors import DeadlineExceeded
from kvbm_disk_tier.objects.shell.lanes import Lanes


async def test_reads_go_first_and_writes_take_half() -> None:
    """Four lanes: two writes run, the third waits though two lanes are free."""
    lanes = Lanes(4)
    writes = [await lanes.take(write=True, deadline_s=1) for _ in range(2)]
    third = asyncio.create_task(lanes.take(write=True, deadline_s=1))
    reads = [await lanes.take(write=False, deadline_s=1) for _ in range(2)]
    waiting_read = asyncio.create_task(lanes.take(write=False, deadline_s=1))
    await asyncio.sleep(0)
    lanes.give(writes[0])
    assert await waiting_read == writes[0], "the read came later, and goes first"
    assert not third.done()
    lanes.give(reads[0])
    assert await third == reads[0]
    assert lanes.taken_count == 4


async def test_a_wait_ends_by_its_deadline_and_leaves_nothing() -> None:
    """Who has given up is passed over."""
    lanes = Lanes(1)
    lane = await lanes.take(write=False, deadline_s=1)
    with pytest.raises(DeadlineExceeded):
        await lanes.take(write=False, deadline_s=0.01)
    lanes.give(lane)
    assert lanes.taken_count == 0


async def test_a_lane_that_is_handed_to_somebody_who_is_cancelled_comes_back() -> None:
    """Both in the same turn of the loop."""
    lanes = Lanes(1)
    lane = await lanes.take(write=False, deadline_s=1)
    waiter = asyncio.create_task(lanes.take(write=False, deadline_s=1))
    await asyncio.sleep(0)
    lanes.give(lane)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert lanes.taken_count == 0


async def test_no_lane_is_given_twice() -> None:
    """Many tasks, few lanes, some of them cancelled."""
    lanes = Lanes(3)
    held: set[int] = set()

    async def use(*, write: bool) -> None:
        lane = await lanes.take(write=write, deadline_s=5)
        assert lane not in held
        held.add(lane)
        try:
            await asyncio.sleep(0)
        finally:
            held.discard(lane)
            lanes.give(lane)

    tasks = [asyncio.create_task(use(write=bool(i % 2))) for i in range(200)]
    await asyncio.sleep(0)
    for task in tasks[::7]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert lanes.taken_count == 0
