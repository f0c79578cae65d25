"""The bodies of `/v1/route`: which engine should take a prompt."""

from __future__ import annotations

from typing import Annotated

import msgspec
from kvbm_common.wire.routes import (
    ENGINES_MAX,
    PEER_WEIGHT,
    RUNNING_BLOCKS,
    EngineLoad,
    LeftOut,
    RankedEngine,
    RouteRequest,
)
from pydantic import BaseModel, ConfigDict, Field

from kvbm_metrics.core.admin_models import Name
from kvbm_metrics.core.answer_models import AnswerView
from kvbm_metrics.core.query_models import ScoreQuery
from kvbm_metrics.core.wire_types import view_of

_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
_Amount = Annotated[float, Field(ge=0, le=1_000_000_000)]


class EngineQuery(BaseModel):
    """An engine that may take the prompt, and what it has to do already."""

    # As the other questions: `query_models.py` says why.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="python-re")

    source: Name
    host: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9_-]{0,64}$(?!\n)",
            max_length=64,
            description="Empty: the engine on any host.",
        ),
    ] = ""
    rank: Annotated[_Count | None, Field(description="A data-parallel rank; null: all.")] = None
    running: Annotated[_Count, Field(description="Requests that generate.")] = 0
    waiting: Annotated[_Count, Field(description="Requests that wait for their prefill.")] = 0
    waiting_blocks: Annotated[
        _Amount | None,
        Field(description="Blocks that these let it compute first; null: as long as this prompt."),
    ] = None

    def to_load(self) -> EngineLoad:
        """Convert this engine to the wire's type."""
        return EngineLoad(**self.model_dump())


class RouteQuery(ScoreQuery):
    """The question which engine should take a prompt.

    A tier's weight is the part of a block's cost that it saves.
    """

    engines: Annotated[
        list[EngineQuery],
        Field(
            default_factory=list,
            max_length=ENGINES_MAX,
            fail_fast=True,
            description="Those that may take it; empty: every engine that is known, without load.",
        ),
    ]
    peer_weight: Annotated[
        float,
        Field(ge=0, le=1_000, description="For a block in another host's memory; 0: not read."),
    ] = PEER_WEIGHT
    running_blocks: Annotated[
        _Amount, Field(description="What a running request costs, in blocks.")
    ] = RUNNING_BLOCKS

    def to_route_request(self) -> RouteRequest:
        """Convert this query with its engines to the wire's type."""
        score = msgspec.structs.asdict(self.to_score_request())
        score.pop("v", None)
        return RouteRequest(
            **score,
            engines=[one.to_load() for one in self.engines],
            peer_weight=self.peer_weight,
            running_blocks=self.running_blocks,
        )


class RankedEngineView(view_of(RankedEngine)):  # type: ignore[misc]
    """One rank of an engine, with its cost in blocks: 1 is the time to compute a block."""


class LeftOutView(view_of(LeftOut)):  # type: ignore[misc]
    """An engine that is not ranked, and why."""


class RouteView(AnswerView):
    """Engines that live and are followed without a hole, the least cost first."""

    asked: int
    engines: list[RankedEngineView]
    left_out: list[LeftOutView]
