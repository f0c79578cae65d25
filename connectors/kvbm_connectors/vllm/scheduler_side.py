"""The scheduler side: what vLLM's scheduler asks and tells, in our connector's words.

    get_num_new_matched_tokens ──► lookup: None until the answer is there
    update_state_after_alloc ────► take: a load for the workers, in the next plan
    build_connector_meta ────────► offers of blocks that are full since the last step; the plan
    update_connector_output ─────► loads that have ended on every rank
    request_finished ────────────► last offers; the blocks are held while an offer is out

It knows vLLM only by `engine_types`, and is called by one thread.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvbm_common.identity import Hasher, SequenceHash

from kvbm_connectors.core import ConnectorMisuse
from kvbm_connectors.messages import Hit, Load, LoadResult, OfferEnded, OfferRun, merge_results
from kvbm_connectors.vllm.engine_types import BlockTable, EngineRequest, SchedulerOutput
from kvbm_connectors.vllm.plan import NEWS, StepPlan, StepReport
from kvbm_connectors.vllm.tracked import Tracked, refusal_of_request

log = logging.getLogger(__name__)

OFFER_BLOCKS_MAX = 256
"""Blocks of one offer; a long prompt makes several, so that the host tier can share its time."""
KNOWN_MAX = 65_536
"""Names that the host tier was offered in its present life: 6 MB. Who is forgotten is offered
again when a prompt meets it on the device, and skipped by the host tier."""
IDLE_WAIT_S = 0.001
"""A step without work waits so long for news, as vLLM itself does, but no longer than they take."""


class Half(Protocol):
    """SchedulerHalf, as far as it is used here."""

    @property
    def epoch(self) -> int: ...
    def lookup(
        self,
        request: str,
        hashes: Sequence[SequenceHash],
        *,
        first_tokens: Sequence[int] | None = None,
        trace: str = "",
    ) -> Hit | None: ...
    def take(self, request: str, blocks: Sequence[int]) -> Load: ...
    def load_ended(self, result: LoadResult) -> None: ...
    def forget(self, request: str) -> None: ...
    def offer(self, runs: Sequence[OfferRun], *, priority: int = 0) -> int | None: ...
    def revoke(self, offer: int) -> None: ...
    def drain_ended(self) -> list[OfferEnded]: ...


class SchedulerSide:
    """All requests of one engine."""

    def __init__(self, half: Half, hasher: Hasher, *, world_size: int = 1, sync: bool = False):
        self.counts: Counter[str] = Counter()
        self._half = half
        self._hasher = hasher
        self._block_tokens = hasher.namespace.block_tokens
        self._world_size = world_size
        self._sync = sync
        self._requests: dict[str, Tracked] = {}
        self._by_offer: dict[int, str] = {}
        self._loads: list[Load] = []
        """Taken since the last plan."""
        self._results: dict[str, list[LoadResult]] = {}
        """Loads of which some ranks have reported, by request."""
        # Ordered: of a plain dict whose front was deleted, the first entry is not found at once.
        self._known: OrderedDict[SequenceHash, None] = OrderedDict()
        self._known_epoch = 0
        self._waiting = 0
        """Lookups that had no answer in this step."""

    @property
    def holding(self) -> bool:
        """Do offers keep finished requests' blocks from being freed?"""
        return any(tracked.finished and tracked.offers for tracked in self._requests.values())

    @property
    def idle(self) -> bool:
        """No request is followed."""
        return not self._requests

    # --- admission --------------------------------------------------------------------------

    def matched(self, request: EngineRequest, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the device's own; None: ask again. May be asked often.

        One token is always left to compute, as after a hit on the device: the answer is the same.
        """
        tracked = self._track(request)
        if tracked.refused or request.skip_reading_prefix_cache:
            return 0, False
        usable = (request.num_tokens - 1) // self._block_tokens
        tracked.local = local = computed_tokens // self._block_tokens
        if local >= usable:
            return 0, False
        names = tracked.first_names(self._hasher, usable)[local:]
        hit = self._lookup(request, names, local)
        if hit is not None and hit.reason == "lease_ended":
            hit = self._lookup(request, names, local)
        if hit is None:
            self._waiting += 1
            return None, False
        tracked.hit = hit
        return hit.blocks * self._block_tokens, hit.blocks > 0 and not self._sync

    def _lookup(
        self, request: EngineRequest, names: Sequence[SequenceHash], local: int
    ) -> Hit | None:
        plain = not local and not request.mm_features  # Else tokens are not all that is in a name.
        return self._half.lookup(
            request.request_id,
            names,
            first_tokens=request.all_token_ids[: self._block_tokens] if plain else None,
            trace=(getattr(request, "trace_headers", None) or {}).get("traceparent", ""),
        )

    def allocated(self, request: EngineRequest, blocks: BlockTable, external_tokens: int) -> None:
        """The scheduler has blocks for a request, of which it will have so many tokens loaded."""
        tracked = self._track(request)
        if not external_tokens:
            self._half.forget(request.request_id)  # A load in flight goes on.
            return
        count = -(-external_tokens // self._block_tokens)
        end = tracked.local + count
        ids = blocks.get_block_ids()[0][tracked.local : end]
        names = tracked.first_names(self._hasher, end)[tracked.local :]
        load = self._take(request.request_id, names, ids)
        tracked.lease, tracked.sync = load.lease, self._sync
        tracked.loaded = (tracked.local, end)
        # What is loaded is in the host tier. It must count as known before anybody shares it.
        self._remember(names)
        self._loads.append(load)

    def _take(self, request: str, names: Sequence[SequenceHash], blocks: list[int]) -> Load:
        try:
            return self._half.take(request, blocks)
        except ConnectorMisuse as error:
            # The engine counts on a load. One that fails is recomputed; an exception is the end.
            log.error("a load of %s cannot be: %s", request, error)
            self.counts["loads_impossible"] += 1
            return Load(
                request=request, epoch=0, lease=0, slots=(0,) * len(blocks), blocks=tuple(blocks),
                hashes=tuple(names), checksums=(0,) * len(blocks), block_bytes=0, deadline_ms=0,
            )  # fmt: skip

    def hit_of(self, request: EngineRequest) -> Hit:
        """Where the blocks of a request's last hit were."""
        return self._track(request).hit

    # --- steps ------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """What the workers shall do in this step."""
        for request in output.preempted_req_ids or ():
            self._preempted(request)
        sent = self._ended_offers()
        state = output.kv_connector_block_state
        for request in output.num_scheduled_tokens:
            tracked = self._requests.get(request)
            if tracked is None or tracked.computed(self._block_tokens) <= tracked.offered:
                continue
            table = state.get_block_ids(request) if state is not None else None
            if table is not None:
                self._offer(tracked, table[0])
        loads, self._loads = tuple(self._loads), []
        waiting, self._waiting = self._waiting, 0
        if not output.num_scheduled_tokens and not loads and not sent and self._expects(waiting):
            NEWS.wait(IDLE_WAIT_S)
            NEWS.clear()
        return StepPlan(
            loads, bool(loads) and self._sync, offering=bool(self._by_offer), sent=tuple(sent)
        )

    def _expects(self, waiting: int) -> bool:
        loading = any(tracked.lease is not None for tracked in self._requests.values())
        return bool(waiting) or loading or self.holding

    def reported(self, report: StepReport) -> None:
        """Loads that have ended on some rank; over when all ranks have said so."""
        for result in report.results:
            parts = self._results.setdefault(result.load.request, [])
            parts.append(result)
            if len(parts) == self._world_size:
                del self._results[result.load.request]
                self._loaded(merge_results(parts))

    def _loaded(self, result: LoadResult) -> None:
        self._half.load_ended(result)
        self.counts["loads_failed" if result.usable < len(result.intact) else "loads_intact"] += 1
        tracked = self._requests.get(result.load.request)
        if tracked is None:
            return
        tracked.lease = None
        first = tracked.loaded[0]
        tracked.loaded = (first, first + result.usable)
        tracked.offered = min(tracked.offered, first + result.usable)
        if tracked.finished and not tracked.offers:
            del self._requests[result.load.request]

    # --- offers -----------------------------------------------------------------------------

    def _offer(self, tracked: Tracked, blocks: list[int]) -> None:
        if tracked.refused:
            return
        if self._half.epoch != self._known_epoch:
            self._known_epoch = self._half.epoch
            self._known.clear()
        runs = tracked.runs_to_offer(
            tracked.computed(self._block_tokens),
            hasher=self._hasher,
            blocks=blocks,
            is_known=self._known.__contains__,
        )
        for part in _parts(runs):
            offer = self._half.offer(part)
            if offer is None:
                continue  # Nobody is there, or too much is on offer: the core has counted it.
            tracked.offers.add(offer)
            self._by_offer[offer] = tracked.request.request_id
            for run in part:
                self._remember(run.hashes)

    def _remember(self, names: Iterable[SequenceHash]) -> None:
        for name in names:
            self._known.pop(name, None)
            self._known[name] = None
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def _ended_offers(self) -> list[str]:
        """Requests that had finished and whose last offer is over now."""
        sent: list[str] = []
        for ended in self._half.drain_ended():
            request = self._by_offer.pop(ended.offer, None)
            tracked = self._requests.get(request) if request is not None else None
            if tracked is None or request is None:
                continue  # Revoked, and ended meanwhile.
            tracked.offers.discard(ended.offer)
            if tracked.finished and not tracked.offers:
                del self._requests[request]
                sent.append(request)
        return sent

    def _preempted(self, request: str) -> None:
        """Its blocks are free since, and are overwritten in this step at the earliest."""
        tracked = self._requests.get(request)
        if tracked is None or tracked.finished:
            return
        for offer in tracked.offers:
            self._by_offer.pop(offer, None)
            self._half.revoke(offer)
        self.counts["offers_revoked"] += len(tracked.offers)
        tracked.offers.clear()
        tracked.offered = 0

    def finished(self, request: EngineRequest, blocks: list[int]) -> bool:
        """A request is over; True: hold its blocks until a plan says that they are sent."""
        name = request.request_id
        tracked = self._requests.get(name)
        if tracked is None:
            return False
        self._half.forget(name)
        self._offer(tracked, blocks)
        tracked.finished = True
        if tracked.lease is not None and not tracked.sync:
            # Aborted while it loads: vLLM holds the blocks until the load has ended.
            assert not tracked.offers, f"{name} loads into blocks that are on offer"
            return False
        if not tracked.offers:
            del self._requests[name]
        return bool(tracked.offers)

    def _track(self, request: EngineRequest) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            refused = refusal_of_request(request)
            if refused:
                self.counts[f"requests_refused.{refused}"] += 1
            tracked = self._requests[request.request_id] = Tracked(request, refused)
        return tracked


def _parts(runs: list[OfferRun]) -> Iterable[list[OfferRun]]:
    """The same runs, cut into offers of at most OFFER_BLOCKS_MAX blocks, prefix first."""
    for run in runs:
        parent = run.parent
        for start in range(0, len(run.hashes), OFFER_BLOCKS_MAX):
            end = start + OFFER_BLOCKS_MAX
            yield [OfferRun(parent, run.hashes[start:end], run.blocks[start:end])]
            parent = run.hashes[min(end, len(run.hashes)) - 1]
