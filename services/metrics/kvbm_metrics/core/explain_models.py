"""Explain models: the bodies of the routes that say why requests missed."""

from __future__ import annotations

from typing import Annotated, Any

from kvbm_common.tier import reasons
from kvbm_common.wire.explain import Explanation, Segment
from msgspec.structs import asdict
from pydantic import Field

from kvbm_metrics.core.admin_models import InstanceView
from kvbm_metrics.core.models import _View
from kvbm_metrics.core.wire_types import view_of


class ByTierView(_View):
    """Blocks that were found, by where they came from."""

    host: int
    disk: int
    object: int
    remote: Annotated[int, Field(description="Host memory of another host.")]


class ExplainedView(
    view_of(  # type: ignore[misc]
        Explanation, "engine", "ts_ms", "blocks", "hit_blocks", "reason", "outcome"
    )
):
    """One lookup of an engine in one line."""

    request_id: str
    by_tier: ByTierView
    missed_blocks: int
    host: str = ""
    instance: str = ""


class ExplainListView(_View):
    """The latest lookups, newest first."""

    requests: list[ExplainedView]
    silent: list[str] = Field(
        default_factory=list, description="Instances without an answer, and why."
    )


class SegmentView(view_of(Segment)):  # type: ignore[misc]
    """Neighbouring blocks with one fate."""

    hit: bool
    meaning: Annotated[str, Field(description="The reason in words.")]


class ExplanationView(view_of(Explanation, "lost_blocks", "trace"), ExplainedView):  # type: ignore[misc]
    """One lookup, block by block."""

    segments: list[SegmentView]
    outcome_meaning: str


class ExplainView(_View):
    """All kept lookups of one request, newest first: an engine may ask again."""

    request_id: str
    lookups: list[ExplanationView]
    silent: list[str] = Field(default_factory=list)


def explained_view(one: Explanation, where: InstanceView) -> ExplainedView:
    """Return the short form of an explanation."""
    return ExplainedView(**_told(one, where))


def explanation_view(one: Explanation, where: InstanceView) -> ExplanationView:
    """Return the long form of an explanation."""
    return ExplanationView(
        **_told(one, where),
        segments=[_segment(segment) for segment in one.segments],
        outcome_meaning=reasons.OUTCOMES.get(one.outcome, one.outcome),
    )


def _told(one: Explanation, where: InstanceView) -> dict[str, Any]:
    by_tier = {"host": 0, "disk": 0, "object": 0, "remote": 0}
    for segment in one.segments:
        if not segment.reason and segment.tier:
            by_tier[segment.tier] += segment.blocks
    told = asdict(one)
    del told["segments"]
    return told | {
        "request_id": told.pop("request"),
        "by_tier": ByTierView(**by_tier),
        "missed_blocks": one.blocks - one.hit_blocks,
        "host": where.host,
        "instance": where.instance,
    }


def _segment(one: Segment) -> SegmentView:
    meaning = reasons.MEANINGS.get(one.reason, one.reason)
    return SegmentView(**asdict(one), hit=not one.reason, meaning=meaning)
