"""Snapshots in pages: together they are the whole, and all of one moment."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.nats.snapshots import (
    KEPT_MAX,
    KEPT_MOST_S,
    KEPT_S,
    PAGE_BYTES,
    SHED_NAMES,
    SnapshotGone,
    SnapshotPages,
    ask_snapshot,
    joined,
    pages_of,
    shed,
)
from kvbm_common.tier.announcer import PAGE_BLOCKS, Announcer, Page, Pages
from kvbm_common.tier.blocks import Block
from kvbm_common.wire.events import Run
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply, SnapshotRequest

from tests.libs.helpers import block

REQUEST = SnapshotRequest(source="disk-tier-0")


def hexed(number: int) -> str:
    """A small integer as a sequence hash."""
    return f"{number:032x}"


def snapshot(runs: list[int], seq: int = 1, *, namespaces: int = 1) -> SnapshotReply:
    """Runs of so many blocks each, in turn of so many namespaces; names count up from 1."""
    parts: list[SnapshotPart] = [
        SnapshotPart(namespace=f"{number:064x}", runs=[]) for number in range(namespaces)
    ]
    first = 1
    for turn, length in enumerate(runs):
        hashes = [hexed(number) for number in range(first, first + length)]
        parts[turn % namespaces].runs.append(Run(parent=hexed(0), hashes=hashes))
        first += length
    return SnapshotReply(
        host="here", source="disk-tier-0", tier="disk", epoch=7, seq=seq, parts=parts
    )


def blocks(reply: SnapshotReply) -> dict[tuple[str, str], str]:
    """(Namespace, block) and its parent."""
    found: dict[tuple[str, str], str] = {}
    for part in reply.parts:
        for run in part.runs:
            parents = [run.parent, *run.hashes]
            for parent, child in zip(parents, run.hashes, strict=False):
                assert (part.namespace, child) not in found
                found[part.namespace, child] = parent
    return found


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(1, 3), st.integers(100, 600))
def test_pages_together_are_the_whole(runs: list[int], namespaces: int, page_bytes: int) -> None:
    whole = snapshot(runs, namespaces=namespaces)
    pages = pages_of(whole, page_bytes)
    assert [(page.page, page.pages) for page in pages] == [
        (number, len(pages)) for number in range(len(pages))
    ]
    for page in pages:
        held = sum(len(part.runs) * 64 + sum(35 * len(r.hashes) for r in part.runs)
                   for part in page.parts)  # fmt: skip
        assert held <= page_bytes
    again = joined(pages)
    assert blocks(again) == blocks(whole)
    assert (again.epoch, again.seq, again.page, again.pages) == (7, 1, 0, 1)
    assert len({part.namespace for part in again.parts}) == len(again.parts)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=9), st.integers(100, 400))
def test_each_block_keeps_its_size(parts: list[tuple[int, int]], page_bytes: int) -> None:
    """A tier cuts its parts by size, too: it stages what it reads by that."""
    whole = msgspec.structs.replace(
        snapshot([]),
        parts=[
            SnapshotPart(
                namespace=hexed(0) * 2,
                block_bytes=size,
                runs=[Run(parent=hexed(0), hashes=[hexed(100 * at + n) for n in range(count)])],
            )
            for at, (size, count) in enumerate(parts)
        ],
    )
    again = joined(pages_of(whole, page_bytes))
    assert sizes_of(again) == sizes_of(whole)
    assert len({part.block_bytes for part in again.parts}) == len(again.parts)


def sizes_of(reply: SnapshotReply) -> dict[str, int]:
    """The size of each block."""
    return {
        name: part.block_bytes for part in reply.parts for run in part.runs for name in run.hashes
    }


def asking(pages: SnapshotPages) -> Callable[[bytes], Awaitable[bytes]]:
    """The wire between asker and source."""

    async def ask(payload: bytes) -> bytes:
        return pages.answer(payload)

    return ask


@pytest.mark.slow
async def test_a_million_blocks_are_of_one_moment_though_the_source_goes_on() -> None:
    """1. The first page is asked for. 2. The source changes. 3. The others are of the same seq."""
    seq = 0

    def make(_request: SnapshotRequest) -> SnapshotReply:
        nonlocal seq
        seq += 1
        return snapshot([250_000] * 4, seq)

    source = SnapshotPages(make)
    sizes: list[int] = []

    async def ask(payload: bytes) -> bytes:
        page = source.answer(payload)
        sizes.append(len(page))
        if len(sizes) < 4:
            source.answer(msgspec.json.encode(REQUEST))  # Somebody else, of another moment.
        return page

    reply = await ask_snapshot(ask, REQUEST)
    assert reply.seq == 1
    assert len(blocks(reply)) == 1_000_000
    assert 33 <= len(sizes) <= 40
    assert max(sizes) < 1.1 * PAGE_BYTES


async def test_the_names_of_a_snapshot_are_freed_some_at_a_time() -> None:
    """Goal: others run between, whether its runs are long or of one block."""
    reply = snapshot([1] * 20_000 + [8_000] * 5, namespaces=2)
    left = [len(blocks(reply))]
    shedding = asyncio.create_task(shed(reply))
    while not shedding.done():
        await asyncio.sleep(0)
        left.append(sum(len(run.hashes) for part in reply.parts for run in part.runs))
    await shedding
    assert max(before - after for before, after in pairwise(left)) <= SHED_NAMES + 8_000
    assert left[-1] == 0


async def test_pages_are_made_when_they_are_asked_for_and_once() -> None:
    """1. A source holds three pages' worth. 2. It goes on between the pages, which are of the
    moment of the first. 3. Who asks again for a page gets the same bytes.
    """
    announcer = Announcer(host="here", source="disk-tier-0", tier="disk", epoch=7)
    held = [block(number, parent=number - 1) for number in range(1, 2 * PAGE_BLOCKS + 2)]
    announcer.cleared("start")
    asked = 0

    def make(_request: SnapshotRequest) -> Pages:
        def counted(page: Page) -> SnapshotReply:
            nonlocal asked
            asked += 1
            return page()

        parts = [held[start : start + PAGE_BLOCKS] for start in range(0, len(held), PAGE_BLOCKS)]
        makers = [functools.partial(list[Block], part) for part in parts]
        return [functools.partial(counted, page) for page in announcer.moment(makers)]

    source = SnapshotPages(make)
    sizes: list[int] = []

    async def ask(payload: bytes) -> bytes:
        page = source.answer(payload)
        sizes.append(asked)
        if len(sizes) == 1:
            announcer.cleared("something else")
        assert msgspec.json.decode(payload)["page"] == 0 or source.answer(payload) is page
        return page

    reply = await ask_snapshot(ask, REQUEST)
    assert (reply.seq, announcer.seq) == (1, 2)
    assert sizes == [1, 2, 3]
    assert blocks(reply) == {
        (one.namespace.hex(), one.hash.hex()): one.parent.hex() for one in held
    }


async def test_a_source_without_blocks_has_one_page() -> None:
    announcer = Announcer(host="here", source="disk-tier-0", tier="disk", epoch=7)
    source = SnapshotPages(lambda _request: announcer.moment([]))
    assert await ask_snapshot(asking(source), REQUEST) == announcer.snapshot([])


@pytest.mark.slow
async def test_a_moment_that_is_forgotten_is_an_error() -> None:
    """Others have asked for more moments than are kept."""
    seq = 0

    def make(_request: SnapshotRequest) -> SnapshotReply:
        nonlocal seq
        seq += 1
        return snapshot([250_000], seq)

    source = SnapshotPages(make)
    source.answer(msgspec.json.encode(REQUEST))
    later = msgspec.structs.replace(REQUEST, page=1, epoch=7, seq=1)
    assert msgspec.json.decode(source.answer(msgspec.json.encode(later)))["page"] == 1
    for _ in range(KEPT_MAX):
        source.answer(msgspec.json.encode(REQUEST))
    with pytest.raises(SnapshotGone, match="no page 1 of seq 1"):
        source.answer(msgspec.json.encode(later))


class Clock:
    """The time of the event loop, which a test moves on; timers that are due run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.now_s, real = 0.0, loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + self.now_s)

    async def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        for _ in range(2):
            await asyncio.sleep(0)


