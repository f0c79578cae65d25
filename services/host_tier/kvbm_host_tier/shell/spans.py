"""The spans of an onboard, as its host tier sees it: from the engine's question to its release.

onboard            in the engine's name: it knows no OpenTelemetry
  lookup           from the question to the answer
    fill           a disk or object tier is asked; its own span `read` is below
    peer_pull      another host is asked; its own span `peer_lease` is below
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
from kvbm_common.runtime.trace_context import TraceContext
from kvbm_common.service.tracing import Attributes, Tracer
from kvbm_common.wire.local import (
    Found,
    FromHostTier,
    Lookup,
    MissedLookup,
    Misses,
    Release,
    ToHostTier,
)
from kvbm_common.wire.verbs import LeaseRequest

from kvbm_host_tier.core.messages import AskFill, Input
from kvbm_host_tier.core.peer_messages import PullFromPeer

OPEN_MAX = 4_096
"""Onboards that have not ended; the oldest are forgotten."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Onboard:
    asked: Lookup
    onboard: TraceContext
    lookup: TraceContext
    start_ns: int


class OnboardSpans:
    """Follows what goes in and out of the engine socket."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._asked: dict[tuple[bytes, int], _Onboard] = {}
        self._leased: dict[int, _Onboard] = {}

    def heard(self, connection: bytes, message: ToHostTier) -> ToHostTier:
        """Trace a message from an engine.

        A traced lookup gets the span under which it is answered.
        """
        if not self._tracer.on:
            return message
        match message:
            case Lookup(trace=text):
                onboard = self._tracer.parse(text)
                if onboard is None:
                    return message
                lookup = onboard.child()
                begun = _Onboard(message, onboard, lookup, time.time_ns())
                _keep(self._asked, (connection, message.lookup), begun)
                return msgspec.structs.replace(message, trace=str(lookup))
            case Release(lease=lease, corrupt=corrupt):
                begun_or_none = self._leased.pop(lease, None)
                if begun_or_none is not None:
                    self._end(begun_or_none, {"kvbm.corrupt_blocks": len(corrupt)})
            case Misses(engine=engine, lookups=lookups):
                for missed in lookups:
                    self._missed(engine, missed)
            case _:
                pass
        return message

    def _missed(self, engine: str, missed: MissedLookup) -> None:
        """Trace a lookup that was answered in the engine, without time of its own."""
        onboard = self._tracer.parse(missed.trace)
        if onboard is None:
            return
        at_ns = missed.sent_us * 1_000
        told: Attributes = {
            "kvbm.request": missed.request,
            "kvbm.engine": engine,
            "kvbm.blocks_asked": len(missed.hashes) // 16,
            "kvbm.blocks_found": 0,
            "kvbm.reason": "not_stored",
        }
        self._tracer.ended(
            "lookup", onboard.child(), parent=onboard, start_ns=at_ns, attributes=told,
            end_ns=at_ns,
        )  # fmt: skip
        self._tracer.ended(
            "onboard", onboard, parent=self._tracer.parse(missed.parent), start_ns=at_ns,
            attributes={"kvbm.request": missed.request}, service=engine, end_ns=at_ns,
        )  # fmt: skip

    def said(self, connection: bytes, message: FromHostTier) -> None:
        """Trace a message to an engine: the answer to a traced lookup ends its span."""
        if not self._tracer.on or not isinstance(message, Found):
            return
        begun = self._asked.pop((connection, message.lookup), None)
        if begun is None:
            return
        found: Attributes = {
            "kvbm.request": begun.asked.request,
            "kvbm.engine": begun.asked.engine,
            "kvbm.blocks_asked": len(begun.asked.hashes) // 16,
            "kvbm.blocks_found": len(message.slots),
            "kvbm.reason": message.reason,
        }
        self._tracer.ended(
            "lookup", begun.lookup, parent=begun.onboard, start_ns=begun.start_ns, attributes=found
        )
        if message.lease:
            _keep(self._leased, message.lease, begun)
        else:
            self._end(begun, {})

    def _end(self, begun: _Onboard, attributes: Attributes) -> None:
        asked = begun.asked
        self._tracer.ended(
            "onboard",
            begun.onboard,
            parent=self._tracer.parse(asked.parent),
            start_ns=min(asked.sent_us * 1_000 or begun.start_ns, begun.start_ns),
            attributes={"kvbm.request": asked.request, **attributes},
            service=asked.engine,
        )

    # --- what is done for a lookup --------------------------------------------------------------

    def fill(
        self, effect: AskFill, fill: Callable[[AskFill], Awaitable[Input]]
    ) -> Awaitable[Input]:
        """Have a lower tier asked."""
        request = effect.request
        outer = self._tracer.parse(request.trace)
        if outer is None:
            return fill(effect)
        context = outer.child()
        traced = replace(effect, request=msgspec.structs.replace(request, trace=str(context)))
        asked: Attributes = {"kvbm.tier": effect.tier, "kvbm.blocks": len(request.slots)}
        return self._around("fill", context, outer, fill(traced), asked)

    def pull(
        self, effect: PullFromPeer, pull: Callable[[PullFromPeer], Awaitable[Input]]
    ) -> Awaitable[Input]:
        """Have another host asked."""
        outer = self._tracer.parse(effect.trace)
        if outer is None:
            return pull(effect)
        context = outer.child()
        asked: Attributes = {"kvbm.peer": str(effect.peer), "kvbm.blocks": len(effect.names)}
        traced = pull(replace(effect, trace=str(context)))
        return self._around("peer_pull", context, outer, traced, asked)

    def lease(self, request: LeaseRequest, leased: Awaitable[bytes]) -> Awaitable[bytes]:
        """Return the lease for another host, with a span around it if it is traced."""
        outer = self._tracer.parse(request.trace)
        if outer is None:
            return leased
        asked: Attributes = {"kvbm.owner": request.owner, "kvbm.blocks": len(request.hashes)}
        return self._around("peer_lease", outer.child(), outer, leased, asked)

    async def _around(
        self,
        name: str,
        context: TraceContext,
        outer: TraceContext,
        work: Awaitable[T],
        attributes: Attributes,
    ) -> T:
        start_ns = time.time_ns()
        outcome = await work
        if self._tracer.on:
            told = {**attributes, "kvbm.outcome": type(outcome).__name__}
            self._tracer.ended(name, context, parent=outer, start_ns=start_ns, attributes=told)
        return outcome


def _keep(kept: dict[T, _Onboard], key: T, begun: _Onboard) -> None:
    kept[key] = begun
    if len(kept) > OPEN_MAX:
        del kept[next(iter(kept))]
