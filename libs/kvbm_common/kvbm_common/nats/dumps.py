"""A dump of the index over NATS, page by page, from whichever replicas answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from kvbm_common.errors import KvbmError
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.index_verbs import DUMP_PAGE_MAX, DumpReply, DumpRequest, HolderDump

TRIES = 5

_request: JsonCodec[DumpRequest] = JsonCodec(DumpRequest)
_reply: JsonCodec[DumpReply] = JsonCodec(DumpReply)
_Place = tuple[str, str, str, int, int]


class DumpMoved(KvbmError):
    """A holder's blocks changed between two pages, each time that it was asked for."""

    code = "dump_moved"


class DumpIncomplete(KvbmError):
    """A partition of the index has not answered: what its hosts hold is unknown."""

    code = "dump_incomplete"


async def ask_dump(
    ask: Callable[[bytes], Awaitable[bytes]], *, limit: int = DUMP_PAGE_MAX
) -> list[HolderDump]:
    """Ask for what the index holds; `ask` sends a payload and returns the answer.

    Each holder is as of one position. Raises KvbmError: what `ask` raises, WireError, DumpMoved,
    DumpIncomplete.
    """
    for tries_left in reversed(range(TRIES)):
        try:
            return await _ask_once(ask, DumpRequest(limit=limit))
        except DumpMoved:
            if not tries_left:
                raise
    raise AssertionError("the last try has returned or raised")


async def _ask_once(
    ask: Callable[[bytes], Awaitable[bytes]], request: DumpRequest
) -> list[HolderDump]:
    holders: dict[_Place, HolderDump] = {}
    while True:
        page = _reply.decode(await ask(_request.encode(request)))
        if page.missing:
            numbers = ", ".join(map(str, page.missing))
            raise DumpIncomplete(f"partition {numbers} has not answered")
        _join(holders, page.holders)
        if not page.next:
            return list(holders.values())
        if page.next == request.after:
            raise DumpMoved(f"the page after {page.next} ends where it began")
        request = msgspec.structs.replace(request, after=page.next)


def _join(holders: dict[_Place, HolderDump], page: list[HolderDump]) -> None:
    """Add a page to those before; raises DumpMoved if a holder's position has changed."""
    for one in page:
        place = (one.host, one.source, one.tier, one.rank, one.group)
        before = holders.get(place)
        if before is None:
            holders[place] = one
        elif (before.epoch, before.seq) != (one.epoch, one.seq):
            raise DumpMoved(f"{one.host} {one.source} has moved between two pages")
        else:
            before.hashes.extend(one.hashes)
