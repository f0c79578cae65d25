"""Verbs of the index: the longest prefix of each holder, and all that is held.

`routes` and `scores` have its verbs for routers.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvbm_common.identity import Namespace
from kvbm_common.wire.events import Natural, Tier, Token
from kvbm_common.wire.partitions import _OfPartitions
from kvbm_common.wire.verbs import _Message

MATCH_BLOCKS_MAX = 65_536
"""A prompt of a million tokens at 16 per block; a longer question is a mistake."""
DUMP_BLOCKS_MAX = 65_536
"""Blocks of a dump in one message: 2.3 MB of JSON, made in 20 ms."""
DUMP_PAGE_MAX = 16_384
"""Blocks of a page, which is made in 20 ms where a holder has a million."""
DUMP_CURSOR_MAX = 256


class MatchRequest(_Message, frozen=True, kw_only=True):
    """The longest usable prefix per holder. Give `hashes`, or `tokens` with a `namespace`."""

    hashes: Annotated[list[str], Meta(max_length=MATCH_BLOCKS_MAX)] | None = None
    tokens: (
        Annotated[
            list[Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]],
            Meta(max_length=MATCH_BLOCKS_MAX * 64),
        ]
        | None
    ) = None
    namespace: Namespace | None = None
    salt: str | None = None
    lora: str | None = None


class HolderMatch(msgspec.Struct, frozen=True, kw_only=True):
    """One holder and how many blocks of the prefix it has without a hole, from the first on."""

    host: Token
    source: Token
    tier: Tier
    rank: Natural = 0
    group: Natural = 0
    blocks: Natural


class MatchReply(_OfPartitions, frozen=True, kw_only=True):
    """Holders with at least one block, longest first."""

    asked: Natural
    matches: list[HolderMatch]


class DumpRequest(_Message, frozen=True, kw_only=True):
    """Everything the index holds, or what it holds of one source.

    More than 65,536 blocks are told in pages only, each of the next blocks as of its own moment.
    """

    source: Token | None = None
    limit: Annotated[int, Meta(ge=0, le=DUMP_PAGE_MAX)] = 0
    """Blocks of a page, at most; 0: everything in one reply."""
    after: Annotated[str, Meta(max_length=DUMP_CURSOR_MAX)] = ""
    """The `next` of the page before; empty: the first page."""


class _HolderPosition(msgspec.Struct, frozen=True, kw_only=True):
    """One holder, and the position up to which this is true."""

    host: Token
    source: Token
    tier: Tier
    rank: Natural = 0
    group: Natural = 0
    epoch: Natural
    seq: Natural


class HolderDump(_HolderPosition, frozen=True, kw_only=True):
    """The blocks of one holder, sorted, and the position up to which that is true."""

    hashes: list[str]


class DumpReply(_OfPartitions, frozen=True, kw_only=True):
    """One entry per holder. A holder whose blocks are on several pages may have moved on between
    them: its `epoch` or `seq` differ then."""

    holders: list[HolderDump]
    next: str = ""
    """The cursor of the next page; empty: this was the last one."""
