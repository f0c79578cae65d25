"""Makes object mediums for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from kvbm_common.counters import Counters
from kvbm_common.loop import CoreLoop
from kvbm_disk_tier.objects.bucket import Bucket, BucketOptions
from kvbm_disk_tier.objects.medium import ObjectMedium, ObjectOptions, requests_counter
from kvbm_disk_tier.objects.mover import ObjectMover
from kvbm_disk_tier.objects.packing import Plain
from kvbm_disk_tier.objects.sealed_packing import Sealed
from kvbm_disk_tier.sealing import Keys

from tests.services.disk_tier.mediums import Inbox

LANES = 4
PREFIX = "kv"


def make_medium(
    options: BucketOptions,
    counters: Counters,
    *,
    list_s: float = 60.0,
    label: str = "h-0",
    keys: Keys | None = None,
) -> ObjectMedium:
    """A medium that has made no request yet."""
    requests = requests_counter(counters)

    def counted(request: str, ok: bool) -> None:
        requests.add(request=request, outcome="ok" if ok else "failed")

    mover = ObjectMover(
        name="test", bucket=options, lanes=LANES, counters=counters,
        packing=Plain() if keys is None else Sealed(keys),
    )  # fmt: skip
    given = ObjectOptions(prefix=PREFIX, slot_count=8, list_s=list_s, label=label, keys=keys)
    return ObjectMedium(given, Bucket(options, counted), mover, counters)


@asynccontextmanager
async def running(medium: ObjectMedium) -> AsyncIterator[Inbox]:
    """The medium's own tasks, and what they say."""
    inbox = Inbox()
    task = asyncio.create_task(medium.run(cast("CoreLoop[object, object]", inbox)))  # type: ignore[arg-type]
    try:
        yield inbox
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
