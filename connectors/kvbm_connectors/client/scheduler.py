"""The scheduler half: what an engine's scheduler calls. It never blocks and never raises for a
service that is away; the engine computes, as it would without us.

A broken invariant of the core costs the call, not the engine: it is logged with the core's story,
and the engine gets the answer that it would get without a host tier.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from kvbm_common.identity import Namespace, SequenceHash
from kvbm_common.tier.kv_groups import GroupRun, indispensable
from kvbm_common.tier.prefill_cost import PrefillCost
from kvbm_common.wire.consolidator import (
    Attach,
    Attached,
    Detach,
    FromConsolidator,
    from_consolidator,
    to_consolidator,
)
from kvbm_common.wire.local import (
    Beat,
    Bye,
    Found,
    FromHostTier,
    Hello,
    Moved,
    Pulled,
    Refused,
    Welcome,
    from_host_tier,
    to_host_tier,
)
from kvbm_common.wire.local_fields import Adapter
from kvbm_common.wire.session_hint import Action

from kvbm_connectors.client.described_streams import DescribedStreams
from kvbm_connectors.client.link import Link, LinkState
from kvbm_connectors.client.link_thread import LinkThread
from kvbm_connectors.client.miss_filter_access import MissFilterAccess
from kvbm_connectors.client.origin import origin_of
from kvbm_connectors.core.core import ConnectorCore, ConnectorView
from kvbm_connectors.core.messages import (
    ConnectorLimits,
    ConnectorMisuse,
    Effect,
    Hit,
    Load,
    LoadResult,
    OfferEnded,
    OfferRun,
    ToEvents,
    ToHost,
)

log = logging.getLogger(__name__)


def new_incarnation() -> str:
    """Draw a random name for one life of an engine."""
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
        limits: ConnectorLimits | None = None,
        on_news: Callable[[], None] = lambda: None,
        group_namespaces: Sequence[Namespace] = (),
    ) -> None:
        self._core = ConnectorCore(
            engine=engine, incarnation=incarnation, namespace=namespace.digest, limits=limits
        )
        self._lock = threading.Lock()
        self._faults: Counter[str] = Counter()
        """Calls that a broken invariant of the core has cost."""
        self._ended: deque[OfferEnded] = deque()
        self._streams = DescribedStreams(streams)
        self._on_news = on_news
        self._filter = MissFilterAccess()
        self.welcome: Welcome | None = None
        """The last one: where the arena is, whether the host tier answers now or not."""
        self._bye = Bye(engine=engine, incarnation=incarnation)
        self._detach = Detach(engine=engine, incarnation=incarnation)
        hello = Hello(
            engine=engine,
            incarnation=incarnation,
            role="scheduler",
            namespace=namespace,
            group_namespaces=list(group_namespaces),
            world_size=world_size,
        )
        beat = Beat(engine=engine, incarnation=incarnation)
        self._host = self._host_link(host_tier_endpoint, hello, beat)
        self._events = [
            self._stream_link(consolidator_endpoint, index, beat) for index in range(len(streams))
        ]
        self._core.take_offers(taken=False)
        # The first stream's link carries the offers of all ranks.
        self._offers_through = streams[0].rank if streams else None
        if self._events:
            self._events[0].on_down = self._consolidator_down
        self._thread = LinkThread(
            [self._host, *self._events], name=f"kvbm-{engine}", on_tick=self._tick,
            may_rest=lambda: self._view().may_rest,
        )  # fmt: skip

    def _host_link(self, endpoint: str, hello: Hello, beat: Beat) -> Link:
        return Link(
            f"{hello.engine}: host tier",
            endpoint,
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

    def _stream_link(self, endpoint: str, index: int, beat: Beat) -> Link:
        """Return the link that attaches one event stream, as it is described when it greets."""
        return Link(
            f"{beat.engine}: consolidator, rank {self._streams[index].rank}",
            endpoint,
            to_consolidator,
            from_consolidator,
            lambda: self._streams[index],
            beat,
            self._from_consolidator,
        )

    def start(self) -> None:
        """Begin to attach. Until then, and whenever a service is away: pass-through."""
        self._thread.start()

    def close(self) -> None:
        """Say good-bye, and what has missed, and end the thread."""
        self._tick(_now_ms())
        self._thread.say(self._host, self._bye)
        for link in self._events:
            self._thread.say(link, self._detach)
        self._thread.close()

    def _view(self) -> ConnectorView:
        with self._lock:
            return self._core.view

    @property
    def epoch(self) -> int:
        """Return the life of the host tier that is there; 0 without one."""
        return self._view().epoch

    @property
    def attached(self) -> bool:
        """Tell whether a host tier is attached."""
        return self.epoch != 0

    @property
    def streams_attached(self) -> bool:
        """Tell whether the consolidator follows all event streams of this engine."""
        followed = all(link.state is LinkState.UP for link in self._events)
        return followed and (self._view().takes_offers or not self._events)

    def describe(
        self, *, generation: str | None = None, generation_us: int | None = None,
        adapters: Sequence[Adapter] | None = None, passes_through: str | None = None,
    ) -> None:  # fmt: skip
        """Tell the consolidator by what the engine's blocks are named from now on, or why it
        computes without a cache."""
        listed = None if adapters is None else list(adapters)
        self._streams.describe(
            generation=generation, generation_us=generation_us, adapters=listed,
            passes_through=passes_through,
        )  # fmt: skip
        for index, link in enumerate(self._events):
            self._thread.say(link, self._streams[index])

    def wait_described(self, timeout_s: float) -> bool:
        """Wait until the consolidator has taken the generation in; False where it has not."""
        if not self.streams_attached:
            return not self._streams.has_events
        return self._streams.wait_taken(timeout_s)

    # --- what the engine calls --------------------------------------------------------------

    def lookup(
        self,
        request: str,
        hashes: Sequence[SequenceHash],
        *,
        onboard_deadline_ms: int | None = None,
        first_tokens: Sequence[int] | np.ndarray | None = None,
        trace: str = "",
        hurry: bool = True,
        groups: Sequence[GroupRun] = (),
        prefill: PrefillCost | None = None,
        only_asks: bool = False,
    ) -> Hit | None:
        """See ConnectorCore.lookup.

        To explain and to trace: `first_tokens` of the first block, where the hashes begin a
        sequence; `trace`, the engine's `traceparent`. Without `hurry` it may wait 100 ms.
        """
        origin = origin_of(self.welcome, first_tokens, trace)
        hit: Hit | None = Hit(0, reason="core_fault")
        effects: list[Effect] = []
        with self._guarded("lookup"):
            is_absent = self._filter.denies_any(indispensable(groups, hashes))
            hit, effects = self._core.lookup(
                request, hashes, _now_ms(), onboard_deadline_ms=onboard_deadline_ms, origin=origin,
                groups=groups, is_absent=is_absent, prefill=prefill, only_asks=only_asks,
            )  # fmt: skip
        self._carry_out(effects, hurry=hurry)
        return hit

    def nudge(self) -> None:
        """Have sent what could wait."""
        self._thread.ring()

    def take(self, request: str, blocks: Sequence[int]) -> Load:
        """Take a hit: see ConnectorCore.take. Raises ConnectorMisuse."""
        with self._guarded("take"):
            return self._core.take(request, blocks, _now_ms())
        raise ConnectorMisuse(f"request {request}: the core is at fault")

    def load_ended(self, result: LoadResult) -> None:
        """End a load: see ConnectorCore.load_ended."""
        self._run("load_ended", lambda: self._core.load_ended(result, _now_ms()))

    def forget(self, request: str, *, hurry: bool = True) -> None:
        """Forget a lookup: see ConnectorCore.forget."""
        self._run("forget", lambda: self._core.forget(request), hurry=hurry)

    def offer(
        self, runs: Sequence[OfferRun], *, priority: int = 0, namespace: bytes = b"",
        hurry: bool = True,
    ) -> int | None:  # fmt: skip
        """Offer device blocks: see ConnectorCore.offer. Without `hurry` it may wait 100 ms."""
        offer: int | None = None
        effects: list[Effect] = []
        with self._guarded("offer"):
            offer, effects = self._core.offer(
                runs, _now_ms(), priority=priority, namespace=namespace
            )
        self._carry_out(effects, hurry=hurry)
        return offer

    def revoke(self, offer: int) -> None:
        """Revoke an offer: see ConnectorCore.revoke."""
        self._run("revoke", lambda: self._core.revoke(offer))

    def hint(
        self, session: str, action: Action, names: Sequence[SequenceHash] = (), *, ttl_ms: int = 0
    ) -> None:
        """Pass on what an agent says of its session: see ConnectorCore.hint."""
        self._run("hint", lambda: self._core.hint(session, action, names, ttl_ms=ttl_ms))

    def _run(self, call: str, step: Callable[[], list[Effect]], *, hurry: bool = True) -> None:
        effects: list[Effect] = []
        with self._guarded(call):
            effects = step()
        self._carry_out(effects, hurry=hurry)

    @contextmanager
    def _guarded(self, call: str) -> Iterator[None]:
        """Hold the core; a broken invariant of it costs this call, and not the engine."""
        with self._lock:
            try:
                yield
            except AssertionError:
                self._faults[f"core_faults.{call}"] += 1
                log.exception("the connector's core failed in %s; the engine goes on", call)
        if self._thread.is_resting and not self._view().may_rest:
            self._thread.wake()

    def drain_ended(self) -> list[OfferEnded]:
        """Return the offers that have ended since the last call: their blocks may be freed."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def idle(self) -> bool:
        """Return whether nothing is on offer, asked for or leased: a quiet point."""
        with self._lock:
            return self._core.view.idle and not self._ended

    def counts(self) -> dict[str, int]:
        """Return all counters, those of the links included."""
        with self._lock:
            counts = dict(self._core.view.counts) | self._faults
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
                    self._filter.welcomed(message)
                    effects = self._core.attached(
                        message.epoch, explains=message.explains, hints=message.hints
                    )
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
            self._filter.lost()
            effects = self._core.detached()
        self._carry_out(effects)
        self._on_news()

    def _host_moved(self, moved: Moved) -> None:
        with self._lock:
            self._core.moved(_now_ms(), moved.within_ms)

    def _may_leave(self) -> bool:
        with self._lock:
            return self._core.view.may_leave

    def _from_consolidator(self, message: FromConsolidator) -> None:
        effects: list[Effect] = []
        if isinstance(message, Attached):
            self._streams.taken(message.rank, message.generation)
        with self._lock:
            match message:
                case Attached(rank=rank) if rank == self._offers_through:
                    self._core.take_offers(taken=message.offers)
                case Refused(offer=int(offer)):
                    effects = self._core.revoke(offer, "refused")
        self._carry_out(effects)
        if effects:
            self._on_news()

    def _consolidator_down(self) -> None:
        with self._lock:
            self._core.take_offers(taken=False)

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
                    self._thread.say(self._events[0], message, ring=hurry)
                case OfferEnded():
                    self._ended.append(effect)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
