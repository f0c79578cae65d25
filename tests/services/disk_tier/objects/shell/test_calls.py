"""Calls in threads: where none can be started, it is an error that callers know."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from kvbm_disk_tier.objects.shell.bucket import Bucket
from kvbm_disk_tier.objects.shell.calls import Calls
from kvbm_disk_tier.objects.shell.directory import Directory
from kvbm_disk_tier.objects.shell.object_store import BucketError, ObjectStore
from kvbm_disk_tier.objects.shell.s3_client import BucketOptions

TURNS = 2


def refuse(_thread: threading.Thread) -> None:
    """What CPython says at the limit of a container's processes."""
    raise RuntimeError("can't start new thread")


async def test_a_thread_that_cannot_start_keeps_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raised RuntimeError, which ended the object tier, and each time a turn was lost."""
    calls = Calls(threads=TURNS)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2 * TURNS):
            with pytest.raises(OSError, match="can't start new thread"):
                await calls.run(lambda: 1, deadline_s=1.0)
    for _ in range(2 * TURNS):
        assert await calls.run(lambda: 1, deadline_s=5.0) == 1


@pytest.mark.parametrize("is_bucket", [True, False])
async def test_a_store_that_cannot_be_asked_is_in_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_bucket: bool
) -> None:
    """Its reason names the variable of the store, and what the system says."""
    store: ObjectStore = (
        Bucket(BucketOptions(bucket="b"), lambda *_: None)
        if is_bucket
        else Directory(tmp_path, lambda *_: None, lambda *_: None)
    )
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(BucketError, match=r"KVBM_OBJECT.*can't start new thread"):
            await store.probe("kv/", write=False)
