"""Makes object mediums for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

from kvbm_common.nixl.mover_thread import MoverThread
from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.runtime.metrics import Metrics
from kvbm_disk_tier.objects.core.names import Names
from kvbm_disk_tier.objects.core.packing import Plain
from kvbm_disk_tier.objects.shell.bucket import Bucket
from kvbm_disk_tier.objects.shell.counters import listed_counter, requests_counter
from kvbm_disk_tier.objects.shell.directory import Directory
from kvbm_disk_tier.objects.shell.file_transport import FileTransport
from kvbm_disk_tier.objects.shell.medium import ObjectMedium, ObjectOptions
from kvbm_disk_tier.objects.shell.mover import ObjectMover, Transport
from kvbm_disk_tier.objects.shell.object_store import ObjectStore
from kvbm_disk_tier.objects.shell.s3_client import BucketOptions
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
    options: BucketOptions | Path


PARTS: WeakKeyDictionary[ObjectMedium, Parts] = WeakKeyDictionary()


def make_medium(
    options: BucketOptions | Path,
    counters: Metrics,
    *,
    list_s: float = 60.0,
    label: str = "h-0",
    keys: Keys | None = None,
) -> ObjectMedium:
    """A medium that has made no request yet, over a bucket or a directory."""
    requests = requests_counter(counters)

    def counted(request: str, ok: bool) -> None:
        requests.labels(request, "ok" if ok else "failed").inc()

    store: ObjectStore
    transport: Transport
    if isinstance(options, Path):
        listed = listed_counter(counters)
        store = Directory(options, counted, lambda kind, count: listed.labels(kind=kind).inc(count))
        transport = FileTransport(options, LANES)
    else:
        store = Bucket(options, counted)
        parameters = options.for_nixl(threads=LANES)
        transport = MoverThread("test", backends=("OBJ",), object_params=parameters)
    packing = Plain() if keys is None else Sealed(keys)
    mover = ObjectMover(transport=transport, lanes=LANES, counters=counters, packing=packing)
    given = ObjectOptions(prefix=PREFIX, slot_count=8, list_s=list_s, label=label, keys=keys)
    medium = ObjectMedium(given, store, mover, counters)
    PARTS[medium] = Parts(mover, counters, Names(PREFIX, keys), options)
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
