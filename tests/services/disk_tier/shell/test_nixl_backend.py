"""Which back end moves files: one that is missing, or cannot, is replaced, and that is said."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from kvbm_common.memory.arena import Arena
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.slots import Block
from kvbm_disk_tier.core.messages import ReadDone, StoreOpened, Written
from kvbm_disk_tier.shell.file_medium import FileMedium
from kvbm_disk_tier.shell.mover import DiskMover
from kvbm_disk_tier.shell.nixl_backend import file_mover
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_options import StoreOptions
from kvbm_disk_tier.shell.store_thread import StoreThread

from tests.services.disk_tier.mediums import SLOT_BYTES, SLOTS, Place, arena


@pytest.mark.parametrize(
    ("wanted", "used", "warnings"),
    [("auto", "POSIX", 0), ("posix", "POSIX", 0), ("nowhere", "POSIX", 1), ("ucx", "POSIX", 1)],
    ids=["not asked", "one that works", "a plug-in that is missing", "one that moves no files"],
)
async def test_blocks_move_whatever_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: str, used: str, warnings: int
) -> None:
    caplog.set_level(logging.INFO, "kvbm_disk_tier.shell.nixl_backend")
    store = Store(StoreOptions(directory=tmp_path, capacity_bytes=0, slot_count=SLOTS))
    medium = FileMedium(
        StoreThread(store),
        DiskMover(counters=Metrics(), mover=file_mover("test", wanted, tmp_path)),
    )
    levels = [record.levelno for record in caplog.records]
    assert levels.count(logging.WARNING) == warnings
    assert used in caplog.messages[-1]
    assert "trial" not in os.listdir(tmp_path)
    assert isinstance(await medium.open(SLOT_BYTES), StoreOpened)
    with arena() as one:
        await _there_and_back(one, medium)
        medium.close()


async def _there_and_back(one: Arena, medium: FileMedium) -> None:
    place = Place(one, medium)
    blocks: dict[int, Block] = {0: place.fill(0, 65)}
    write = place.writing(blocks)
    assert await medium.write(write) == Written(write.write)
    done = await medium.read(place.reading({4: blocks[0]}))
    assert isinstance(done, ReadDone)
    assert done.intact == (True,)


@pytest.mark.parametrize("wanted", ["gds", "gds_mt"])
def test_gds_is_never_fatal(tmp_path: Path, wanted: str) -> None:
    """With or without the driver, and on a file system that may not do: there is a mover."""
    file_mover("test", wanted, tmp_path).close()
    assert not list(tmp_path.iterdir())
