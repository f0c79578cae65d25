"""The medium of files: it notices that its directory is not where it was."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from kvbm_common.runtime.loop import CoreLoop
from kvbm_disk_tier.core.effects import ProbeStore
from kvbm_disk_tier.core.messages import StoreOpened, Synchronised
from kvbm_disk_tier.shell import file_medium
from kvbm_disk_tier.shell.cipher import Keys
from kvbm_disk_tier.shell.file_medium import FileMedium

from tests.services.disk_tier.mediums import SLOT_BYTES, Inbox, sealed_medium
from tests.waiting import wait_until


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[tuple[FileMedium, Inbox]]:
    """An open store that is looked at, and what is said of it."""
    medium, inbox = sealed_medium(directory, Keys({"": bytes(32)})), Inbox()
    looking = asyncio.create_task(medium.run(cast("CoreLoop[Any, Any]", inbox)))
    try:
        assert isinstance(await medium.open(SLOT_BYTES), StoreOpened)
        yield medium, inbox
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        medium.close()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks a hundred times a second."""
    monkeypatch.setattr(file_medium, "SYNCHRONISE_S", 0.01)


@pytest.mark.parametrize(
    ("how", "said"), [("all", "was removed"), ("files", "was removed"), ("other", "in the place")]
)
async def test_a_store_that_was_removed_is_a_trouble(tmp_path: Path, how: str, said: str) -> None:
    """Goal: `rm -rf` of the directory shows in /readyz: no block there survives a restart.

    A probe does not end the trouble: what is written goes nowhere. It can still be read.
    """
    directory = tmp_path / "store"
    async with running(directory) as (medium, inbox):
        if how == "files":
            for path in directory.iterdir():
                path.unlink()
        elif how == "all":
            shutil.rmtree(directory)
        else:
            directory.rename(tmp_path / "moved")
            directory.mkdir()
        await wait_until(lambda: bool(inbox.inputs))
        first = inbox.inputs[0]
        assert isinstance(first, Synchronised)
        assert said in first.failure
        probed = await medium.probe(ProbeStore())
        assert (probed.read_failure, said in probed.write_failure) == ("", True)


async def test_a_store_in_its_place_is_no_trouble(tmp_path: Path) -> None:
    """Goal: looking at it says nothing, and a probe succeeds."""
    async with running(tmp_path / "store") as (medium, inbox):
        probed = await medium.probe(ProbeStore())
        assert (probed.read_failure, probed.write_failure) == ("", "")
        assert inbox.inputs == []