def ask_page(source: SnapshotPages, number: int, seq: int = 1) -> int:
    """Ask for a page, and return its number; raises SnapshotGone."""
    wanted = msgspec.structs.replace(REQUEST, page=number, epoch=7, seq=seq if number else 0)
    answer = msgspec.json.decode(source.answer(msgspec.json.encode(wanted)), type=SnapshotReply)
    assert answer.seq == seq
    return answer.page


async def test_a_moment_is_kept_from_its_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A slow reader asks for a page every 20 s. 2. It stops. 3. The moment is gone after 30."""
    source, clock = SnapshotPages(paged), Clock(monkeypatch)
    ask_page(source, 0)
    for number in (1, 2, 3, 3, 3):
        await clock.pass_s(KEPT_S * 2 / 3)
        assert ask_page(source, number) == number
    await clock.pass_s(KEPT_S * 2 / 3)
    assert ask_page(source, 0) == 0  # A second reader begins.
    await clock.pass_s(KEPT_S * 2 / 3)
    assert ask_page(source, 1) == 1
    await clock.pass_s(KEPT_S + 1)
    with pytest.raises(SnapshotGone):
        ask_page(source, 1)


async def test_a_moment_whose_pages_are_asked_for_all_the_time_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: no reader keeps a source's memory for longer than a reading may take."""
    source, clock = SnapshotPages(paged), Clock(monkeypatch)
    ask_page(source, 0)
    for _ in range(int(KEPT_MOST_S / 20) - 1):
        await clock.pass_s(20)
        assert ask_page(source, 1) == 1
    await clock.pass_s(20.1)
    with pytest.raises(SnapshotGone):
        ask_page(source, 1)


