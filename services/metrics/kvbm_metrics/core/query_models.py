"""Models of the questions to the HTTP API: the bodies that are checked, and made into requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from kvbm_common.identity import BLOCK_TOKENS_MAX, NUMBER_MAX, TEXT_MAX, Namespace, of_tenant
from kvbm_common.wire.events import Tier
from kvbm_common.wire.index_verbs import MATCH_BLOCKS_MAX, MatchRequest
from kvbm_common.wire.scores import (
    BATCH_QUESTIONS_MAX,
    WHERE_BLOCKS_MAX,
    MatchBatchRequest,
    ScoreRequest,
)
from pydantic import BaseModel, ConfigDict, Field

# The length: in a body Python's engine reads the pattern, whose `$` lets a line break pass. In an
# address pydantic's own engine does, which knows no look-ahead.
Hash = Annotated[
    str,
    Field(pattern="^[0-9a-f]{32}$", max_length=32, examples=["ee47acab818fb0f368c71c5e228d1221"]),
]
TokenId = Annotated[int, Field(ge=0, le=0xFFFF_FFFF)]
_Natural = Annotated[int, Field(ge=0, le=NUMBER_MAX)]
_Positive = Annotated[int, Field(ge=1, le=NUMBER_MAX)]
_Text = Annotated[str, Field(max_length=TEXT_MAX)]


def _up_to(length: int) -> Any:
    """Limit the length of a list, and refuse a million wrong items at the first one."""
    return Field(max_length=length, fail_fast=True)


class _Query(BaseModel):
    """A question: an unknown field is a typing mistake, a number in quotes is not a number."""

    # The wire's patterns are Python's: pydantic's own engine knows no look-ahead.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="python-re")


class NamespaceQuery(_Query):
    """Everything that makes the bytes of two engines incompatible."""

    model: Annotated[_Text, Field(min_length=1)]
    block_tokens: Annotated[int, Field(ge=1, le=BLOCK_TOKENS_MAX)]
    revision: _Text = ""
    dtype: _Text = "bfloat16"
    quantisation: _Text = ""
    layout: _Text = "LBHNC"
    group: _Natural = 0
    layers: _Natural = 0
    heads: _Natural = 0
    head_dim: _Natural = 0
    tensor_parallel: _Positive = 1
    pipeline_parallel: _Positive = 1
    parts: _Text = ""
    format: Literal[3, 4] = 3
    tenant: Annotated[str, Field(pattern=r"^([A-Za-z0-9_-]{1,64})?$")] = ""

    def to_namespace(self) -> Namespace:
        """Convert this namespace to the wire's type; with a tenant its format follows."""
        fields = self.model_dump(exclude={"tenant", "format"})
        return of_tenant(Namespace(**fields), self.tenant)


class MatchQuery(_Query):
    """A question for holders of a prefix. Give `hashes`, or `tokens` with a `namespace`."""

    hashes: Annotated[list[Hash], _up_to(MATCH_BLOCKS_MAX)] | None = None
    tokens: Annotated[list[TokenId], _up_to(MATCH_BLOCKS_MAX * 64)] | None = None
    namespace: NamespaceQuery | None = None
    salt: _Text | None = None
    lora: _Text | None = None

    def to_request(self) -> MatchRequest:
        """Convert this query to the wire's type."""
        return MatchRequest(
            hashes=self.hashes,
            tokens=self.tokens,
            namespace=self.namespace.to_namespace() if self.namespace else None,
            salt=self.salt,
            lora=self.lora,
        )


class MatchBatchQuery(_Query):
    """Several questions at once; each is answered as `/v1/match` answers it."""

    questions: Annotated[list[MatchQuery], _up_to(BATCH_QUESTIONS_MAX)]

    def to_request(self) -> MatchBatchRequest:
        """Convert these queries to the wire's type."""
        return MatchBatchRequest(questions=[one.to_request() for one in self.questions])


class ScoreQuery(MatchQuery):
    """A question for scores: a block counts with the weight of the best tier that has it."""

    weights: Annotated[
        dict[Tier, Annotated[float, Field(ge=0, le=1_000)]],
        Field(description="A tier that is not named: device 1, host 0.8, disk 0.5, object 0.2."),
    ] = {}

    def to_score_request(self) -> ScoreRequest:
        """Convert this query with its weights to the wire's type."""
        match = msgspec.structs.asdict(self.to_request())
        return ScoreRequest(**match, weights=dict(self.weights))


class WhereQuery(_Query):
    """The question which holders have each of these blocks, whatever is before them."""

    hashes: Annotated[list[Hash], _up_to(WHERE_BLOCKS_MAX)]
