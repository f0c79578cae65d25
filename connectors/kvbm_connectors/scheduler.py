"""The scheduler half: what an engine's scheduler calls. It never blocks and never raises for a
service that is away; the engine computes, as it would without us."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from kvbm_common import trace_context
from kvbm_common.identity import Namespace, SequenceHash, content_digest
from kvbm_common.wire.local import (
    Attach,
    Attached,
    Beat,
    Bye,
    Detach,
    Found,
    FromConsolidator,
    FromHostTier,
    Hello,
    Moved,
    Pulled,
    Refused,
    Welcome,
    from_consolidator,
    from_host_tier,
    to_consolidator,
    to_host_tier,
)

from kvbm_connectors.core import ConnectorCore, Limits
from kvbm_connectors.link import Link, LinkState, LinkThread
from kvbm_connectors.messages import (
    UNSAID,
    Effect,
    Hit,
    Load,
    LoadResult,
    OfferEnded,
    OfferRun,
    Origin,
    ToEvents,
    ToHost,
)


def new_incarnation() -> str:
    """A name for one life of an engine."""
    return secrets.token_hex(8)


class SchedulerHalf:
    """Lookups, offers and the two links of one engine. Thread-safe; owns its link thread.

    The core is shared by the engine's thread and the link thread under a lock that is held for
    microseconds: an answer must be there when the scheduler asks, without a queue in between.
    """

    def __init__(
        self,
        *,
        engine: str,
        incarnation: str,
        namespace: Namespace,
        host_tier_endpoint: str,
        consolidator_endpoint: str,
        streams: Sequence[Attach] = (),
        world_size: int = 1,
        limits: Limits | None = None,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self._core = ConnectorCore(
            engine=engine, incarnation=incarnation, namespace=namespace.digest, limits=limits
        )
        self._lock = threading.Lock()
        self._ended: deque[OfferEnded] = deque()
        self._on_news = on_news
        self.welcome: Welcome | None = None
        """The last one: where the arena is, whether the host tier answers now or not."""
        self._bye = Bye(engine=engine, incarnation=incarnation)
        self._detach = Detach(engine=engine, incarnation=incarnation)
        hello = Hello(
            engine=engine,
            incarnation=incarnation,
            role="scheduler",
            namespace=namespace,
            world_size=world_size,
        )
        beat = Beat(engine=engine, incarnation=incarnation)
        self._host = Link(
            f"{engine}: host tier",
            host_tier_endpoint,
            to_host_tier,
            from_host_tier,
            lambda: hello,
            beat,
            self._from_host_tier,
            self._host_down,
            on_moved=self._host_moved,
            may_leave=self._may_leave,
            bye=self._bye,
        )
        self._events = [
            Link(
                f"{engine}: consolidator, rank {stream.rank}",
                consolidator_endpoint,
                to_consolidator,
                from_consolidator,
                lambda stream=stream: stream,  # type: ignore[misc]
                beat,
                self._from_consolidator,
            )
            for stream in streams
        ]
        self._core.events_attached = False
        # The first stream's link carries the offers of all ranks.
        self._offers_through = streams[0].rank if streams else None
        if self._events:
            self._events[0].on_down = self._consolidator_down
        self._thread = LinkThread(
            [self._host, *self._events], name=f"kvbm-{engine}", on_tick=self._tick
        )

    def start(self) -> None:
        """Begin to attach. Until then, and whenever a service is away: pass-through."""
        self._thread.start()

    def close(self) -> None:
        """Say good-bye and end the thread."""
        self._thread.say(self._host, self._bye)
        for link in self._events:
            self._thread.say(link, self._detach)
        self._thread.close()

    @property
    def epoch(self) -> int:
        """The life of the host tier that is there; 0 if there is none."""
        return self._core.epoch

    @property
    def attached(self) -> bool:
        """Is a host tier there?"""
        return self._core.epoch != 0

    @property
    def streams_attached(self) -> bool:
        """Does the consolidator follow all our event streams?"""
        followed = all(link.state is LinkState.UP for link in self._events)
        return followed and (self._core.events_attached or not self._events)

    # --- what the engine calls --------------------------------------------------------------

    def lookup(
        self,
        request: str,
        hashes: Sequence[SequenceHash],
        *,
        deadline_ms: int | None = None,
        first_tokens: Sequence[int] | np.ndarray | None = None,
        trace: str = "",
        hurry: bool = True,
    ) -> Hit | None:
        """See ConnectorCore.lookup.

        `first_tokens` are those of the first block, where the hashes begin a sequence; `trace` is
        the `traceparent` of the engine's own span. Both only serve whoever looks on. Without
        `hurry` it may wait for `nudge`, or 100 ms.
        """
        origin = self._origin(first_tokens, trace)
        with self._lock:
            hit, effects = self._core.lookup(
                request, hashes, _now_ms(), deadline_ms=deadline_ms, origin=origin
            )
        self._carry_out(effects, hurry=hurry)
        return hit

    def nudge(self) -> None:
        """Have sent what could wait."""
        self._thread.ring()

    def _origin(self, first_tokens: Sequence[int] | np.ndarray | None, trace: str) -> Origin:
        welcome = self.welcome
        if welcome is None or not (welcome.explains or welcome.traces):
            return UNSAID
        content = b"" if first_tokens is None else content_digest(first_tokens)
        if not welcome.traces:
            return Origin(content)
        outer = trace_context.parse(trace)
        span = outer.child() if outer is not None else trace_context.new_trace()
        return Origin(content, str(span), time.time_ns() // 1_000, trace if outer else "")

    def take(self, request: str, blocks: Sequence[int]) -> Load:
        """See ConnectorCore.take."""
        with self._lock:
            return self._core.take(request, blocks, _now_ms())

    def load_ended(self, result: LoadResult) -> None:
        """See ConnectorCore.load_ended."""
        with self._lock:
            effects = self._core.load_ended(result, _now_ms())
        self._carry_out(effects)

    def forget(self, request: str, *, hurry: bool = True) -> None:
        """See ConnectorCore.forget."""
        with self._lock:
            effects = self._core.forget(request)
        self._carry_out(effects, hurry=hurry)

    def offer(self, runs: Sequence[OfferRun], *, priority: int = 0) -> int | None:
        """See ConnectorCore.offer."""
        with self._lock:
            offer, effects = self._core.offer(runs, _now_ms(), priority=priority)
        self._carry_out(effects)
        return offer

    def revoke(self, offer: int) -> None:
        """See ConnectorCore.revoke."""
        with self._lock:
            effects = self._core.revoke(offer)
        self._carry_out(effects)

    def drain_ended(self) -> list[OfferEnded]:
        """Offers that have ended since the last call: their blocks may be freed."""
        ended: list[OfferEnded] = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def idle(self) -> bool:
        """Nothing is on offer, asked or leased: a quiet point."""
        with self._lock:
            return self._core.idle() and not self._ended

    def counts(self) -> dict[str, int]:
        """What has been counted, links included."""
        with self._lock:
            counts = dict(self._core.counts)
        for link in (self._host, *self._events):
            for name, count in link.counts.items():
                counts[f"link.{name}"] = counts.get(f"link.{name}", 0) + count
        return counts

    # --- the link thread --------------------------------------------------------------------

    def _from_host_tier(self, message: FromHostTier) -> None:
        with self._lock:
            match message:
                case Welcome():
                    self.welcome = message
                    self._core.explains = message.explains
                    effects = self._core.attached(message.epoch)
                case Found():
                    effects = self._core.found(message)
                case Pulled():
                    effects = self._core.pulled(message)
                case _:
                    effects = []
        self._carry_out(effects)
        self._on_news()

    def _host_down(self) -> None:
        with self._lock:
            effects = self._core.detached()
        self._carry_out(effects)
        self._on_news()

    def _host_moved(self, moved: Moved) -> None:
        with self._lock:
            self._core.moved(_now_ms(), moved.within_ms)

    def _may_leave(self) -> bool:
        with self._lock:
            return self._core.may_leave()

    def _from_consolidator(self, message: FromConsolidator) -> None:
        effects: list[Effect] = []
        with self._lock:
            match message:
                case Attached(rank=rank) if rank == self._offers_through:
                    self._core.events_attached = message.offers
                case Refused(offer=int(offer)):
                    effects = self._core.revoke(offer, "refused")
        self._carry_out(effects)
        if effects:
            self._on_news()

    def _consolidator_down(self) -> None:
        with self._lock:
            self._core.events_attached = False

    def _tick(self, now_ms: int) -> None:
        with self._lock:
            effects = self._core.tick(now_ms)
        self._carry_out(effects)
        if effects:
            self._on_news()

    def _carry_out(self, effects: Sequence[Effect], *, hurry: bool = True) -> None:
        for effect in effects:
            match effect:
                case ToHost(message):
                    self._thread.say(self._host, message, ring=hurry)
                case ToEvents(message):
                    self._thread.say(self._events[0], message)
                case OfferEnded():
                    self._ended.append(effect)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
