"""Dumps in pages: joined by holder, and asked for again when a holder has moved in between."""

from __future__ import annotations

import msgspec
import pytest
from kvbm_common.nats.dumps import DumpIncomplete, DumpMoved, ask_dump
from kvbm_common.wire.index_verbs import DumpReply, DumpRequest, HolderDump


def told(source: str, seq: int, *hashes: str) -> HolderDump:
    """A piece of what a host tier holds."""
    return HolderDump(host="h", source=source, tier="host", epoch=1, seq=seq, hashes=list(hashes))


class Index:
    """Answers with pages in turn; the cursor of a page is its number."""

    def __init__(self, *pages: list[HolderDump]) -> None:
        self.pages = list(pages)
        self.asked: list[DumpRequest] = []

    async def ask(self, payload: bytes) -> bytes:
        """Answer one request."""
        self.asked.append(msgspec.json.decode(payload, type=DumpRequest))
        number = len(self.asked)
        page = self.pages.pop(0)
        return msgspec.json.encode(DumpReply(holders=page, next=str(number) if page else ""))


async def test_pages_of_a_holder_are_joined() -> None:
    index = Index([told("a", 7, "1"), told("b", 3, "2")], [told("b", 3, "4")], [])
    assert await ask_dump(index.ask, limit=2) == [told("a", 7, "1"), told("b", 3, "2", "4")]
    assert [(one.limit, one.after) for one in index.asked] == [(2, ""), (2, "1"), (2, "2")]


async def test_a_holder_that_moved_between_two_pages_is_asked_for_again() -> None:
    index = Index([told("a", 7, "1")], [told("a", 8, "2")], [told("a", 8, "1", "2")], [])
    assert await ask_dump(index.ask) == [told("a", 8, "1", "2")]
    assert [one.after for one in index.asked[1:3]] == ["1", ""]


async def test_pages_that_lead_nowhere_are_an_error() -> None:
    async def ask(_payload: bytes) -> bytes:
        return msgspec.json.encode(DumpReply(holders=[], next="here"))

    with pytest.raises(DumpMoved, match="ends where it began"):
        await ask_dump(ask)


async def test_a_holder_that_never_rests_is_an_error() -> None:
    index = Index(*[[told("a", seq, "1")] for seq in range(100)])
    with pytest.raises(DumpMoved, match="h a has moved"):
        await ask_dump(index.ask)


async def test_a_dump_that_lacks_a_partition_is_an_error() -> None:
    """Its hosts would seem to hold nothing."""

    async def ask(_payload: bytes) -> bytes:
        return msgspec.json.encode(DumpReply(holders=[], missing=[1]))

    with pytest.raises(DumpIncomplete, match="partition 1 has not answered"):
        await ask_dump(ask)
