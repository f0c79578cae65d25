"""Page offers: pages that SGLang keeps still until the host tier has pulled them, or time is up."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvbm_connectors.client.scheduler import SchedulerHalf
from kvbm_connectors.client.worker import WorkerHalf
from kvbm_connectors.core.messages import OFFER_BLOCKS_MAX, OfferEnded, OfferRun

POLL_S = 0.1
"""The longest sleep of a thread before it looks at the time again, in seconds."""


class PageOffers:
    """Offers of one store that threads wait for, under the store's lock."""

    def __init__(
        self, changed: threading.Condition, scheduler: SchedulerHalf, worker: WorkerHalf
    ) -> None:
        self._changed, self._scheduler, self._worker = changed, scheduler, worker
        self._ended: dict[int, OfferEnded | None] = {}
        """Offers that a thread waits for, and how they ended."""
        self._expecting = 0
        """Threads that have something to be read."""
        self._closed = False

    def take(self, ended: Iterable[OfferEnded]) -> None:
        """Take news of offers; the caller holds the lock and wakes those who wait."""
        for one in ended:
            if one.offer in self._ended:
                self._ended[one.offer] = one

    def close(self) -> None:
        """Let no thread wait any longer; the caller holds the lock and wakes them."""
        self._closed = True

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Keep our mover ready while the host tier is about to read."""
        with self._changed:
            self._expecting += 1
            self._worker.expect_reads(expected=True)
        try:
            yield
        finally:
            with self._changed:
                self._expecting -= 1
                if not self._expecting:
                    self._worker.expect_reads(expected=False)

    def pull(self, runs: Sequence[OfferRun], give_up_s: float = math.inf) -> int | None:
        """Have pages pulled, until `give_up_s` of the monotonic clock; return how many were pulled.

        The others were there, or are on their way by another offer. None: some are neither.
        """
        with self._changed:
            # Another thread tells the end, under this lock: it cannot be missed.
            offer = self._scheduler.offer(runs)
            if offer is None:
                return None
            self._ended[offer] = None
            try:
                while (ended := self._ended[offer]) is None and not self._closed:
                    if time.monotonic() >= give_up_s:
                        return None
                    self._changed.wait(POLL_S)
                return ended.stored if ended is not None and ended.complete else None
            finally:
                # SGLang has its pages back now: a pull that has not ended is not confirmed.
                self._scheduler.revoke(offer)
                del self._ended[offer]


def parts_of(run: OfferRun, places: Sequence[int]) -> list[OfferRun]:
    """Return pages of a run as runs of one page, as many as an offer has at most."""
    parents = (run.parent, *run.hashes)
    return [
        OfferRun(parents[place], (run.hashes[place],), (run.blocks[place],))
        for place in places[:OFFER_BLOCKS_MAX]
    ]
