"""Questions: the verbs of the index that need nothing but its core."""

from __future__ import annotations

import asyncio
import time

import msgspec
from kvbm_common.copying.naming import NAMING
from kvbm_common.nats.verb_server import VerbHandler
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.index_verbs import DumpRequest, MatchReply, MatchRequest
from kvbm_common.wire.scores import (
    DEFAULT_WEIGHTS,
    BlockHolder,
    BlockHolders,
    HoldersReply,
    HolderSummary,
    MatchBatchReply,
    MatchBatchRequest,
    ScoreReply,
    ScoreRequest,
    WhereReply,
    WhereRequest,
)

from kvbm_index.core.core import IndexCore
from kvbm_index.core.requests import ReplyTooLarge, decoded, encoded, hashes_of

WHERE_HOLDERS_MAX = 200_000
"""Holders in one answer; more do not fit in a message, whose JSON has 50 bytes for each."""

_match_request: JsonCodec[MatchRequest] = JsonCodec(MatchRequest)
_dump_request: JsonCodec[DumpRequest] = JsonCodec(DumpRequest)
_batch_request: JsonCodec[MatchBatchRequest] = JsonCodec(MatchBatchRequest)
_score_request: JsonCodec[ScoreRequest] = JsonCodec(ScoreRequest)
_where_request: JsonCodec[WhereRequest] = JsonCodec(WhereRequest)


class Questions:
    """Answers from one core."""

    def __init__(self, core: IndexCore, counters: Metrics) -> None:
        self._core = core
        self._match_time = counters.histogram(
            "kvbm_index_match_seconds", "Time to answer a match, without the way there and back."
        )

    @property
    def verbs(self) -> dict[str, VerbHandler]:
        """The verbs by name."""
        return {
            "match": self.match,
            "match_tokens": self.match,
            "match_batch": self.match_batch,
            "score": self.score,
            "where": self.where,
            "dump": self.dump,
            "holders": self.holders,
        }

    async def match(self, payload: bytes) -> bytes:
        """Answer which holders have the longest beginnings of a prompt."""
        start_s = time.perf_counter()
        answer = msgspec.json.encode(self._answer(decoded(_match_request, payload)))
        self._match_time.observe(time.perf_counter() - start_s)
        return answer

    async def match_batch(self, payload: bytes) -> bytes:
        """Match every question of a batch, with a turn for other work between: it may be long."""
        replies = []
        for question in decoded(_batch_request, payload).questions:
            replies.append(self._answer(question))
            await asyncio.sleep(0)
        return encoded(MatchBatchReply(replies=replies))

    def _answer(self, request: MatchRequest) -> MatchReply:
        hashes = hashes_of(request, NAMING.hasher)
        return MatchReply(asked=len(hashes), matches=self._core.match(hashes))

    async def score(self, payload: bytes) -> bytes:
        """Answer what a prompt is worth where."""
        hashes = hashes_of(request := decoded(_score_request, payload), NAMING.hasher)
        scores = self._core.scores(hashes, DEFAULT_WEIGHTS | request.weights)
        return encoded(ScoreReply(asked=len(hashes), scores=scores))

    async def where(self, payload: bytes) -> bytes:
        """Answer who has each of some blocks, with a turn for other work after each.

        Raises BadRequest, ReplyTooLarge.
        """
        request = decoded(_where_request, payload)
        hashes = hashes_of(MatchRequest(hashes=request.hashes), NAMING.hasher)
        blocks, count = [], 0
        for name, holders in zip(request.hashes, self._core.holders_of(hashes), strict=True):
            count += len(holders)
            if count > WHERE_HOLDERS_MAX:
                raise ReplyTooLarge(f"more than {WHERE_HOLDERS_MAX} holders; ask for fewer blocks")
            said = [BlockHolder(**one._asdict()) for one in holders]
            blocks.append(BlockHolders(hash=name, holders=said))
            await asyncio.sleep(0)
        return encoded(WhereReply(blocks=blocks))

    async def dump(self, payload: bytes) -> bytes:
        """Answer everything that is held, or a page of it."""
        return encoded(self._core.dump(decoded(_dump_request, payload)))

    async def holders(self, payload: bytes) -> bytes:
        """Answer how many blocks each holder has."""
        request = decoded(_dump_request, payload)
        summaries = [
            HolderSummary(**holder._asdict(), epoch=epoch, seq=seq, blocks=len(chains))
            for holder, epoch, seq, chains in self._core.holders(request.source)
        ]
        return encoded(HoldersReply(holders=summaries))
