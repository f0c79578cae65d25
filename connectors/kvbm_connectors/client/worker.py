"""The worker half: one rank's device memory, lent to the host tier, filled from the arena.

Offload needs nothing from a worker but its registered memory (`lending.py`): the host tier pulls.
Onboard is a pull by the worker, since it owns the destination (`pulls.py`).

A load names the life of the host tier that it is from. The scheduler half may have been welcomed by
that life before this worker: such a load is parked until the worker has its arena too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvbm_common.identity import Namespace
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.tier.parts import Share, share_of_rank
from kvbm_common.wire.local import (
    Beat,
    FromHostTier,
    Hello,
    Region,
    Welcome,
    from_host_tier,
    to_host_tier,
)

from kvbm_connectors.client.arena_access import Access, ArenaAccess
from kvbm_connectors.client.lending import lend, needs_owner
from kvbm_connectors.client.link import Link
from kvbm_connectors.client.link_thread import LinkThread
from kvbm_connectors.client.pulls import Pulls
from kvbm_connectors.core.messages import Load, LoadResult

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import Gpu

log = logging.getLogger(__name__)

OFFER_MS = 5_000
"""The longest life of an offer by default, in milliseconds."""
VERIFIES = {0: "never", 1: "always"}
"""`verify_every` → the word that the host tier lists for the worker; others: `sampled`."""


class WorkerHalf:
    """One rank of one engine. Owns a NIXL agent and a link, each in its own thread."""

    def __init__(
        self,
        *,
        engine: str,
        incarnation: str,
        namespace: Namespace,
        regions: Sequence[Region],
        host_tier_endpoint: str,
        rank: int = 0,
        world_size: int = 1,
        share: Share | None = None,
        verify_every: int = 1,
        verify: str = "",
        onboard_mover: str = "auto",
        on_news: Callable[[], None] = lambda: None,
        gpu: Gpu | None = None,
        group_namespaces: Sequence[Namespace] = (),
        offer_deadline_ms: int = OFFER_MS,
        reads_arena: bool = True,
    ) -> None:
        """Verify one load in `verify_every`, 0: none. With a `gpu` the regions are in its memory,
        which no code here may touch. `verify` is what the host tier lists for this worker, where
        `verify_every` does not say it. Without a `share` the rank holds the part of its number. One
        that does not read the arena lends its memory alone: it opens no connection to the host
        tier. Raises KvbmError or TimeoutError.
        """
        self.counts: Counter[str] = Counter()
        self._on_news = on_news
        self._reads_arena = reads_arena
        self._limiter = OncePerKind(log)
        name = f"{engine}-{rank}"
        self._pulls = Pulls(
            regions,
            name=name,
            share=share or share_of_rank(rank, world_size),
            verify_every=verify_every,
            counts=self.counts,
            on_end=self._end,
            gpu=gpu,
        )
        self._mover, agent = lend(f"{engine}-{incarnation}-{rank}", regions, gpu)
        self._arena = ArenaAccess(
            self._mover,
            wanted=onboard_mover,
            name=name,
            block_bytes=self._pulls.pieces.bytes,
            counts=self.counts,
            on_change=self._look_at_parked,
            gpu=gpu,
        )
        self._lock = threading.Lock()
        self._ended: deque[LoadResult] = deque()
        self._parked: list[Load] = []
        self._given_up = 0
        """The life whose arena some load has awaited in vain: no other one waits for it."""
        self._loading = 0
        self._attend_s = 2 * offer_deadline_ms / 1000
        self._attends_until = 0.0
        self._attends = gpu is None or needs_owner(agent)
        self._mover.attend(0)
        self.expect_reads(expected=True)
        self._closed = False
        hello = Hello(
            engine=engine, incarnation=incarnation, role="worker", namespace=namespace, rank=rank,
            group_namespaces=list(group_namespaces), world_size=world_size, agent=agent,
            regions=list(regions),
            verify=verify or VERIFIES.get(verify_every, "sampled"), share=share,
        )  # fmt: skip
        self._link = self._link_to(host_tier_endpoint, hello)
        thread_name = f"kvbm-{engine}-worker-{rank}"
        self._thread = LinkThread(
            [self._link], name=thread_name, on_tick=self._tick, may_rest=self._may_rest
        )

    def _link_to(self, endpoint: str, hello: Hello) -> Link:
        return Link(
            f"{hello.engine}: worker {hello.rank}",
            endpoint,
            to_host_tier,
            from_host_tier,
            lambda: hello,
            Beat(engine=hello.engine, incarnation=hello.incarnation),
            self._from_host_tier,
            on_moved=self._host_moved,
            may_leave=lambda: self._loading == 0,
        )

    def start(self) -> None:
        """Begin to attach to the host tier."""
        self._thread.start()

    def close(self) -> None:
        """End both threads; loads in flight end first, or fail."""
        with self._lock:
            self._closed = True
            parked, self._parked = self._parked, []
        for load in parked:
            self._end(_failed(load, "closed"))
        self._thread.close()
        self._arena.close()
        self._mover.close()  # Ends every load's future, so that nothing is submitted after it.
        self._arena.wait_closed()
        self._pulls.close()

    @property
    def loading(self) -> int:
        """Return the number of loads in flight."""
        return self._loading

    @property
    def expects_reads(self) -> bool:
        """Tell whether the mover stands ready for the host tier now; for tests."""
        return self._mover.attends

    @property
    def epoch(self) -> int:
        """The life of the host tier whose arena is read now; 0 for none."""
        attached = self._arena.attached()
        return 0 if attached is None else attached.welcome.epoch

    def expect_reads(self, *, expected: bool) -> None:
        """Note whether anything is on offer: if not, no mover needs to stand ready for the host
        tier. It does so for twice as long as an offer lasts: a step that offers more says so
        again. A GPU's memory is read by CUDA IPC, without it."""
        if not self._attends:
            return
        now = time.monotonic()
        if not expected and self._attends_until > now:
            self._attends_until = now
            self._mover.attend(0)
        elif expected and now + self._attend_s / 2 > self._attends_until:
            self._attends_until = now + self._attend_s
            self._mover.attend(self._attend_s)

    def start_load(self, load: Load) -> None:
        """Pull the blocks of a load. Its result comes once, by `drain_ended`, whatever happens."""
        assert self._reads_arena, f"load of {load.request}: this worker does not read the arena"
        with self._lock:
            self._loading += 1
        self._begin(load)
        self._thread.wake()

    def _begin(self, load: Load) -> None:
        """Pull, park, or say why neither."""
        now_ms = _now_ms()
        with self._lock:
            is_closed = self._closed
            access = self._arena.access(load.epoch)
            is_coming = access is Access.COMING and load.epoch != self._given_up
            if is_coming and now_ms < load.deadline_ms and not is_closed:
                self._parked.append(load)
                return
            if access is Access.COMING:
                self._given_up = load.epoch
        attached = self._arena.attached()
        if is_closed:
            self._end(_failed(load, "closed"))
        elif access is Access.GONE:
            self._end(_failed(load, "arena_changed"))
        elif access is not Access.READY or attached is None:
            self._end(_failed(load, "no_arena"))
        elif attached.welcome.epoch != load.epoch:  # Another life's arena has come meanwhile.
            self._end(_failed(load, "arena_changed"))
        elif now_ms >= load.deadline_ms:
            self._end(_failed(load, "lease_ended"))
        else:
            self._pulls.begin(load, attached, (load.deadline_ms - now_ms) / 1000)

    def _look_at_parked(self) -> None:
        """Begin the parked loads again: their arena may have come, or may be gone."""
        with self._lock:
            parked, self._parked = self._parked, []
        for load in parked:
            self._begin(load)

    def _may_rest(self) -> bool:
        has_arena = not self._reads_arena or self._arena.attached() is not None
        return self._loading == 0 and has_arena

    def _tick(self, now_ms: int) -> None:
        self._arena.tick(now_ms)
        self._look_at_parked()

    def _end(self, result: LoadResult) -> None:
        if result.reason:
            self.counts[f"loads_failed.{result.reason}"] += 1
            self._limiter.warning(
                result.reason, f"load of {result.load.request} failed", request=result.load.request
            )
        with self._lock:
            self._ended.append(result)
            self._loading -= 1
        self._on_news()

    def drain_ended(self) -> list[LoadResult]:
        """Return the loads that have ended since the last call."""
        ended: list[LoadResult] = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def _host_moved(self, _moved: object) -> None:
        self._arena.leaving()

    def _from_host_tier(self, message: FromHostTier) -> None:
        if isinstance(message, Welcome):
            self._mover.expect_peer()  # So that no read waits for the connection.
            if self._reads_arena:
                self._arena.welcomed(message)


def _failed(load: Load, reason: str) -> LoadResult:
    return LoadResult(load, (False,) * len(load.blocks), (), reason)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
