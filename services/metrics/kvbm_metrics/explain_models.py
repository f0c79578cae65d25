"""The bodies of the routes that say why requests missed."""

from __future__ import annotations

from typing import Annotated, Any

from kvbm_common import reasons
from kvbm_common.wire.explain import Explanation, Segment
from pydantic import Field

from kvbm_metrics.admin_models import InstanceView
from kvbm_metrics.models import _View


class ByTierView(_View):
    """Blocks that were found, by where they came from."""

    host: int
    disk: int
    object: int
    remote: Annotated[int, Field(description="Host memory of another host.")]


class ExplainedView(_View):
    """One lookup of an engine in one line."""

    request_id: str
    engine: str
    ts_ms: Annotated[int, Field(description="Wall clock, ms since 1970.")]
    blocks: Annotated[int, Field(description="Blocks that were asked for.")]
    hit_blocks: int
    by_tier: ByTierView
    reason: Annotated[str, Field(description="Of the first missed block; empty: none was missed.")]
    missed_blocks: int
    outcome: Annotated[
        str, Field(description="Why blocks that were found were not used; empty: they were.")
    ] = ""
    host: str = ""
    instance: str = ""


class ExplainListView(_View):
    """The latest lookups, newest first."""

    requests: list[ExplainedView]
    silent: list[str] = Field(default_factory=list, description="Who could not be asked, and why.")


class SegmentView(_View):
    """Neighbouring blocks with one fate."""

    blocks: int
    hit: bool
    tier: Annotated[str, Field(description="Where it came from, was last, or what failed.")]
    reason: str
    meaning: Annotated[str, Field(description="The reason in words.")]
    hash: Annotated[str, Field(description="Of its first block; see /v1/blocks/{hash}.")]
    policy: Annotated[str, Field(description="Which eviction policy chose it.")]
    at_ms: Annotated[int, Field(description="When that happened; 0: not known.")]
    detail: str


class ExplanationView(ExplainedView):
    """One lookup, block by block."""

    segments: list[SegmentView]
    lost_blocks: Annotated[int, Field(description="Blocks that were found and not used.")]
    outcome_meaning: str
    trace: str


class ExplainView(_View):
    """All kept lookups of one request, newest first: an engine may ask again."""

    request_id: str
    lookups: list[ExplanationView]
    silent: list[str] = Field(default_factory=list)


def explained_view(one: Explanation, where: InstanceView) -> ExplainedView:
    """The short form."""
    return ExplainedView(**_short(one, where))


def explanation_view(one: Explanation, where: InstanceView) -> ExplanationView:
    """The long form."""
    return ExplanationView(
        **_short(one, where),
        segments=[_segment(segment) for segment in one.segments],
        lost_blocks=one.lost_blocks,
        outcome_meaning=reasons.OUTCOMES.get(one.outcome, one.outcome),
        trace=one.trace,
    )


def _short(one: Explanation, where: InstanceView) -> dict[str, Any]:
    by_tier = {"host": 0, "disk": 0, "object": 0, "remote": 0}
    for segment in one.segments:
        if not segment.reason and segment.tier:
            by_tier[segment.tier] += segment.blocks
    return {
        "request_id": one.request,
        "engine": one.engine,
        "ts_ms": one.ts_ms,
        "blocks": one.blocks,
        "hit_blocks": one.hit_blocks,
        "by_tier": ByTierView(**by_tier),
        "reason": one.reason,
        "missed_blocks": one.blocks - one.hit_blocks,
        "outcome": one.outcome,
        "host": where.host,
        "instance": where.instance,
    }


def _segment(one: Segment) -> SegmentView:
    return SegmentView(
        blocks=one.blocks,
        hit=not one.reason,
        tier=one.tier,
        reason=one.reason,
        meaning=reasons.MEANINGS.get(one.reason, one.reason),
        hash=one.hash,
        policy=one.policy,
        at_ms=one.at_ms,
        detail=one.detail,
    )
