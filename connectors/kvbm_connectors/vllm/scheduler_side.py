"""The scheduler side: what vLLM's scheduler asks and tells, in our connector's words.

    get_num_new_matched_tokens ──► lookup: None until the answer is there
    update_state_after_alloc ────► take: a load for the workers, in the next plan
    build_connector_meta ────────► offers of blocks that are full since the last step; the plan
    update_connector_output ─────► loads that have ended on every rank
    request_finished ────────────► last offers; the blocks are held while an offer is out

It knows vLLM only by `engine_types` and `versions`, and is called by one thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import Any

from kvbm_common.identity import Hasher, SequenceHash
from kvbm_common.tier.kv_groups import boundary_tokens

from kvbm_connectors.core.messages import ConnectorMisuse, Hit, Load, LoadResult
from kvbm_connectors.core.prefill_meter import PrefillMeter
from kvbm_connectors.vllm.adapters import Adapters
from kvbm_connectors.vllm.agent_hints import AgentHints
from kvbm_connectors.vllm.block_holds import NULL_BLOCK, BlockHolds
from kvbm_connectors.vllm.device_offers import DeviceOffers, Tables
from kvbm_connectors.vllm.engine_types import BlockTable, EngineRequest, SchedulerOutput
from kvbm_connectors.vllm.half import Half
from kvbm_connectors.vllm.kv_groups import KvGroup, runs_of
from kvbm_connectors.vllm.looks import Looks
from kvbm_connectors.vllm.plan import RankResults, StepPlan, StepReport, await_news, impossible_load
from kvbm_connectors.vllm.request_extras import RequestExtras
from kvbm_connectors.vllm.step_meter import StepMeter
from kvbm_connectors.vllm.stream_marks import RankMarks
from kvbm_connectors.vllm.tracked import Tracked, users_of
from kvbm_connectors.vllm.versions import states_of, tables_of

log = logging.getLogger(__name__)


class SchedulerSide:
    """All requests of one engine."""

    def __init__(
        self,
        half: Half,
        hasher: Hasher,
        *,
        world_size: int = 1,
        rewritten: int | None = None,
        adapters: Adapters | None = None,
        groups: Sequence[KvGroup] = (),
        holds: BlockHolds | None = None,
        hybrid: bool = True,
        all_tables: bool = True,
        meter: PrefillMeter | None = None,
    ) -> None:
        """Follow the requests of an engine with `world_size` ranks, whose steps `meter` times.

        `rewritten`: of so many tokens at a request's end a draft model writes KV again with the
        next step; None: no such model.
        Several KV groups, or one with a window, need `holds`; `hasher` is the first group's. Where
        one group of full attention has `holds`, it is not `hybrid`: a part of a hit may be loaded.
        `all_tables`: a step has the block tables of all its requests.
        """
        self.counts: Counter[str] = Counter()
        self.steps = StepMeter(meter, counts=self.counts)
        self.extras = RequestExtras(adapters or Adapters())
        self._half, self._stale = half, False  # Stale: the device has blocks of before a reset.
        self.groups = tuple(groups) or (KvGroup(hasher),)  # In vLLM's order.
        self.hints = AgentHints(half, self.groups, self.counts)
        self._hybrid = holds is not None and hybrid
        marks = RankMarks(world_size, rewritten=rewritten) if rewritten is not None else None
        self._offers = DeviceOffers(half, self.groups, self.counts, holds, marks)
        self._boundary_tokens = boundary_tokens(group.run(0, 0) for group in self.groups)
        """Tokens from one boundary to the next: blocks of all groups end there."""
        self._least = gcd(*(group.block_tokens for group in self.groups))
        """Greatest common divisor of the groups' block sizes: blocks end at multiples of it."""
        self._looks = Looks(self.groups, self._least, windows=self._hybrid, all_tables=all_tables)
        self._states_handed_over = any(group.handed_over for group in self.groups)
        self.evict: Callable[[EngineRequest, int], None] = lambda request, first: None
        """Takes a request's blocks from a token on out of vLLM's prefix cache."""
        self.tables_of: Callable[[Any, str], Tables] = tables_of
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []  # Taken since the last plan.
        self._results = RankResults(world_size)
        self._waiting, self._rests = 0, False  # Lookups without answer; the last step was empty.

    @property
    def holding(self) -> bool:
        """Tell whether blocks are held beside their requests, or for offers of ended ones."""
        requests = self._requests.values()
        return self._offers.holding or any(one.finished and one.offers for one in requests)

    @property
    def awaits_marks(self) -> bool:
        """Tell whether offers wait for what workers report with their next steps."""
        return self._offers.any_waits_for_mark

    @property
    def idle(self) -> bool:
        """Return whether no request is followed and nothing is on offer."""
        return not self._requests and not self._offers.any_out

    # --- admission --------------------------------------------------------------------------

    def matched(self, request: EngineRequest, computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens that can be loaded beyond the device's own (None: ask again), and
        whether they load while others compute. May be asked often.

        One token is always left to compute, as after a hit on the device: the answer is the same.
        """
        tracked = self._track(request)
        self._readmitted(tracked)
        if computed_tokens and self._stale:
            self._refuse(tracked, "stale_device")
        if tracked.unloadable and self._gives_way(tracked):
            return None, False
        if tracked.refused or tracked.unloadable or request.skip_reading_prefix_cache:
            return 0, False
        usable = self._last_boundary(request.num_tokens - 1)
        tracked.local = local = self._last_boundary(computed_tokens)
        usable -= self.steps.leave(tracked, usable - local, self._boundary_tokens)
        if local >= usable:
            return 0, False
        hit = self._lookup(tracked, usable)
        if hit is not None and hit.reason == "lease_ended":
            hit = self._lookup(tracked, usable)
        if hit is None:
            self._waiting += 1
            return None, False
        tracked.hit = hit
        if not self._hybrid:
            return hit.blocks * self._boundary_tokens, hit.blocks > 0
        self._note_boundaries(tracked, local, local + hit.shared)
        return hit.boundary, hit.boundary > 0

    def _gives_way(self, tracked: Tracked) -> bool:
        """Have vLLM try others first at every second rest: after one without room it stops."""
        others = (one for one in self._requests.values() if one.waits_with_blocks)
        tracked.gave_way = self._rests and not tracked.gave_way and any(others)
        return tracked.gave_way

    def _last_boundary(self, tokens: int) -> int:
        return tokens // self._boundary_tokens * self._boundary_tokens

    def _note_boundaries(self, tracked: Tracked, local: int, shared: int) -> None:
        """Keep windows where other prompts part from this one, and have vLLM end a step there, so
        that recurrent layers have a state to keep."""
        tracked.boundaries |= {local, shared}
        if self._states_handed_over and shared > local + tracked.hit.boundary:
            tracked.stop_at(shared)

    def _lookup(self, tracked: Tracked, usable: int) -> Hit | None:
        request, local = tracked.request, tracked.local
        begins_sequence = not local and not request.mm_features  # Then the tokens name the block.
        size = self.groups[0].block_tokens
        return self._half.lookup(
            request.request_id,
            tracked.names_between(self.groups, local, usable),
            groups=runs_of(self.groups, local, usable) if self._hybrid else (),
            first_tokens=request.all_token_ids[:size] if begins_sequence else None,
            trace=(getattr(request, "trace_headers", None) or {}).get("traceparent", ""),
            prefill=self.steps.cost(local),
        )

    def allocated(self, request: EngineRequest, blocks: BlockTable, external_tokens: int) -> None:
        """Turn a request's hit into a load into the blocks that vLLM has allocated."""
        tracked = self._track(request)
        if not external_tokens:
            self._half.forget(request.request_id)  # A load in flight goes on.
            return
        end = tracked.local + -(-external_tokens // self._boundary_tokens) * self._boundary_tokens
        tables = blocks.get_block_ids()
        ids: list[int] = []
        names: list[SequenceHash] = []
        for group in self.groups:
            needed = group.needed_indices(tracked.local, end)
            ids += tables[group.table][needed.start : needed.stop]
            names += tracked.first_names(group.hasher, needed.stop)[needed.start :]
        load = self._take(tracked, names, ids, external_tokens)
        tracked.load_begins(load.lease, end)
        # What is loaded is in the host tier. It must count as known before a request shares it.
        self._offers.loads(names)
        self._loads.append(load)

    def _take(
        self, tracked: Tracked, names: Sequence[SequenceHash], blocks: list[int], tokens: int
    ) -> Load:
        request = tracked.request.request_id
        try:
            if self._hybrid and (tokens != tracked.hit.boundary or NULL_BLOCK in blocks):
                text = f"{tokens} of {tracked.hit.boundary} tokens into {blocks}"
                raise ConnectorMisuse(f"{text}: a hit over several KV groups is loaded as a whole")
            return self._half.take(request, blocks)
        except ConnectorMisuse as error:
            # The engine counts on a load. One that fails is recomputed; an exception is the end.
            log.error("the hit of %s cannot be loaded: %s", request, error)
            self.counts["loads_impossible"] += 1
            tracked.unloadable = True
            return impossible_load(request, blocks, names, whole=self._hybrid)

    def hit_of(self, request: EngineRequest) -> Hit:
        """Return where the blocks of a request's last hit were."""
        return self._track(request).hit

    # --- steps ------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """Return what the workers do in this step."""
        for request in output.preempted_req_ids or ():
            self._preempted(request)
        sent = self._take_ended_offers()
        if self._states_handed_over:
            self._offers.hold_states(self._requests, states_of(output.kv_connector_block_state))
        for request in self._looks.begin_step(output.num_scheduled_tokens):
            tracked = self._requests.get(request)
            if tracked is not None:
                self._scheduled(request, tracked, output)
        self._offers.offer_of_others(self._requests, output.num_scheduled_tokens)
        self._offers.send_if_due()
        loads, self._loads = tuple(self._loads), []
        waiting, self._waiting, self._rests = self._waiting, 0, not output.num_scheduled_tokens
        if self._rests and not loads and not sent and self._expects(waiting):
            await_news()
        self.steps.planned(output, self._requests)
        mark, offering = self._offers.mark_of_step(), self._offers.any_out
        return StepPlan(loads, offering=offering, sent=tuple(sent), mark=mark)

    def _scheduled(self, name: str, tracked: Tracked, output: SchedulerOutput) -> None:
        """Offer what is full of a request that this step computes for."""
        drafts = (output.scheduled_spec_decode_tokens or {}).get(name, ())
        tracked.scheduled(output.num_scheduled_tokens[name], len(drafts))
        if self._stale and tracked.hits_device:
            self._refuse(tracked, "stale_device")
        if self._hybrid:
            tables = self.tables_of(output.kv_connector_block_state, name)
            self._offers.hold_tails(tracked, tables, max(0, tracked.dispatched_tokens))
        if tracked.computed() // self._least > tracked.offered // self._least:
            # vLLM makes a table when it is asked for: not for requests that offer nothing.
            self._offers.offer(tracked, self.tables_of(output.kv_connector_block_state, name))
        self._looks.look_again(name, tracked)

    def _readmitted(self, tracked: Tracked) -> None:
        """Follow a request afresh, from the next step that computes for it."""
        tracked.readmitted()
        self._looks.look_soon(tracked.request.request_id)

    def _forget(self, request: str) -> None:
        """Follow a request no longer."""
        del self._requests[request]
        self._looks.forget(request)

    def _expects(self, waiting: int) -> bool:
        requests = self._requests.values()
        return bool(waiting) or self.holding or any(one.lease is not None for one in requests)

    def reported(self, report: StepReport) -> None:
        """Collect the ranks' results; a load or mark is over when every rank has reported it."""
        self._offers.marks_ended(report.mark_ends)
        for result in self._results.complete(report):
            self._loaded(result)

    def _loaded(self, result: LoadResult) -> None:
        self._half.load_ended(result)
        self.steps.loaded(result)
        self.counts["loads_failed" if result.usable < len(result.intact) else "loads_intact"] += 1
        if (tracked := self._requests.get(result.load.request)) is None:
            return
        tracked.lease = None
        first, end = tracked.loaded
        if result.usable < len(result.intact):
            end = first + (0 if result.load.whole else result.usable * self._boundary_tokens)
            # Of a request without a block vLLM keeps the room for this load reserved: a second load
            # would wait for room beside it, and with it all requests behind.
            tracked.unloadable |= not end or result.load.whole
        tracked.loaded = (first, end)
        tracked.offered = min(tracked.offered, end)
        if tracked.finished and not tracked.offers:
            self._forget(result.load.request)
        else:
            self._looks.look_soon(result.load.request)

    # --- offers -----------------------------------------------------------------------------

    def _take_ended_offers(self) -> list[str]:
        """Take the requests that had finished and whose last offer is over now."""
        sent: list[str] = []
        for tracked, offer in self._offers.take_ended():
            if offer not in tracked.offers:
                continue  # The request does not hold its blocks.
            tracked.offers.discard(offer)
            if tracked.finished and not tracked.offers:
                self._forget(tracked.request.request_id)
                sent.append(tracked.request.request_id)
        return sent

    def _preempted(self, request: str) -> None:
        """Revoke what a request offers and holds itself: vLLM has freed its blocks, and the step
        now planned may overwrite them."""
        if (tracked := self._requests.get(request)) is None or tracked.finished:
            return
        # No request can have hit them yet: a `schedule` call that preempts admits none.
        self.evict(tracked.request, tracked.written)
        self._offers.preempted(tracked)
        self._offers.release_unoffered(tracked)
        tracked.offers.clear()
        tracked.offered = 0
        self._readmitted(tracked)

    def finished(self, request: EngineRequest, tables: Tables) -> bool:
        """Return True to keep a finished request's blocks until a plan names it in `sent`."""
        name = request.request_id
        tracked = self._requests.get(name)
        self.hints.end(name, tracked)
        if tracked is None:
            return False
        self._half.forget(name)
        if not any(tables):  # A reset has freed what it offers, as the next plan would have said.
            self._offers.preempted(tracked)
            tracked.offers.clear()
        self._offers.hold_last_tail(tracked, tables)
        self._offers.offer(tracked, tables)
        self._offers.send()
        self._offers.release_unoffered(tracked)
        tracked.finished = True
        if tracked.lease is not None:
            # Aborted while it loads: vLLM holds the blocks until the load has ended.
            assert not tracked.offers, f"{name} loads into blocks that are on offer"
            return False
        if not tracked.offers:
            self._forget(name)
        return bool(tracked.offers)

    def _track(self, request: EngineRequest) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            refused, extras = self.extras.named(request)
            if refused:
                self.counts[f"requests_refused.{refused}"] += 1
                if request.lora_request is not None:
                    self.adapter_loaded(request.lora_request)
            tracked = self._requests[request.request_id] = Tracked(
                request, refused, extras, boundaries={self._last_boundary(request.num_tokens - 1)}
            )
            self._looks.look_soon(request.request_id)
            self.hints.begin(request)
        return tracked

    def adapter_loaded(self, lora: Any, *, failed: bool = False, kept: bool = True) -> None:
        """Store nothing more of requests whose adapter this one may have replaced."""
        if self.extras.adapters.note_load(lora, failed=failed, kept=kept):
            is_meant = partial(self.extras.adapters.may_share, other=lora)
            for tracked in users_of(self._requests.values(), is_meant):
                self._refuse(tracked, "lora_changed")

    def adapters_lost(self) -> None:
        """Store nothing of requests with adapters any more: what vLLM has loaded is not known."""
        self.extras.adapters.lost = True
        for tracked in users_of(self._requests.values(), lambda lora: True):
            tracked.refused = "lora_unknown"  # What it holds is released at its end.
            self.counts["requests_refused.lora_unknown"] += 1

    def _refuse(self, tracked: Tracked, reason: str) -> None:
        """Store nothing of a request any more, and load nothing for it."""
        self._offers.release_unoffered(tracked)
        if not tracked.refused:
            tracked.refused = reason
            self.counts[f"requests_refused.{reason}"] += 1

    def device_cleared(self) -> None:
        """Note that vLLM has emptied its device cache: requests hit nothing of before there."""
        self._stale = False

    def reset(self, generation: str, *, cleared: bool | None = None) -> bool:
        """Name blocks by another generation from now on. Returns whether the device cache holds
        nothing of the one before; `cleared` says so. None: it does unless a request holds blocks.
        Else requests that hit any are refused until it is cleared: these may be of other weights.

        Requests without blocks are followed afresh; what others compute is stored under no name.
        Offers are revoked: the engine's memory may be about to be taken away.
        """
        holds = any(one.holds_blocks for one in self._requests.values())
        self._stale = holds if cleared is None else not cleared
        self.extras.begin(generation)
        live = [(name, one) for name, one in self._requests.items() if not one.finished]
        for name, tracked in live:
            if tracked.lease is None and not tracked.request.num_computed_tokens:
                self._half.forget(name)
                self._preempted(name)
                self._forget(name)
            else:
                self._refuse(tracked, "reset")
        self._offers.revoke_all()
        return not self._stale
