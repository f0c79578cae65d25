"""An object store on JetStream: large values in chunks, as `nats object` knows them.

An object is a description (its name, size, SHA-256 and where its chunks are) on `$O.<bucket>.M.…`,
which replaces the one before it, and chunks on `$O.<bucket>.C.<id>`. The description is written
last: a writer that dies before leaves chunks without a description, and the next writer drops them.
Else the bucket would fill up with them, and its limit drops the oldest of all. A reader checks size
and digest, so it gets an object exactly as it was written, or an error.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from kvbm_common.errors import KvbmError
from kvbm_common.nats.event_subscription import EventSubscription
from kvbm_common.nats.jetstream import (
    JetStreamError,
    Link,
    StoredMessage,
    call_api,
    ensure_stream,
    last_stored,
    publish_acknowledged,
)
from kvbm_common.nats.streams import object_bucket
from kvbm_common.wire.codec import UNREADABLE

CHUNK_BYTES = 512 * 1024
"""Bytes of a chunk: any server takes them by default, and 20 MB need few round trips."""
CHUNKS_IN_FLIGHT = 8
ABANDONED_S = 60.0
"""Chunks without a description are dropped so long after the last of them: a writer that lives
stores the next one, or the description, within some API deadlines."""
WRITERS_MAX = 16
"""Writers of one name at once; more have something wrong with them."""
OVERTAKEN = 10071
"""The server's error code for a message that is to follow another than the last one."""


class ObjectBroken(KvbmError):
    """Not all of an object came, or not what was written: it is just being replaced."""

    code = "object_broken"


class ObjectTooLarge(KvbmError):
    """The bucket has no room for two such objects, and one is only replaced by a whole one."""

    code = "object_too_large"


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


class _State(msgspec.Struct, frozen=True):
    subjects: dict[str, int] | None = None


class _Subjects(msgspec.Struct, frozen=True):
    state: _State
    ts: datetime
    """The time on the server's clock."""

    @property
    def counts(self) -> dict[str, int]:
        """Return how many messages each subject has."""
        return self.state.subjects or {}


