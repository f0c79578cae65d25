"""Recent models: bodies of the HTTP API about the last hour, and services that are gone."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field


class GoneView(BaseModel, frozen=True):
    """A service that was registered, and is not any more."""

    kind: str
    host: str
    instance: str
    manner: Annotated[
        Literal["lost", "left"],
        Field(description="`lost`: it went silent; `left`: it has left by itself."),
    ]
    gone_ms_ago: int


class HistoryPoint(BaseModel, frozen=True):
    """The rates of `lookups` at one moment."""

    ago_s: Annotated[float, Field(description="How long ago.")]
    hit_rate: float | None
    lookups: float
    matched_tokens: float


class HistoryView(BaseModel, frozen=True):
    """The last hour, oldest point first. What was not seen has no point."""

    host: Annotated[str, Field(description="Empty: all hosts together.")]
    spacing_s: float
    window_s: Annotated[float, Field(description="Each point is a rate over so long.")]
    points_max: int
    points: list[HistoryPoint]
