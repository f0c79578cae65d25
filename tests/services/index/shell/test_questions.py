"""Questions about much: the index serves others meanwhile."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.scores import WHERE_BLOCKS_MAX, WhereReply
from kvbm_index.core import queries
from kvbm_index.core.messages import EventsReceived
from kvbm_index.core.requests import ReplyTooLarge
from kvbm_index.shell import questions
from kvbm_index.shell.questions import Questions

from tests.services.index.core.test_core import Harness, blocks
from tests.services.index.core.test_scores import held

HOSTS = 8
PAYLOAD = msgspec.json.encode({"hashes": [one.hex() for one in blocks(*range(WHERE_BLOCKS_MAX))]})


def asked() -> Questions:
    """An index where eight disks have four blocks each."""
    harness = Harness()
    for host in range(HOSTS):
        events = held(range(host, host + 4), tier="disk", host=f"h{host}")
        harness.send(EventsReceived(tuple(events)))
    return Questions(harness.core, Metrics())


async def test_where_gives_others_a_turn() -> None:
    """Goal: a question about as many blocks as there may be holds nothing up."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    reply = msgspec.json.decode(await asked().where(PAYLOAD), type=WhereReply)
    counting.cancel()
    assert turns >= WHERE_BLOCKS_MAX
    names = [[one.host for one in block.holders] for block in reply.blocks]
    assert names[:3] == [["h0"], ["h0", "h1"], ["h0", "h1", "h2"]]
    assert names[HOSTS + 4 :] == [[]] * (WHERE_BLOCKS_MAX - HOSTS - 4)


async def test_where_ends_when_its_answer_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no answer is made that is refused then; the error says what to do."""
    monkeypatch.setattr(questions, "WHERE_HOLDERS_MAX", 3)
    with pytest.raises(ReplyTooLarge, match="ask for fewer blocks"):
        await asked().where(PAYLOAD)


@pytest.mark.parametrize("looks", [1, 9, 100_000])
async def test_where_says_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """Goal: how many blocks are looked for in a turn does not show."""
    whole = await asked().where(PAYLOAD)
    monkeypatch.setattr(queries, "LOOKS_MAX", looks)
    assert await asked().where(PAYLOAD) == whole