class ObjectStore:
    """One bucket, made when it is first used."""

    def __init__(self, link: Link, bucket: str, *, bytes_max: int) -> None:
        self._link = link
        self.bucket = bucket
        self._spec = object_bucket(bucket, bytes_max=bytes_max)

    async def info(self, name: str) -> ObjectInfo | None:
        """Return the description of an object; None: no such object. Raises ObjectBroken for one
        that cannot be believed, and other KvbmErrors."""
        await ensure_stream(self._link, self._spec)
        stored = await last_stored(self._link, self._spec, self._subject_of(name))
        if stored is None:
            return None
        if self._link.guarded and not self._spec.is_marked(stored.headers):
            raise ObjectBroken(f"the description of {name} was not published by a client")
        try:
            return msgspec.json.decode(stored.payload, type=ObjectInfo)
        except (*UNREADABLE, ValueError) as error:
            raise ObjectBroken(f"the description of {name} cannot be read: {error}") from error

    async def get(self, info: ObjectInfo, *, deadline_s: float) -> bytes:
        """Return the bytes of an object; raises ObjectBroken."""
        chunks: list[bytes] = []
        subscription = EventSubscription(
            self._link, self._spec, subject=self._chunks_of(info.nuid), start="all"
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
        """Write an object in the place of the one of this name. Raises KvbmError: ObjectTooLarge
        before anything is written, where the bucket has no room; a failure leaves the object that
        is there, and no chunks of this one unless NATS does not answer."""
        most = (await ensure_stream(self._link, self._spec)).config.max_bytes
        await self._drop_abandoned()
        used = (await ensure_stream(self._link, self._spec)).state.bytes
        if 0 < most < max(2 * len(content), used + len(content)):
            text = f"{name}: {len(content)} bytes, in a bucket of {most} with {used} used"
            raise ObjectTooLarge(f"{text}; it takes room for two such objects")
        try:
            return await self._put(name, content, nuid=nuid, metadata=metadata)
        except (JetStreamError, ObjectBroken):
            await self._purge(self._chunks_of(nuid))
            raise

    async def _put(
        self, name: str, content: bytes, *, nuid: str, metadata: dict[str, str]
    ) -> ObjectInfo:
        digest = await asyncio.to_thread(_digest, content)
        subject = self._chunks_of(nuid)
        offsets = range(0, len(content), CHUNK_BYTES)
        for first in range(0, len(offsets), CHUNKS_IN_FLIGHT):
            ends = await asyncio.gather(
                *(
                    self._store(subject, content[at : at + CHUNK_BYTES])
                    for at in offsets[first : first + CHUNKS_IN_FLIGHT]
                ),
                return_exceptions=True,  # None is under way any more when those before are dropped.
            )
            if failures := [end for end in ends if isinstance(end, BaseException)]:
                raise failures[0]
        info = ObjectInfo(
            name=name, bucket=self.bucket, nuid=nuid, size=len(content), chunks=len(offsets),
            digest=digest, mtime=datetime.now(UTC).isoformat(), metadata=metadata,
        )  # fmt: skip
        kept = (await self._subjects(subject)).counts.get(subject, 0)
        if kept != len(offsets):  # This writer stood still, and another took it for dead.
            raise ObjectBroken(f"{name}: {kept} of {len(offsets)} chunks are left")
        await self._describe(info)
        return info

    async def _describe(self, info: ObjectInfo) -> None:
        """Write a description in the place of the one that is there, and drop its chunks.

        Of writers that describe one name at once each replaces another's: no chunks are left.
        """
        subject = self._subject_of(info.name)
        for _ in range(WRITERS_MAX):
            stored = await last_stored(self._link, self._spec, subject)
            before = stored.seq if stored is not None else 0
            headers = {"Nats-Rollup": "sub", "Nats-Expected-Last-Subject-Sequence": str(before)}
            try:
                await self._store(subject, msgspec.json.encode(info), headers=headers)
            except JetStreamError as error:
                if error.server_code != OVERTAKEN:
                    raise
                continue
            nuid = _nuid_of(stored) if stored is not None else ""
            if nuid not in ("", info.nuid):
                await self._purge(self._chunks_of(nuid))
            return
        raise ObjectBroken(f"{info.name}: {WRITERS_MAX} other writers were faster")

    async def _drop_abandoned(self) -> None:
        """Drop the chunks of writers that died before they had written a description."""
        found = await self._subjects(f"$O.{self.bucket}.>")
        descriptions = [one for one in found.counts if one.startswith(f"$O.{self.bucket}.M.")]
        unnamed = set(found.counts).difference(descriptions)
        for subject in descriptions:
            stored = await last_stored(self._link, self._spec, subject)
            unnamed.discard(self._chunks_of(_nuid_of(stored) if stored is not None else ""))
        for subject in sorted(unnamed):
            stored = await last_stored(self._link, self._spec, subject)
            time = stored.time if stored else None
            if time is not None and (found.ts - time).total_seconds() >= ABANDONED_S:
                await self._purge(subject)

    async def _subjects(self, pattern: str) -> _Subjects:
        """Return how many messages each subject has; raises KvbmError."""
        request = {"subjects_filter": pattern}
        payload = await call_api(self._link, f"STREAM.INFO.{self._spec.name}", request)
        return msgspec.json.decode(payload, type=_Subjects)

    async def _purge(self, subject: str) -> None:
        """Drop every message on a subject; raises KvbmError."""
        await call_api(self._link, f"STREAM.PURGE.{self._spec.name}", {"filter": subject})

    async def _store(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        await publish_acknowledged(self._link, self._spec, subject, payload, headers=headers)

    def _chunks_of(self, nuid: str) -> str:
        return f"$O.{self.bucket}.C.{nuid}"

    def _subject_of(self, name: str) -> str:
        return f"$O.{self.bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _digest(content: bytes) -> str:
    """Return the SHA-256. It takes a millisecond per megabyte: run it in a thread."""
    return "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()


def _nuid_of(stored: StoredMessage) -> str:
    """Return whose chunks a description names; "" where it cannot be read."""
    try:
        return msgspec.json.decode(stored.payload, type=ObjectInfo).nuid
    except (*UNREADABLE, ValueError):
        return ""
