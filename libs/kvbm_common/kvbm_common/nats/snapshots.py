"""Snapshots over NATS: whole where they fit into a message, in pages with one number where not.

    asker                                    source
    SnapshotRequest ───────────────────────►          as of now
          ◄─────────────────────────────── SnapshotReply(pages=3)
    SnapshotRequest(page=1, epoch, seq) ───►          with the same seq, which is kept
          ◄─────────────────────────────── SnapshotReply(page=1, pages=3)
    …

A tier makes a page when it is asked for, so that no step lists a million blocks. The page may show
later events than `seq` already. They apply on top of it, as all later ones do, and change nothing.

A source that has forgotten the moment says so, and the asker, as after any failure, asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from kvbm_common.errors import KvbmError
from kvbm_common.tier.announcer import Page, Pages
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.events import Run
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply, SnapshotRequest

PAGE_BYTES = 1024 * 1024
"""Bytes of JSON in a page: some 29,000 blocks in long runs, which are read in 2 ms."""
SHED_NAMES = 8_192
"""Names that are freed at a time, in 0.4 ms."""
KEPT_S = 30.0
"""A moment is kept for so long after its last page that was asked for."""
KEPT_MOST_S = 600.0
"""And for so long after its first page at most."""
KEPT_MAX = 8
"""Moments that are kept; each costs some 50 bytes per block."""
_HASH_BYTES = 35
_RUN_BYTES = 64
"""The bytes that a hash and an empty run take in JSON."""

_request: JsonCodec[SnapshotRequest] = JsonCodec(SnapshotRequest)
_reply: JsonCodec[SnapshotReply] = JsonCodec(SnapshotReply)
_Moment = tuple[str, bool, int, int]
"""Source, whether consolidated, epoch, seq."""


class SnapshotGone(KvbmError):
    """The moment that another page was asked of is not kept any more."""

    code = "snapshot_gone"
    field = "seq"


class SnapshotPages:
    """The source's side: answers requests, and keeps the pages of what did not fit into one."""

    def __init__(self, make: Callable[[SnapshotRequest], SnapshotReply | Pages]) -> None:
        """Serve the snapshots of `make`: it says what a source holds now, or raises KvbmError."""
        self._make = make
        self._kept: dict[_Moment, list[bytes | Page]] = {}
        """The least recently asked for comes first."""
        self._ends: dict[_Moment, asyncio.TimerHandle] = {}
        self._since_s: dict[_Moment, float] = {}
        """The time of the loop when the first page was asked for, last."""

    def answer(self, payload: bytes) -> bytes:
        """Return a page as JSON; raises WireError, SnapshotGone and what `make` raises."""
        request = _request.decode(payload)
        if request.page:
            moment = _moment(request, request.epoch, request.seq)
            pages = self._kept.get(moment, [])
            if request.page >= len(pages):
                raise SnapshotGone(f"no page {request.page} of seq {request.seq} is kept")
            self._keep(moment, pages, since_s=self._since_s[moment])
            return _encoded(pages, request.page)
        made = self._make(request)
        if isinstance(made, SnapshotReply):
            made = [_made(page) for page in pages_of(made)]
        first = made[0]()
        moment = _moment(request, first.epoch, first.seq)
        if moment in self._kept:  # Replicas ask at the same time.
            self._keep(moment, self._kept[moment])
            return _encoded(self._kept[moment], 0)
        pages = [_reply.encode(first), *made[1:]]
        if len(pages) > 1:
            self._keep(moment, pages)
        return _encoded(pages, 0)

    def _keep(
        self, moment: _Moment, pages: list[bytes | Page], *, since_s: float | None = None
    ) -> None:
        """Keep a moment for KEPT_S from now, also one that is kept already. None: since now."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._forget(moment)
        if len(self._kept) >= KEPT_MAX:
            self._forget(next(iter(self._kept)))
        self._kept[moment] = pages
        self._since_s[moment] = now_s if since_s is None else since_s
        end_s = min(now_s + KEPT_S, self._since_s[moment] + KEPT_MOST_S)
        self._ends[moment] = loop.call_at(end_s, self._forget, moment)

    def _forget(self, moment: _Moment) -> None:
        if self._kept.pop(moment, None) is not None:
            self._ends.pop(moment).cancel()
            del self._since_s[moment]


def _made(page: SnapshotReply) -> Page:
    return lambda: page


def _encoded(pages: list[bytes | Page], number: int) -> bytes:
    """Return a page as JSON, made when it is asked for the first time."""
    page = pages[number]
    if isinstance(page, bytes):
        return page
    encoded = pages[number] = _reply.encode(page())
    return encoded


def _moment(request: SnapshotRequest, epoch: int, seq: int) -> _Moment:
    return request.source, request.consolidated, epoch, seq


async def ask_snapshot(
    ask: Callable[[bytes], Awaitable[bytes]], request: SnapshotRequest
) -> SnapshotReply:
    """Ask for the whole snapshot, page by page; `ask` sends a payload and returns the answer.

    Raises KvbmError: what `ask` raises, WireError, SnapshotGone.
    """
    return joined([page async for page in ask_pages(ask, request)])


async def ask_pages(
    ask: Callable[[bytes], Awaitable[bytes]], request: SnapshotRequest
) -> AsyncIterator[SnapshotReply]:
    """Ask for a snapshot, and yield its pages as they come; raises as `ask_snapshot` does."""
    first = _reply.decode(await ask(_request.encode(request)))
    yield first
    moment = first.epoch, first.seq
    for number in range(1, first.pages):
        wanted = msgspec.structs.replace(request, page=number, epoch=first.epoch, seq=first.seq)
        page = _reply.decode(await ask(_request.encode(wanted)))
        if (page.epoch, page.seq, page.page) != (*moment, number):
            raise SnapshotGone(f"asked for page {number} of seq {first.seq}, got {page.page}")
        yield page


def pages_of(reply: SnapshotReply, page_bytes: int = PAGE_BYTES) -> list[SnapshotReply]:
    """Split a snapshot into pages of at most so many bytes, roughly; a long run is cut."""
    pages: list[list[SnapshotPart]] = [[]]
    room = page_bytes
    for part in reply.parts:
        runs: list[Run] = []
        pages[-1].append(msgspec.structs.replace(part, runs=runs))
        for run in part.runs:
            parent, rest = run.parent, run.hashes
            while rest:
                if room < _RUN_BYTES + _HASH_BYTES:
                    runs, room = [], page_bytes
                    pages.append([msgspec.structs.replace(part, runs=runs)])
                count = max(1, (room - _RUN_BYTES) // _HASH_BYTES)
                head, rest = rest[:count], rest[count:]
                runs.append(Run(parent=parent, hashes=head))
                room -= _RUN_BYTES + _HASH_BYTES * len(head)
                parent = head[-1]
    return [
        msgspec.structs.replace(reply, parts=parts, page=number, pages=len(pages))
        for number, parts in enumerate(pages)
    ]


def joined(pages: list[SnapshotReply]) -> SnapshotReply:
    """Join pages into one snapshot, with one part per namespace, rank, group and size of blocks."""
    parts: dict[tuple[str, int, int, int], SnapshotPart] = {}
    for page in pages:
        for part in page.parts:
            key = part.namespace, part.rank, part.group, part.block_bytes
            if key not in parts:
                parts[key] = msgspec.structs.replace(part, runs=[])
            parts[key].runs.extend(part.runs)
    return msgspec.structs.replace(pages[0], parts=list(parts.values()), page=0, pages=1)


async def shed(snapshot: SnapshotReply) -> None:
    """Take a snapshot apart, and let others run after some names: a million take 40 ms to free."""
    freed = 0
    for part in snapshot.parts:
        while part.runs:
            freed += len(part.runs.pop().hashes)
            if freed >= SHED_NAMES:
                await asyncio.sleep(0)
                freed = 0
    assert not any(part.runs for part in snapshot.parts), "a run is left"
