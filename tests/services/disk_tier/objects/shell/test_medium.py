"""A store that is idle: a directory that goes away is noticed without a read, write or listing."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kvbm_common.runtime.metrics import Metrics
from kvbm_disk_tier.core.messages import StoreDown, StoreOpened, StoreUp
from kvbm_disk_tier.objects.core import bucket_health
from kvbm_disk_tier.objects.core.messages import ListingEnded
from kvbm_disk_tier.objects.shell import directory as directory_module
from kvbm_disk_tier.objects.shell.bucket import Bucket
from kvbm_disk_tier.objects.shell.medium import ObjectMedium
from kvbm_disk_tier.objects.shell.s3_client import BucketOptions

from tests.services.disk_tier.mediums import Inbox
from tests.services.disk_tier.objects.making import make_medium, running
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done every few seconds is done at once."""
    monkeypatch.setattr(directory_module, "CHECK_S", 0.02)
    monkeypatch.setattr(bucket_health, "PAUSE_S", 0.02)
    monkeypatch.setattr(bucket_health, "PAUSE_MAX_S", 0.05)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The directory that hosts have mounted."""
    directory = tmp_path / "shared"
    directory.mkdir()
    return directory


@pytest.fixture
async def idle(shared: Path) -> AsyncIterator[Inbox]:
    """What a medium says that was listed once, and will not be soon again."""
    medium: ObjectMedium = make_medium(shared, Metrics(), list_s=600.0)
    assert isinstance(await medium.open(0), StoreOpened)
    async with running(medium) as inbox:
        await wait_until(lambda: inbox.of(ListingEnded))
        yield inbox
    medium.close()


def take_away(shared: Path, *, leaves_folder: bool) -> None:
    """Move the directory, and leave an empty one or nothing."""
    shared.rename(shared.with_name("away"))
    if leaves_folder:
        shared.mkdir()


def bring_back(shared: Path) -> None:
    """Have it back in its place."""
    if shared.exists():
        assert os.listdir(shared) == [], "a check makes nothing"
        shared.rmdir()
    shared.with_name("away").rename(shared)


@pytest.mark.parametrize(
    ("leaves_folder", "reason"),
    [(False, "there is no such directory"), (True, "is the file system mounted?")],
)
async def test_an_idle_directory_that_is_gone_takes_the_tier_out_until_it_is_back(
    idle: Inbox, shared: Path, leaves_folder: bool, reason: str
) -> None:
    """Once a folder was removed, and once a file system was unmounted above an empty one."""
    take_away(shared, leaves_folder=leaves_folder)
    await wait_until(lambda: idle.of(StoreDown))
    told = idle.of(StoreDown)[0].reason
    assert f"KVBM_OBJECT_URL file://{shared}" in told
    assert reason in told
    assert not idle.of(StoreUp)
    bring_back(shared)
    await wait_until(lambda: idle.of(StoreUp))
    assert len(idle.of(ListingEnded)) == 1, "no listing has told"


async def test_a_file_server_that_hangs_takes_the_tier_out_and_holds_up_nothing(
    idle: Inbox, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    open_file = os.open

    def hanging(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).startswith(str(shared)):
            goes_on.wait(30)
        return open_file(path, *arguments, **named)

    monkeypatch.setattr(directory_module, "CALL_DEADLINE_S", 0.2)
    monkeypatch.setattr("os.open", hanging)
    await wait_until(lambda: idle.of(StoreDown))
    assert "has not answered within 0.2 s" in idle.of(StoreDown)[0].reason
    goes_on.set()
    await wait_until(lambda: idle.of(StoreUp))


def test_an_idle_bucket_is_not_checked() -> None:
    """Its owner pays for each request."""
    assert Bucket(BucketOptions(bucket="b"), lambda _kind, _ok: None).check_s is None