async def test_a_moment_that_is_kept_again_has_all_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. Others push it out. 2. It is asked for again. 3. The time of its first life ends."""
    seq = 1
    source, clock = SnapshotPages(lambda request: paged(request, seq)), Clock(monkeypatch)
    ask_page(source, 0)
    await clock.pass_s(KEPT_S / 2)
    for seq in range(2, 2 + KEPT_MAX):
        ask_page(source, 0, seq)
    with pytest.raises(SnapshotGone):
        ask_page(source, 1)
    seq = 1
    ask_page(source, 0)
    await clock.pass_s(KEPT_S * 2 / 3)
    assert ask_page(source, 1) == 1


def paged(_request: SnapshotRequest, seq: int = 1) -> Pages:
    """Return a snapshot of four pages."""
    pages = pages_of(snapshot([20], seq), 300)
    assert len(pages) == 4
    return [functools.partial(msgspec.structs.replace, page) for page in pages]


async def test_a_small_one_is_whole_and_not_kept() -> None:
    whole = snapshot([3])
    source = SnapshotPages(lambda _request: whole)
    assert await ask_snapshot(asking(source), REQUEST) == whole
    later = msgspec.structs.replace(REQUEST, page=1, epoch=7, seq=1)
    with pytest.raises(SnapshotGone):
        source.answer(msgspec.json.encode(later))


async def test_pages_of_another_moment_are_not_joined() -> None:
    """A source of a mixed mind."""
    answers = iter(pages_of(snapshot([300_000], 1))[:1] + pages_of(snapshot([300_000], 2))[1:])

    async def ask(_payload: bytes) -> bytes:
        return msgspec.json.encode(next(answers))

    with pytest.raises(SnapshotGone, match="asked for page 1 of seq 1"):
        await ask_snapshot(ask, REQUEST)
