"""Image store: reads the newest image at start, and writes a new one now and then, in JetStream."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime

from kvbm_common.errors import DeadlineExceeded, KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.jetstream import ensure_stream
from kvbm_common.nats.object_store import ObjectBroken, ObjectInfo, ObjectStore
from kvbm_common.nats.streams import IMAGES, IMAGES_BUCKET
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.bounds import Usage
from kvbm_common.wire.epochs import epoch_max

from kvbm_index.core.image import Image, ImageError, pack, unpack

BUCKET = IMAGES_BUCKET
NAME = "image"
BUCKET_BYTES_MAX = IMAGES.bytes_max
LOAD_DEADLINE_S = 5.0
"""Without an image the stream is read from its start."""
LOAD_BYTES_PER_S = 20_000_000
"""On top for each byte: a million blocks are some 20 MB, and take a fifth of a second."""

_log = logging.getLogger(__name__)


class ImageStore:
    """Loads and writes images. Of several replicas, the one that is due first writes for all."""

    def __init__(
        self, bus: Bus, counters: Metrics, *, interval_s: float, partition: int = 0
    ) -> None:
        self._bus, self._interval_s = bus, interval_s
        partitions = bus.limits.partitioned
        self._events = partitions.events(partition)
        self._store = ObjectStore(bus, partitions.images(partition), bytes_max=BUCKET_BYTES_MAX)
        self._log = OncePerKind(_log)
        self._written = counters.counter(
            "kvbm_index_images_written_total", "Images of the index that this replica has stored."
        )
        self._failed = counters.counter(
            "kvbm_index_image_failures_total",
            "Images that could not be read or stored.",
            labels=("stage",),
        )

        self._zones = counters.gauge(
            "kvbm_index_zone_heard",
            "Whether NATS has heard the stream of events of this zone in the last seconds.",
            labels=("zone",),
        )
        self._stream: Usage | None = None
        self._horizon = counters.gauge(
            "kvbm_event_horizon_seconds",
            "How far back a stream reaches that has forgotten: an older image is of no use.",
            labels=("stream",),
        )

    def usages(self) -> dict[str, Usage]:
        """Return how full the event stream is, as of the last image; its age may end it first."""
        return {} if self._stream is None else {"event_stream": self._stream}

    async def load(self) -> Image | None:
        """Return the newest image; None without one that can be read."""
        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(LOAD_DEADLINE_S):
                info = await self._store.info(NAME)
            if info is None:
                return None
            content = await self._store.get(
                info, deadline_s=LOAD_DEADLINE_S + info.size / LOAD_BYTES_PER_S
            )
            image = unpack(content).up_to_epoch(epoch_max(time.time()))
            _require_stream(image)
        except (KvbmError, TimeoutError) as error:
            self._fail("load", error)
            return None
        blocks = sum(holder.block_count for holder in image.holders)
        seconds = time.perf_counter() - started_s
        _log.info("an image of %d blocks at %d in %.2f s", blocks, image.position, seconds)
        return image

    async def run(self, take: Callable[[], Image], position: Callable[[], int]) -> None:
        """Write an image every so often, until cancelled."""
        kept = 0
        while True:
            await self._look_back()
            await asyncio.sleep(self._interval_s)
            if position() in (0, kept):
                continue
            try:
                if await self._is_due():
                    kept = await self._write(take())
            except KvbmError as error:
                self._fail("store", error)

    async def _look_back(self) -> None:
        """Measure how far back the event stream reaches."""
        try:
            stream = await ensure_stream(self._bus, self._events)
        except KvbmError as error:
            self._fail("horizon", error)
        else:
            for source in stream.sources:
                self._zones.labels(zone=source.zone).set(0 if source.is_silent else 1)
            horizon_s = stream.horizon_s(datetime.now(UTC))
            state, most = stream.state, max(0, stream.config.max_bytes)
            if horizon_s < math.inf:
                self._stream = Usage(state.bytes, most, reach_s=horizon_s)
                self._horizon.labels(stream=self._events.name).set(horizon_s)
            else:
                self._stream = Usage(state.bytes, most)
                self._horizon.clear()

    async def _is_due(self) -> bool:
        """Return whether an image is due: no other replica has just stored one."""
        try:
            info = await self._store.info(NAME)
        except ObjectBroken:
            return True
        return info is None or _age_s(info) > self._interval_s / 2

    async def _write(self, image: Image) -> int:
        if not image.stream:
            return 0
        content = await asyncio.to_thread(pack, image)
        metadata = {"stream": image.stream, "position": str(image.position)}
        await self._store.put(NAME, content, nuid=os.urandom(11).hex(), metadata=metadata)
        self._written.inc()
        return image.position

    def _fail(self, stage: str, error: Exception) -> None:
        self._failed.labels(stage=stage).inc()
        reason = error if isinstance(error, KvbmError) else DeadlineExceeded("no answer in time")
        self._log.warning(f"{stage}_{reason.label}", f"{stage}: {reason}")


def _require_stream(image: Image) -> None:
    """Raise ImageError for an image that does not say when its stream was made."""
    try:
        datetime.fromisoformat(image.stream)
    except ValueError as error:
        raise ImageError(f"its stream is {image.stream!r}") from error


def _age_s(info: ObjectInfo) -> float:
    """Return the age of an image in seconds.

    It is by the clocks of two machines: a jump costs an image more or less.
    """
    try:
        return abs((datetime.now(UTC) - datetime.fromisoformat(info.mtime)).total_seconds())
    except (ValueError, TypeError):  # No time, or one without a zone.
        return float("inf")
