"""The mover of a sealed store: its deadlines, and a pool that late bytes may still come into."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.mover_thread import MoverThread, Transferred
from kvbm_common.nixl.transfers import TransferFailed, TransferTimeout
from kvbm_common.runtime.loop import CoreLoop, monotonic_ms
from kvbm_disk_tier.core.messages import ReadFailed, Written
from kvbm_disk_tier.shell.cipher import Keys
from kvbm_disk_tier.shell.mover import NotSettled
from kvbm_disk_tier.shell.sealed_mover import BouncePool

from tests.services.disk_tier.mediums import SLOT_BYTES, Inbox, Place, arena, sealed_medium

KEYS = Keys.parse("11" * 32, "V")


@pytest.fixture
def made() -> Iterator[Arena]:
    """An arena."""
    with arena() as one:
        yield one


class LateInbox(Inbox):
    """A loop that is busy until a read's time is over, as soon as its bytes have landed."""

    until_ms = 0

    def complete(self, event: object) -> None:
        super().complete(event)
        while monotonic_ms() < self.until_ms:
            pass


async def test_what_is_opened_late_does_not_touch_the_arena(made: Arena, tmp_path: Path) -> None:
    """The host tier has lent the slot to another block by then: its bytes were overwritten."""
    medium, inbox = sealed_medium(tmp_path, KEYS), LateInbox()
    running = asyncio.create_task(medium.run(cast("CoreLoop[Any, Any]", inbox)))
    place = Place(made, medium)
    await medium.open(SLOT_BYTES)
    block = place.fill(0, 65)
    write = place.writing({0: block})
    assert await medium.write(write) == Written(write.write)
    read = place.reading({1: block}, within_ms=300)
    place.fill(1, 77)
    inbox.until_ms = read.until_ms
    failed = await medium.read(read)
    assert isinstance(failed, ReadFailed)
    assert failed.reason == TransferTimeout.code
    assert set(place.bytes_of(1)) == {77}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    medium.close()


async def test_a_part_that_does_not_settle_ends_the_process_after_one_that_fails(
    made: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part's failure used to hide the second part, whose bytes may still come."""
    monkeypatch.setattr("kvbm_disk_tier.shell.mover.SETTLE_DEADLINE_S", 0.05)
    monkeypatch.setattr("kvbm_disk_tier.shell.mover.TRANSFER_BYTES", 1)
    ends = iter([TransferFailed("EIO"), TransferTimeout("late", Future())])

    def read_file(*_: Any, **__: Any) -> Future[Transferred]:
        future: Future[Transferred] = Future()
        future.set_exception(next(ends))
        return future

    medium = sealed_medium(tmp_path, KEYS)
    place = Place(made, medium)
    await medium.open(SLOT_BYTES)
    monkeypatch.setattr(MoverThread, "read_file", read_file)
    with pytest.raises(NotSettled):
        await medium.read(place.reading({0: place.fill(0, 65), 1: place.fill(1, 66)}))
    medium.close()


async def test_bytes_of_the_pool_that_have_not_settled_are_not_lent_again() -> None:
    pool = BouncePool(8192)
    with pytest.raises(TransferFailed):
        async with pool.lend(4096, deadline_s=1.0):
            raise TransferFailed("EIO")
    with pytest.raises(NotSettled):
        async with pool.lend(4096, deadline_s=1.0):
            raise NotSettled("late")
    async with pool.lend(4096, deadline_s=1.0) as begin:
        assert begin == 4096
    with pytest.raises(TransferTimeout):
        async with pool.lend(8192, deadline_s=0.01):
            pytest.fail("late bytes may still come into it")
