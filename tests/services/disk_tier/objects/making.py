"""Makes object mediums for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.runtime.metrics import Metrics
from kvbm_disk_tier.objects.core.names import Names
from kvbm_disk_tier.objects.core.packing import Plain
from kvbm_disk_tier.objects.shell.bucket import Bucket, BucketOptions
from kvbm_disk_tier.objects.shell.medium import ObjectMedium, ObjectOptions, requests_counter
from kvbm_disk_tier.objects.shell.mover import ObjectMover
from kvbm_disk_tier.objects.shell.sealed_packing import Sealed
from kvbm_disk_tier.shell.cipher import Keys

from tests.services.disk_tier.mediums import Inbox

LANES = 4
PREFIX = "kv"


class Parts(NamedTuple):
    """What a medium was made of."""

    mover: ObjectMover
    counters: Metrics
    names: Names


PARTS: WeakKeyDictionary[ObjectMedium, Parts] = WeakKeyDictionary()


def make_medium(
    options: BucketOptions,
    counters: Metrics,
    *,
    list_s: float = 60.0,
    label: str = "h-0",
    keys: Keys | None = None,
) -> ObjectMedium:
    """A medium that has made no request yet."""
    requests = requests_counter(counters)

    def counted(request: str, ok: bool) -> None:
        requests.labels(request, "ok" if ok else "failed").inc()

    mover = ObjectMover(
        name="test", bucket=options, lanes=LANES, counters=counters,
        packing=Plain() if keys is None else Sealed(keys),
    )  # fmt: skip
    given = ObjectOptions(prefix=PREFIX, slot_count=8, list_s=list_s, label=label, keys=keys)
    medium = ObjectMedium(given, Bucket(options, counted), mover, counters)
    PARTS[medium] = Parts(mover, counters, Names(PREFIX, keys))
    return medium


def listed_of(medium: ObjectMedium, kind: str) -> float:
    """How many objects of a kind the listings have named."""
    return PARTS[medium].counters.value("kvbm_object_listed_total", kind=kind)


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
