"""An object store on JetStream: large values in chunks, as `nats object` knows them.

An object is a description (its name, size, SHA-256 and where its chunks are) on `$O.<bucket>.M.…`,
which replaces the one before it, and chunks on `$O.<bucket>.C.<id>`. The description is written
last: a writer that dies before leaves chunks without a description, and the bucket's limit drops
the oldest. A reader checks size and digest, so it gets an object exactly as it was written, or an
error.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvbm_common.errors import KvbmError
from kvbm_common.nats.event_subscription import EventSubscription
from kvbm_common.nats.jetstream import (
    JetStreamError,
    Link,
    StreamSpec,
    call_api,
    ensure_stream,
    publish_acknowledged,
)

CHUNK_BYTES = 512 * 1024
"""Less than what any server takes by default, and few enough round trips for 20 MB."""
CHUNKS_IN_FLIGHT = 8
NO_MESSAGE = 10037
"""The server's error code for a subject without messages."""


class ObjectBroken(KvbmError):
    """Not all of an object came, or not what was written: it is just being replaced."""

    code = "object_broken"


class ObjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an object, in the field names of NATS."""

    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    mtime: str
    metadata: dict[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketSpec(StreamSpec):
    """A description replaces the one before it."""

    def as_config(self) -> dict[str, Any]:
        return StreamSpec.as_config(self) | {"allow_rollup_hdrs": True, "allow_direct": True}


class _Stored(msgspec.Struct, frozen=True):
    data: str


class _Answer(msgspec.Struct, frozen=True):
    message: _Stored


class ObjectStore:
    """One bucket, made when it is first used."""

    def __init__(self, link: Link, bucket: str, *, bytes_max: int) -> None:
        self._link = link
        self.bucket = bucket
        self._spec = _BucketSpec(
            name=f"OBJ_{bucket}",
            subjects=(f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"),
            bytes_max=bytes_max,
            age_max_s=0,
            duplicate_window_s=0,
        )

    async def info(self, name: str) -> ObjectInfo | None:
        """Return the description of an object; None: no such object. Raises KvbmError."""
        await ensure_stream(self._link, self._spec)
        request = {"last_by_subj": self._subject_of(name)}
        try:
            payload = await call_api(self._link, f"STREAM.MSG.GET.{self._spec.name}", request)
        except JetStreamError as error:
            if error.server_code == NO_MESSAGE:
                return None
            raise
        stored = base64.b64decode(msgspec.json.decode(payload, type=_Answer).message.data)
        return msgspec.json.decode(stored, type=ObjectInfo)

    async def get(self, info: ObjectInfo, *, deadline_s: float) -> bytes:
        """Return the bytes of an object; raises ObjectBroken."""
        chunks: list[bytes] = []
        subscription = EventSubscription(
            self._link, self._spec, subject=f"$O.{self.bucket}.C.{info.nuid}", start="all"
        )
        try:
            async with asyncio.timeout(deadline_s), subscription:
                while len(chunks) < info.chunks:
                    chunks += [message.payload for message in await anext(subscription)]
        except TimeoutError as error:
            text = f"{info.name}: {len(chunks)} of {info.chunks} chunks in {deadline_s} s"
            raise ObjectBroken(text) from error
        content = b"".join(chunks)
        if await asyncio.to_thread(_digest, content) != info.digest:
            raise ObjectBroken(f"{info.name}: another digest")
        return content

    async def put(
        self, name: str, content: bytes, *, nuid: str, metadata: dict[str, str]
    ) -> ObjectInfo:
        """Write an object in the place of the one of this name. Raises KvbmError."""
        before = await self.info(name)
        digest = await asyncio.to_thread(_digest, content)
        subject = f"$O.{self.bucket}.C.{nuid}"
        offsets = range(0, len(content), CHUNK_BYTES)
        for first in range(0, len(offsets), CHUNKS_IN_FLIGHT):
            await asyncio.gather(
                *(
                    publish_acknowledged(self._link, subject, content[at : at + CHUNK_BYTES])
                    for at in offsets[first : first + CHUNKS_IN_FLIGHT]
                )
            )
        info = ObjectInfo(
            name=name, bucket=self.bucket, nuid=nuid, size=len(content), chunks=len(offsets),
            digest=digest, mtime=datetime.now(UTC).isoformat(), metadata=metadata,
        )  # fmt: skip
        await publish_acknowledged(
            self._link,
            self._subject_of(name),
            msgspec.json.encode(info),
            headers={"Nats-Rollup": "sub"},
        )
        if before is not None:
            purge = {"filter": f"$O.{self.bucket}.C.{before.nuid}"}
            await call_api(self._link, f"STREAM.PURGE.{self._spec.name}", purge)
        return info

    def _subject_of(self, name: str) -> str:
        return f"$O.{self.bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _digest(content: bytes) -> str:
    """Return the SHA-256. It takes a millisecond per megabyte: run it in a thread."""
    return "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
