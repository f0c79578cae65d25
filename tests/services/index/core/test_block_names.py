"""Names by their first digits, from the index's own pages, compared with all names."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.errors import ConfigError
from kvbm_common.nats import block_names
from kvbm_common.nats.block_names import NAMES_MAX, NoSuchBlock, names_with, only_one
from kvbm_common.wire.index_verbs import DumpReply, DumpRequest
from kvbm_common.wire.scores import HoldersReply, HolderSummary
from kvbm_index.core.dump_pages import page_of

from tests.services.index.core.test_dump_pages import Names, held

DIGITS = st.text("01f", min_size=4, max_size=31)
BLOCKS = st.text("01f", min_size=32, max_size=32).map(bytes.fromhex)


class Index:
    """Answers as the index does, and counts the pages."""

    def __init__(self, names: Names) -> None:
        self._held = held(names)
        self.pages = 0

    async def ask(self, verb: str, payload: bytes) -> bytes:
        if verb == "holders":
            summaries = [
                HolderSummary(
                    host=one.holder.host,
                    source=one.holder.source,
                    tier=one.holder.tier,
                    rank=one.holder.rank,
                    group=one.holder.group,
                    epoch=one.epoch,
                    seq=one.seq,
                    blocks=len(one.chains),
                )
                for one in self._held
            ]
            return msgspec.json.encode(HoldersReply(holders=summaries))
        assert verb == "dump"
        self.pages += 1
        request = msgspec.json.decode(payload, type=DumpRequest)
        page, after = page_of(self._held, request.after, request.limit)
        return msgspec.json.encode(DumpReply(holders=page, next=after))


def found(names: Names, digits: str) -> list[str]:
    """What is found by these digits."""
    return asyncio.run(names_with(Index(names).ask, digits))


@given(st.dictionaries(st.integers(0, 3), st.lists(BLOCKS, min_size=1, max_size=60)), DIGITS)
def test_what_begins_alike_is_found(names: Names, digits: str) -> None:
    """Crowded names; those that agree in 8 bytes are no hashes, and may be left out of a page."""
    unlike = {
        rank: list({name[:8]: name for name in some}.values()) for rank, some in names.items()
    }
    alike = {
        block.hex() for some in unlike.values() for block in some if block.hex().startswith(digits)
    }
    told = found(unlike, digits)
    assert told == sorted(told)
    assert set(told) <= alike
    assert len(told) == min(len(alike), NAMES_MAX)


def test_a_holder_is_asked_for_a_page_or_two() -> None:
    """Goal: a name costs no walk through everything that is held."""
    names = {0: [bytes([n % 256, n // 256]) + bytes(14) for n in range(20_000)]}
    index = Index(names)
    assert asyncio.run(names_with(index.ask, "0102")) == ["0102" + "0" * 28]
    assert index.pages <= 2


def test_one_name_is_meant_or_none() -> None:
    assert only_one("abcd", ["abcd1"], "hash") == "abcd1"
    with pytest.raises(NoSuchBlock, match="begins with abcd"):
        only_one("abcd", [], "hash")
    with pytest.raises(ConfigError, match="hash is 'abcd', but accepts more digits: abcd1, abcd2"):
        only_one("abcd", ["abcd1", "abcd2"], "hash")


@pytest.mark.parametrize("wrong", ["", "abc", "ABCD", "xyz0", "a" * 33, "abcd\n"])
def test_what_is_no_beginning(wrong: str) -> None:
    assert not block_names.is_beginning(wrong)
    assert not block_names.is_whole(wrong)
