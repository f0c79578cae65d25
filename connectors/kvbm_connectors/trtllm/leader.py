"""Leader: answers TensorRT-LLM's scheduler by means of the scheduler half.

    get_num_new_matched_tokens ──► lookup, waited for; copy, compare: a promise
    build_connector_meta ────────► promises become loads, as soon as their device blocks are known
    cancel_load, request_reset ──► give the request's promises up
    request_finished ────────────► offer the computed blocks; True: the engine holds them
    (worker of rank 0) saved ────► the offers are over: the engine may free them

Three properties of the engine shape it (kv_cache_connector.py and py_executor.py of release 1.2):

- The engine asks for a match once, and needs the answer at once. So this thread waits for the host
  tier; all lookups of one step together wait no longer than `onboard_deadline_ms`.
- A promised load cannot fail: see promises.py.
- A cancelled request is freed without a call to the connector, so a pull might read blocks that
  another request has by then. So blocks are offered only at the end of a request: the engine keeps
  them until every rank's worker reports the request as saved. And the number of tracked requests
  is bounded: the oldest make room.

It knows the engine by `protocols` only, and is called by one thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from kvbm_common.identity import Hasher, SequenceHash
from kvbm_common.memory.arena import Arena, ArenaUnavailable
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.wire.local import Welcome

from kvbm_connectors.client.offered_names import OfferedNames
from kvbm_connectors.client.scheduler import SchedulerHalf
from kvbm_connectors.core.messages import Hit, Load, LoadResult, offers_of
from kvbm_connectors.trtllm.promises import Kept, PromisedLoad, PromiseKeeper, PromisePlan
from kvbm_connectors.trtllm.protocols import Request, RequestData, SchedulerOutput
from kvbm_connectors.trtllm.tracked import PromisedRequest, refusal_of_request

log = logging.getLogger(__name__)

TRACKED_MAX = 8_192
"""Requests that are tracked; engines run some thousands at a time. One that was cancelled in
silence stays until younger ones push it out."""
WAIT_MS_MIN = 10
"""Below this remaining time the host tier is not asked."""
NEWS_WAIT_S = 0.05
"""The interval between looks without news: the core ends a lookup that has no answer."""


class LeaderSide:
    """All requests of one engine."""

    def __init__(
        self,
        half: SchedulerHalf,
        hasher: Hasher,
        keeper: PromiseKeeper,
        *,
        news: threading.Event,
        step_wait_ms: int,
        min_priority: int = 0,
    ) -> None:
        """Create the leader's side. `news` is set by the half's thread. All lookups of a step wait
        `step_wait_ms` at most."""
        self.counts: Counter[str] = Counter()
        self._half, self._hasher, self._keeper = half, hasher, keeper
        self._block_tokens = hasher.namespace.block_tokens
        self._news = news
        self._step_wait_ms = step_wait_ms
        self._step_until_ms: int | None = None
        """The end of the wait of this step's lookups; None before the first of them."""
        self._min_priority = min_priority
        self._limiter = OncePerKind(log)
        self._requests: dict[int, PromisedRequest] = {}
        """The tracked requests, the one seen longest ago first."""
        self._by_offer: dict[int, int] = {}
        self._saved: set[int] = set()
        """Finished requests whose offers are over, and that are not reported to the workers yet."""
        self._handed_out: list[int] = []
        """Promised slots that workers read by the last plan."""
        self._plan_number = 0
        self._known = OfferedNames()
        self._arena: Arena | None = None
        self._arena_epoch = 0

    # --- admission --------------------------------------------------------------------------

    def matched(self, request: Request, computed_tokens: int) -> int:
        """Return the number of tokens that are promised beyond the device's own `computed_tokens`.

        One token is always left to compute: the engine insists on it.
        """
        tracked = self._track(request)
        if tracked is None or tracked.refused:
            return 0
        self._give_up(tracked)  # It was looked up before, and begins again.
        if computed_tokens % self._block_tokens:
            self.counts["partial_matches"] += 1
            return 0
        tokens = request.get_tokens(0)
        tracked.local = local = computed_tokens // self._block_tokens
        usable = (len(tokens) - 1) // self._block_tokens
        if local >= usable:
            return 0
        names = tracked.first_names(self._hasher, request, tokens, usable)[local:]
        first = None if local else tokens[: self._block_tokens]
        tracked.promised = self._found(str(request.request_id), names, first)
        return len(tracked.promised) * self._block_tokens

    def _found(
        self, request: str, names: Sequence[SequenceHash], first_tokens: Sequence[int] | None
    ) -> tuple[int, ...]:
        """Ask the host tier; return the promised slots to which its blocks were copied."""
        hit = self._wait_found(request, names, first_tokens)
        if hit is None or not hit.blocks:
            self._half.forget(request)
            return ()
        arena = self._mapped_arena()
        if arena is None:
            self.counts["promises_lost.no_arena"] += hit.blocks
            self._half.forget(request)
            return ()
        return self._promise(self._half.take(request, range(hit.blocks)), *arena)

    def _wait_found(
        self, request: str, names: Sequence[SequenceHash], first_tokens: Sequence[int] | None
    ) -> Hit | None:
        """Ask, and wait for the rest of this step's time. None: too late, or no answer."""
        now_ms = _now_ms()
        if self._step_until_ms is None:
            self._step_until_ms = now_ms + self._step_wait_ms
        left_ms = self._step_until_ms - now_ms
        if left_ms < WAIT_MS_MIN:
            self.counts["lookups_not_asked"] += 1
            return None
        while True:
            self._news.clear()
            hit = self._half.lookup(
                request, names, onboard_deadline_ms=left_ms, first_tokens=first_tokens
            )
            if hit is not None:
                return hit
            self._news.wait(NEWS_WAIT_S)

    def _promise(self, load: Load, arena: Arena, welcome: Welcome) -> tuple[int, ...]:
        """Copy the blocks of a hit into memory of our own, and give the lease back."""
        found, room = len(load.slots), self._keeper.room(load.block_bytes)
        if room < found:
            self.counts["promises_cut_blocks"] += found - room
            self._limiter.warning("cut", "promised blocks fill KVBM_PROMISE_GB: a hit was cut")
        if load.epoch != welcome.epoch:
            kept = Kept(())  # The arena is of the next life; the lease ended with the last one.
            self.counts["promises_lost.arena_changed"] += found
        else:
            kept = self._keeper.keep(load, min(found, room), arena, welcome.slot_bytes)
        in_time = _now_ms() < load.deadline_ms
        corrupt = () if kept.corrupt is None else (kept.corrupt,)
        intact = tuple(index not in corrupt for index in range(found))
        self._half.load_ended(LoadResult(load, intact, corrupt, "corrupt" if corrupt else ""))
        self.counts["promises_lost.corrupt"] += len(corrupt)
        if not in_time:
            # The checksums show that no other block was written there yet. But a read that ends
            # after its lease has failed, here as everywhere.
            self.counts["promises_lost.lease_ended"] += len(kept.slots)
            self._keeper.give_up(kept.slots)
            return ()
        self.counts["promised_blocks"] += len(kept.slots)
        return kept.slots

    def _mapped_arena(self) -> tuple[Arena, Welcome] | None:
        """Return the arena of the host tier's present life, mapped once per life; None if it cannot
        be mapped."""
        welcome = self._half.welcome
        if welcome is None:
            return None
        if self._arena is None or self._arena_epoch != welcome.epoch:
            self._close_arena()
            try:
                self._arena = Arena.attach(welcome.arena_path, writable=False)
            except (ArenaUnavailable, OSError) as error:  # OSError: no room in our address space.
                self._limiter.warning("arena", f"the arena cannot be mapped: {error}")
                return None
            self._arena_epoch = welcome.epoch
        return self._arena, welcome

    def cut(self, request: Request, start: int, end: int) -> None:
        """Give up the promises of the tokens from `start` to `end`, which will not be used.

        The engine gives back the end of a hit, all of it, or its beginning, if that is on the
        device by then: it still relies on the rest of such a hit.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None or not tracked.promised:
            return
        self._keeper.give_up(tracked.cut(start, end, self._block_tokens))

    def reset(self, request: Request) -> None:
        """Forget a request that begins again, with other blocks, and give up its promises; one with
        offers stays."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None and not tracked.offers:
            self._give_up(tracked)
            del self._requests[request.request_id]

    def _give_up(self, tracked: PromisedRequest) -> None:
        self._keeper.give_up(tracked.promised)
        tracked.promised = ()

    # --- steps ------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput | None) -> PromisePlan:
        """Return the plan of the workers for this step. They have finished the last one: all ranks
        have met in the engine's `get_finished` since."""
        self._step_until_ms = None
        self._keeper.give_up(self._handed_out)
        self._handed_out = []
        self._drain()
        loads: list[PromisedLoad] = []
        if output is not None:
            for data in output.new_requests:
                self._scheduled(data, loads, is_new=True)
            for data in output.cached_requests:
                self._scheduled(data, loads, is_new=False)
        self._plan_number += 1
        offering = bool(self._by_offer)
        return PromisePlan(self._plan_number, self._keeper.slot_bytes, tuple(loads), offering)

    def _scheduled(self, data: RequestData, loads: list[PromisedLoad], *, is_new: bool) -> None:
        tracked = self._requests.get(data.request_id)
        if tracked is None or tracked.refused:
            return
        self._requests[data.request_id] = self._requests.pop(data.request_id)
        if is_new:
            tracked.table, tracked.priorities = [], []
        blocks = list(data.new_block_ids)
        tracked.table += blocks
        tracked.priorities += getattr(data, "priorities", None) or [None] * len(blocks)
        if tracked.promised:
            loads += self._hand_out(data.request_id, tracked)

    def _hand_out(self, request: int, tracked: PromisedRequest) -> list[PromisedLoad]:
        """Keep a promise in the request's first step; returns its loads.

        If the engine took less than was promised, it has no blocks for the rest, and computes it.
        """
        blocks = tuple(tracked.table[tracked.local : tracked.local + len(tracked.promised)])
        slots, tracked.promised = tracked.promised, ()
        self._handed_out += slots
        tracked.loaded = len(blocks)
        self.counts["kept_blocks"] += len(blocks)
        first = tracked.local
        self._known.add(tracked.names[first : first + len(blocks)])
        if not blocks:
            return []
        taken = slots[: len(blocks)]
        return [PromisedLoad(request, taken, blocks, self._keeper.checksums(taken))]

    # --- the end of a request ---------------------------------------------------------------

    def finished(self, request: Request, blocks: Sequence[int]) -> bool:
        """Finish a request, and offer its blocks; True: keep its blocks until `saved` names it."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.finished:
            return False  # Refused, forgotten, or finished before.
        self._give_up(tracked)
        if not tracked.refused:
            self._offer(request, tracked, blocks)
        tracked.finished = True
        if not tracked.offers:
            del self._requests[request.request_id]
        return bool(tracked.offers)

    def _offer(self, request: Request, tracked: PromisedRequest, blocks: Sequence[int]) -> None:
        tokens = request.get_tokens(0)
        if len(tokens) <= request.prompt_len:
            # Without a generated token it was cancelled or failed in the middle of its prompt, and
            # the engine does not tell how much of that was computed.
            self.counts["unfinished_prompts"] += 1
            return
        # The last token was sampled, and not computed.
        full = min((len(tokens) - 1) // self._block_tokens, len(blocks))
        end = min(full, tracked.deserving(self._min_priority)) if self._min_priority else full
        self.counts["priority_skipped_blocks"] += full - end
        names = tracked.first_names(self._hasher, request, tokens, end)
        first = self._first_to_offer(tracked, names)
        run = tracked.run_to_offer(self._hasher, blocks, first, end)
        for part in offers_of(run):
            offer = self._half.offer([part])
            if offer is None:
                continue  # No host tier, or too many offers: the core has counted it.
            tracked.offers.add(offer)
            self._by_offer[offer] = request.request_id
            self._known.add(part.hashes)

    def _first_to_offer(self, tracked: PromisedRequest, names: Sequence[SequenceHash]) -> int:
        """Return the first block to offer: those before it came from the host tier, or have been
        offered before."""
        self._known.serve(self._half.epoch)
        before = tracked.local + tracked.loaded
        unknown = (index for index in range(min(before, len(names)))
                   if names[index] not in self._known)  # fmt: skip
        return next(unknown, min(before, len(names)))

    def saved(self, requests: Iterable[int]) -> list[int]:
        """Return the finished requests whose blocks may be freed now; each is returned once."""
        self._drain()
        saved = [request for request in requests if request in self._saved]
        self._saved.difference_update(saved)
        return saved

    def _drain(self) -> None:
        for ended in self._half.drain_ended():
            request = self._by_offer.pop(ended.offer)
            tracked = self._requests[request]
            tracked.offers.discard(ended.offer)
            if tracked.finished and not tracked.offers:
                del self._requests[request]
                self._saved.add(request)

    # --- what is followed -------------------------------------------------------------------

    def _track(self, request: Request) -> PromisedRequest | None:
        """Return the record of a request, a new one if needed; None if there are too many that must
        not be forgotten."""
        tracked = self._requests.get(request.request_id)
        if tracked is None and self._has_room():
            refused = refusal_of_request(request)
            if refused:
                self.counts[f"requests_refused.{refused}"] += 1
            tracked = self._requests[request.request_id] = PromisedRequest(refused)
        return tracked

    def _has_room(self) -> bool:
        """Forget the request seen longest ago, if there are too many. Requests with promises must
        be kept, and so must those with offers: their ends will be reported."""
        if len(self._requests) < TRACKED_MAX:
            return True
        for request, tracked in self._requests.items():
            if not tracked.offers and not tracked.promised:
                del self._requests[request]
                self.counts["requests_forgotten"] += 1
                return True
        self.counts["requests_refused.busy"] += 1
        return False

    @property
    def idle(self) -> bool:
        """Tell whether no request is tracked, and no offer is open."""
        return not self._requests and not self._by_offer

    def check(self) -> None:
        """Assert every invariant of the leader."""
        self._keeper.check()
        promised = [slot for tracked in self._requests.values() for slot in tracked.promised]
        assert len(set(promised)) == len(promised)
        assert len(promised) + len(self._handed_out) == self._keeper.promised
        on_offer = {offer for tracked in self._requests.values() for offer in tracked.offers}
        assert on_offer == self._by_offer.keys()
        assert not self._saved & self._requests.keys()

    def close(self) -> None:
        """Unmap the arena and unlink the promises."""
        self._close_arena()
        self._keeper.close()

    def _close_arena(self) -> None:
        arena, self._arena, self._arena_epoch = self._arena, None, 0
        if arena is not None:
            arena.close()


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
