"""A store: one host pool's pages in our tiers, by calls that return when it is over.

    find    one lookup, whose answer is awaited unless the host tier lists all pages as being in
            memory; what it found stays leased for the load that usually follows
    load    lookup (or the one that `find` has left), take, copy into the pool's pages, verify
    store   offer, wait until the host tier has pulled; it asks whether the pages were held

Any thread may call. Waiting has the deadlines of the core; only a copy into a page is waited for
until it has ended, because the engine would reuse a page that is still written to.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvbm_common.identity import Namespace, SequenceHash
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.wire.consolidator import Attach
from kvbm_common.wire.local import Region

from kvbm_connectors.client.scheduler import SchedulerHalf
from kvbm_connectors.client.worker import WorkerHalf
from kvbm_connectors.core.messages import Hit, LoadResult, OfferRun, offers_of
from kvbm_connectors.sglang.committed_pages import CommittedPages
from kvbm_connectors.sglang.held_lookups import Held, HeldLookups, refuse_twice
from kvbm_connectors.sglang.hits import trailing_lengths
from kvbm_connectors.sglang.options import CALL_MAX_S, Options
from kvbm_connectors.sglang.page_offers import POLL_S, PageOffers, parts_of

log = logging.getLogger(__name__)

QUESTION_LEAST_MS = 200
"""The shortest wait for an answer: it is there by then unless the host tier stands still."""
PRESENT_MAX = 64
"""Lookups of single pages that are asked at once."""
SLOW_LOAD_S = 30.0


class Store:
    """The halves of an engine that is one pool of one rank."""

    def __init__(
        self,
        *,
        engine: str,
        incarnation: str,
        namespace: Namespace,
        regions: Sequence[Region],
        options: Options,
        stream: Attach,
    ) -> None:
        """Lend the memory of the regions. Raises KvbmError or TimeoutError if that fails."""
        self.namespace = namespace
        self.block_bytes = sum(region.piece_bytes for region in regions)
        self.counts: Counter[str] = Counter()
        self._limiter = OncePerKind(log)
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._results: dict[str, LoadResult] = {}
        self._held = HeldLookups()
        self._committed = CommittedPages()
        self._closed = False
        settings = options.settings
        self._onboard_deadline_ms = settings.onboard_deadline_ms
        self._offer_deadline_s = settings.offer_deadline_ms / 1000
        self._worker = WorkerHalf(
            engine=engine,
            incarnation=incarnation,
            namespace=namespace,
            regions=regions,
            host_tier_endpoint=settings.host_tier_endpoint,
            verify_every=options.verify_every,
            onboard_mover=settings.onboard_mover,
            offer_deadline_ms=settings.offer_deadline_ms,
            on_news=self._news,
        )
        self._worker.expect_reads(expected=False)
        self._scheduler = SchedulerHalf(
            engine=engine,
            incarnation=incarnation,
            namespace=namespace,
            host_tier_endpoint=settings.host_tier_endpoint,
            consolidator_endpoint=settings.consolidator_endpoint,
            streams=[stream],
            limits=options.limits,
            on_news=self._news,
        )
        self._offers = PageOffers(self._changed, self._scheduler, self._worker)

    def start(self) -> None:
        """Begin to attach. Until then, and whenever a service is away: nothing is found."""
        self._worker.start()
        self._scheduler.start()

    def close(self) -> None:
        """Detach; threads that wait are told so."""
        with self._changed:
            self._closed = True
            self._offers.close()
            self._give_all_back()
            self._changed.notify_all()
        self._scheduler.close()
        self._worker.close()
        self._news()
        with self._changed:
            self._committed.close()

    @property
    def attached(self) -> bool:
        """Tell whether host tier and consolidator are both attached."""
        return self._scheduler.attached and self._scheduler.streams_attached

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait until both services have answered."""
        with self._changed:
            return self._wait(lambda: self.attached, timeout_s)

    def all_counts(self) -> dict[str, int]:
        """Return all counters, of this store and of both halves."""
        return self._scheduler.counts() | dict(self._worker.counts) | dict(self.counts)

    # --- news, from the link's and the worker's threads -------------------------------------

    def _news(self) -> None:
        with self._changed:
            self._offers.take(self._scheduler.drain_ended())
            for result in self._worker.drain_ended():
                self._results[result.load.request] = result
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait under the lock. Deadlines of the core pass without news: look now and then."""
        give_up_s = time.monotonic() + timeout_s
        while not condition():
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or self._closed:
                return False
            self._changed.wait(min(left_s, POLL_S))
        return True

    # --- lookups ----------------------------------------------------------------------------

    def find(self, names: Sequence[SequenceHash], give_up_s: float = math.inf) -> int:
        """Return how many of these pages, from the first on, can be had now. They stay leased.

        `give_up_s`, of the monotonic clock, goes before a deadline that is later.
        """
        if not names:
            return 0
        asked = tuple(names)
        refuse_twice(asked)
        with self._changed:
            if self._is_known(asked):
                self.counts["known_pages"] += len(asked)
                return len(asked)
            held, found = self._leased(asked, give_up_s)
            if found:
                self._hold(held)
            return found

    def _is_known(self, names: tuple[SequenceHash, ...]) -> bool:
        """Return whether all pages are listed and their lookup is on its way.

        The answer is left for later: SGLang loads a moment afterwards, or, where it finds the hit
        too short, never.
        """
        scheduler = self._scheduler
        welcome, epoch = scheduler.welcome, scheduler.epoch
        if self._closed or not self._committed.covers(names, welcome, epoch=epoch):
            return False
        held = self._held.take(names) or Held(self._new_request(), names)
        self._hold(held)
        return self._look_up(held, hurry=False) is None

    def present(
        self, names: Sequence[SequenceHash], window: int = 1, *, every: bool = True,
        give_up_s: float = math.inf,
    ) -> list[bool]:  # fmt: skip
        """Return, for each of these pages, whether it can be loaded now.

        With `every`, the host tier is asked about each page that the committed table does not
        list. Without, only about pages that could make the prefix longer, last first. Past the
        deadline no more are asked about: they are not there. Questions count for no hit rate; where
        no prefix has its part, its last page counts as missed.
        """
        assert window > 0, f"a window of {window} pages"
        if not names:
            return []
        found = self._listed(names) or [False] * len(names)
        self.counts["known_pages"] += sum(found)
        give_up_s = min(give_up_s, time.monotonic() + self._onboard_deadline_ms / 1000)
        for end in range(len(names), 0, -PRESENT_MAX):
            longest = 0 if every else max(trailing_lengths(found, window), default=0)
            if longest >= min(len(names), end + window - 1):
                break
            begin = max(0, end - PRESENT_MAX, longest - window + 1)
            left_ms = int(1000 * (give_up_s - time.monotonic()))
            if left_ms <= 0:
                self.counts["unasked_pages"] += found[:end].count(False)
                break
            self._ask_each(names, [n for n in range(begin, end) if not found[n]], found, left_ms)
        if not trailing_lengths(found, window):
            self._miss(names[-1])
        return found

    def _listed(self, names: Sequence[SequenceHash]) -> list[bool] | None:
        with self._changed:
            epoch = 0 if self._closed else self._scheduler.epoch
            return self._committed.which(names, self._scheduler.welcome, epoch=epoch)

    def _miss(self, name: SequenceHash) -> None:
        """Have a page counted and explained that was asked about in vain; no answer is awaited."""
        missed = Held(self._new_request(), (name,))
        with self._changed:
            self._look_up(missed, hurry=False)
            self._give_back(missed)

    def _ask_each(
        self, names: Sequence[SequenceHash], asked: Sequence[int], found: list[bool], left_ms: int,
        *, trusts: bool = False,
    ) -> None:  # fmt: skip
        """Look pages up one by one; `trusts`: one that failed to load lately counts as here."""
        part = {i: Held(self._new_request(), (names[i],), only_asks=True) for i in asked}
        with self._changed:
            for held in part.values():
                self._look_up(held, left_ms=left_ms)
            for index, held in part.items():
                hit = self._answer(held)
                found[index] = hit.blocks > 0 or (trusts and hit.reason == "avoided")
                self._give_back(held)

    def _leased(
        self, names: tuple[SequenceHash, ...], give_up_s: float = math.inf
    ) -> tuple[Held, int]:
        """Return a lookup of these pages, and how many it has found: that of `find` where it has
        all of them, or a new one. Both have one deadline. One without a page is given back."""
        refuse_twice(names)
        give_up_s = min(give_up_s, time.monotonic() + self._onboard_deadline_ms / 1000)
        held = self._held.take(names)
        if held is not None:
            at_once = self._look_up(held)
            hit = at_once or self._answer(held, give_up_s)
            if hit.blocks >= len(names) or (at_once is None and hit.blocks):
                return held, min(hit.blocks, len(names))  # What has just come is as of now.
            self._give_back(held)  # Its lease has ended, or more has been stored since.
            if at_once is None and hit.reason == "no_answer":
                return held, 0  # Another question would wait for a second deadline.
        fresh = Held(self._new_request(), names)
        found = min(self._answer(fresh, give_up_s).blocks, len(names))
        if not found:
            self._give_back(fresh)
        return fresh, found

    def _new_request(self) -> str:
        return f"{next(self._numbers)}"

    def _look_up(self, held: Held, *, hurry: bool = True, left_ms: int | None = None) -> Hit | None:
        """Ask, or ask again; None: there is no answer yet."""
        return self._scheduler.lookup(
            held.request, held.names, hurry=hurry, only_asks=held.only_asks,
            onboard_deadline_ms=left_ms,
        )  # fmt: skip

    def _answer(self, held: Held, give_up_s: float = math.inf) -> Hit:
        """Ask until there is an answer: the core says no when its deadline has passed."""
        left_ms = max(QUESTION_LEAST_MS, 1000 * (give_up_s - time.monotonic()))
        left_ms = min(self._onboard_deadline_ms, left_ms)
        if (hit := self._look_up(held, left_ms=int(left_ms))) is None:
            self._scheduler.nudge()
        while hit is None:
            if self._closed:
                return Hit(0, reason="closed")
            self._changed.wait(POLL_S)
            hit = self._look_up(held)
        return hit

    def _hold(self, held: Held) -> None:
        for replaced in self._held.hold(held):
            self._give_back(replaced)

    def _give_back(self, held: Held) -> None:
        self._scheduler.forget(held.request, hurry=False)

    def _give_all_back(self) -> None:
        for held in self._held.take_all():
            self._give_back(held)

    # --- loads ------------------------------------------------------------------------------

    def load(self, names: Sequence[SequenceHash], blocks: Sequence[int]) -> list[bool]:
        """Fill these blocks of the pool; true for each that holds its page now."""
        assert len(names) == len(blocks)
        if not names:
            return []
        result = self._load(tuple(names), blocks)
        flags = [False] * len(names)
        if result is not None:
            self._scheduler.load_ended(result)
            flags[: len(result.intact)] = result.intact
        self.counts["loaded_pages"] += sum(flags)
        self.counts["missed_pages"] += len(flags) - sum(flags)
        return flags

    def _load(self, names: tuple[SequenceHash, ...], blocks: Sequence[int]) -> LoadResult | None:
        with self._changed:
            held, found = self._leased(names)
            load = self._scheduler.take(held.request, blocks[:found]) if found else None
        if load is None:
            return None
        self._worker.start_load(load)
        return self._wait_load(load.request)

    def _wait_load(self, request: str) -> LoadResult:
        started_s = time.monotonic()
        with self._changed:
            while request not in self._results:
                self._changed.wait(POLL_S)
                if time.monotonic() - started_s > SLOW_LOAD_S:
                    self._limiter.warning("slow_load", "a page is still being written to")
            return self._results.pop(request)

    # --- offers -----------------------------------------------------------------------------

    def store(
        self, parent: SequenceHash, names: Sequence[SequenceHash], blocks: Sequence[int]
    ) -> bool:
        """Have these pages pulled; true when all of them are in the host tier."""
        assert len(names) == len(blocks)
        if not names:
            return True
        run = OfferRun(parent, tuple(names), tuple(blocks))
        with self._offers.expected():
            complete = self._is_stored(run)
        self.counts["stored_pages" if complete else "store_failed_pages"] += len(names)
        if not complete:
            with self._changed:
                self._give_all_back()  # Perhaps there was no room for all that is leased.
        return complete

    def _is_stored(self, run: OfferRun) -> bool:
        pulled, began_s = 0, time.monotonic()
        give_up_s, last_s = began_s + self._offer_deadline_s, began_s + CALL_MAX_S
        parts = list(offers_of(run))  # Pages of a side pool come at once, and may be many.
        for part in parts:
            if (count := self._offers.pull([part], last_s)) is None:
                return False
            pulled += count
        # What was pulled is committed, and listed, when these questions are answered.
        committed = not pulled or self._are_here([part.hashes[-1] for part in parts], last_s)
        if pulled == len(run.hashes):  # Each part is committed as a whole, or not at all.
            return committed
        return self._is_settled(run, last_s if self._listed(run.hashes) is None else give_up_s)

    def _is_settled(self, run: OfferRun, give_up_s: float) -> bool:
        """Wait for pages that another engine was storing: they are there, or are offered again."""
        pause_s = 0.0
        while missing := self._missing(run.hashes, give_up_s, asks=pause_s >= POLL_S):
            again = self._offers.pull(parts_of(run, missing), give_up_s) if pause_s else 0
            if again is None or self._closed or time.monotonic() > give_up_s:
                return False
            if again:
                self._are_here([run.hashes[missing[-1]]], give_up_s)
            with self._changed:
                self._wait(lambda: False, pause_s)
            pause_s = min(max(2 * pause_s, 0.005), 8 * POLL_S)
        return True

    def _missing(self, names: Sequence[SequenceHash], give_up_s: float, *, asks: bool) -> list[int]:
        """Return the places of the pages that the host tier does not list. Where it `asks`, or has
        no list yet, the host tier is asked about each of them: its list may have been full."""
        listed = self._listed(names)
        found = listed or [False] * len(names)
        missing = [place for place, here in enumerate(found) if not here]
        if asks or listed is None:
            self._ask_in_parts(names, missing, found, give_up_s)
        return [place for place in missing if not found[place]]

    def _ask_in_parts(
        self, names: Sequence[SequenceHash], asked: list[int], found: list[bool], give_up_s: float
    ) -> None:
        """Ask about pages until the time is up, and once at least."""
        for start in range(0, len(asked), PRESENT_MAX):
            left_ms = int(1000 * (give_up_s - time.monotonic()))
            if start and left_ms <= 0:
                return
            left_ms = min(max(QUESTION_LEAST_MS, left_ms), self._onboard_deadline_ms)
            self._ask_each(names, asked[start : start + PRESENT_MAX], found, left_ms, trusts=True)

    def _are_here(self, names: Sequence[SequenceHash], give_up_s: float) -> bool:
        """Return whether all of these pages are committed. Our confirmation went ahead on the same
        socket, so the answers come after the commit."""
        found = [False] * len(names)
        self._ask_in_parts(names, list(range(len(names))), found, give_up_s)
        return all(found)
