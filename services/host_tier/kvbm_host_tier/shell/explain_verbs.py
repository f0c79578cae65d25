"""The verbs that say why requests missed. They read, between two steps of the core."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
from kvbm_common.nats.bus import VerbHandler
from kvbm_common.runtime.loop import monotonic_ms
from kvbm_common.wire.explain import (
    ExplainListReply,
    ExplainReply,
    Explanation,
    explain_list_request,
    explain_request,
)

from kvbm_host_tier.core.view import HostTierView


def explain_verbs(view: HostTierView) -> dict[str, VerbHandler]:
    """Return `explain` and `explain_list`, over what this host tier has kept."""

    async def one(payload: bytes) -> bytes:
        request = explain_request.decode(payload)
        ahead_ms = _wall_clock_ahead_ms()
        reply = ExplainReply(
            requests=_dated(view.explanations(request.request), ahead_ms),
            kept=view.explanation_count,
            since_ms=_dated_ms(view.explained_since_ms(), ahead_ms),
        )
        return msgspec.json.encode(reply)

    async def latest(payload: bytes) -> bytes:
        found, before = view.latest_explanations(explain_list_request.decode(payload))
        requests = _dated(found, _wall_clock_ahead_ms())
        return msgspec.json.encode(ExplainListReply(requests=requests, next=before))

    return {"explain": one, "explain_list": latest}


def _wall_clock_ahead_ms() -> int:
    """Return how far the time of day is ahead of the core's clock.

    The core's clock counts from some start; people want the time of day.
    """
    return time.time_ns() // 1_000_000 - monotonic_ms()


def _dated(found: Iterable[Explanation], ahead_ms: int) -> list[Explanation]:
    return [
        msgspec.structs.replace(
            one,
            ts_ms=_dated_ms(one.ts_ms, ahead_ms),
            segments=[
                msgspec.structs.replace(segment, at_ms=_dated_ms(segment.at_ms, ahead_ms))
                for segment in one.segments
            ],
        )
        for one in found
    ]


def _dated_ms(at_ms: int, ahead_ms: int) -> int:
    return max(0, at_ms + ahead_ms) if at_ms else 0
