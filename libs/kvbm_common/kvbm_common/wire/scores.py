"""The verbs `match_batch`, `score`, `where` and `holders` of the index."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvbm_common.wire.events import Hex128, Natural, Tier, Token
from kvbm_common.wire.index_verbs import MatchReply, MatchRequest, _HolderPosition
from kvbm_common.wire.partitions import _OfPartitions
from kvbm_common.wire.verbs import _Message

BATCH_QUESTIONS_MAX = 256
"""A router asks for what has arrived in a few milliseconds."""
WHERE_BLOCKS_MAX = 1_024

Weight = Annotated[float, Meta(ge=0, le=1_000)]


class MatchBatchRequest(_Message, frozen=True, kw_only=True):
    """Several questions in one message; each is answered as `match` answers it."""

    questions: Annotated[list[MatchRequest], Meta(max_length=BATCH_QUESTIONS_MAX)]


class MatchBatchReply(_OfPartitions, frozen=True, kw_only=True):
    """One reply per question, in order."""

    replies: list[MatchReply]


class ScoreRequest(MatchRequest, frozen=True, kw_only=True):
    """The question how much of a prompt each holder has.

    A block counts with the weight of the best tier that has it.
    """

    weights: dict[Tier, Weight] = msgspec.field(default_factory=dict)
    """A tier that is not named counts as in DEFAULT_WEIGHTS."""


class PlaceScore(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an engine, with its own blocks and those of its host's tiers together."""

    host: Token
    source: Annotated[str, Meta(description="Empty: any other engine of that host.")]
    rank: Natural = 0
    blocks: Annotated[Natural, Meta(description="The longest usable run, over all these tiers.")]
    score: float


class ScoreReply(_OfPartitions, frozen=True, kw_only=True):
    """Places with at least one block, the highest score first."""

    asked: Natural
    scores: list[PlaceScore]


class WhereRequest(_Message, frozen=True, kw_only=True):
    """The question which holders have each of these blocks, whatever is before them."""

    hashes: Annotated[list[str], Meta(max_length=WHERE_BLOCKS_MAX)]


class BlockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """One holder of one block."""

    host: Token
    source: Token
    tier: Tier
    rank: Natural = 0
    group: Natural = 0


class BlockHolders(msgspec.Struct, frozen=True, kw_only=True):
    """A block and all who have it."""

    hash: Hex128
    holders: list[BlockHolder]


class WhereReply(_OfPartitions, frozen=True, kw_only=True):
    """One entry per asked block, in order."""

    blocks: list[BlockHolders]


DEFAULT_WEIGHTS: dict[Tier, float] = {"device": 1.0, "host": 0.8, "disk": 0.5, "object": 0.2}
"""The part of a block's compute time that each tier saves: a guess to start with."""


class HolderSummary(_HolderPosition, frozen=True, kw_only=True):
    """One holder, how many blocks it has, and the position up to which that is true."""

    blocks: Natural


class HoldersReply(_OfPartitions, frozen=True, kw_only=True):
    """One entry per holder, in the order of host, source, tier, rank and group."""

    holders: list[HolderSummary]
