"""A small model of vLLM's scheduler around the connector's real scheduler side.

What is kept of vLLM: blocks are counted and found by name; a block can be found from the moment it
is *scheduled*, so that a second request may hit it in the same step; a step may be scheduled while
another one is computed; blocks of a request that a step in flight still writes are freed when that
step is over; preempted requests begin anew; failed loads are recomputed from the first bad block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvbm_connectors.sim.paged import BlockPool
from kvbm_connectors.vllm.plan import NEWS, StepReport
from kvbm_connectors.vllm.scheduler_side import SchedulerSide

from tests.sim.vllm_requests import (
    BlockState,
    Cache,
    Output,
    Request,
    Scheduled,
    Status,
    Step,
    cut_at_bad,
)
from tests.sim.world import World

RUNNING_MAX = 4
TOKENS_MAX = 14
"""Of one step: longer prompts are computed in chunks."""


class Scheduler:
    """All requests of one life of an engine."""

    def __init__(
        self,
        world: World,
        cache: Cache,
        pool: BlockPool,
        side: SchedulerSide,
        block_tokens: int,
        ranks: int,
    ) -> None:
        self._world, self._cache, self._pool, self._side = world, cache, pool, side
        self._size = block_tokens
        self._ranks = ranks
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        """Those whose blocks are not free yet, too."""
        self._preempted: set[str] = set()
        self._arrived: dict[str, int] = {}
        """Request → how many ranks have its load."""
        self._received: set[str] = set()
        """Requests whose loads have ended on every rank."""
        self._failed: set[str] = set()
        """Those of them of which blocks are missing."""
        self._step = 0
        self._processed = 0
        self._deferred: deque[tuple[int, list[int]]] = deque()

    # --- a step -----------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Choose what the next step computes, and have the connector plan it."""
        self._step += 1
        counts: dict[str, int] = {}
        budget = self._schedule_running(counts, TOKENS_MAX)
        if not self._preempted:
            self._schedule_waiting(counts, budget)
        tables = {name: list(self.requests[name].blocks) for name in counts}
        output = Output(counts, sorted(self._preempted), BlockState(tables))
        self._preempted = set()
        NEWS.set()  # A step without work does not sleep: this clock stands still.
        plan = self._side.plan(output)
        parts = [self._advance(self.requests[name], count) for name, count in counts.items()]
        return Step(self._step, parts, plan)

    def _advance(self, request: Request, count: int) -> Scheduled:
        """As _update_after_schedule: what is scheduled counts as computed."""
        start = request.num_computed_tokens
        request.num_computed_tokens += count
        request.num_in_flight_tokens += count
        request.last_step = self._step
        samples = request.num_computed_tokens >= request.known + request.placeholders
        request.placeholders += samples
        return Scheduled(request, start, count, tuple(request.blocks), samples)

    def _schedule_running(self, counts: dict[str, int], budget: int) -> int:
        for request in list(self.running):
            if request not in self.running:
                continue  # Preempted, for one before it.
            wanted = request.known + request.placeholders - request.num_computed_tokens
            is_over = request.known + request.placeholders >= request.stop_at
            if is_over and request.placeholders and not request.stops_by_surprise:
                continue
            limit = len(request.tokens) - 1 - request.num_computed_tokens
            count = min(wanted, budget, limit)
            if count <= 0:
                continue
            if not self._allocate_running(request, count, counts):
                break
            counts[request.request_id] = count
            budget -= count
        return budget

    def _allocate_running(self, request: Request, count: int, counts: dict[str, int]) -> bool:
        """Take blocks for more tokens; preempt the newest requests if there are none."""
        while not self._grow(request, request.num_computed_tokens + count):
            if self._side.holding:
                self._world.marks["vllm waits for frees"] += 1
                return False
            victim = self.running[-1]
            # As vLLM: blocks that a step in flight may write come back later: no help now.
            if victim.last_step > self._processed:
                return False
            counts.pop(victim.request_id, None)
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _grow(self, request: Request, tokens: int) -> bool:
        needed = -(-tokens // self._size) - len(request.blocks)
        allocated = self._pool.allocate(max(0, needed))
        if allocated is None:
            return False
        self._cache.say_removed(allocated[1])
        request.blocks += allocated[0]
        self._cache_blocks(request, min(tokens, request.known))
        return True

    def _cache_blocks(self, request: Request, tokens: int) -> None:
        """Let full blocks be found, whether their step has ended or not."""
        first, end = request.cached, tokens // self._size
        if end <= first:
            return
        for index in range(first, end):
            self._pool.give_name(request.blocks[index], request.names[index])
        self._cache.say_stored(request.names, first, end, request.tokens)
        request.cached = end

    # --- admission --------------------------------------------------------------------------

    def _schedule_waiting(self, counts: dict[str, int], budget: int) -> None:
        # Those that hold blocks go first: others may wait for these.
        for request in sorted(self.waiting, key=lambda one: not one.blocks):
            if not budget or len(self.running) >= RUNNING_MAX:
                return
            if request.status is Status.LOADING and not self._load_is_over(request):
                continue
            count = self._admit(request, budget)
            if count is None:
                return
            if count:
                counts[request.request_id] = count
                budget -= count

    def _load_is_over(self, request: Request) -> bool:
        """As _update_waiting_for_remote_kv: cache what has come, once all of it is reported."""
        name = request.request_id
        if name not in self._received:
            return False
        self._received.discard(name)
        if name in self._failed and not request.num_computed_tokens:
            self._free(request)
        else:
            self._cache_blocks(request, request.num_computed_tokens)
        self._failed.discard(name)
        request.num_computed_tokens = min(request.num_computed_tokens, request.known - 1)
        request.status = Status.WAITING
        return True

    def _admit(self, request: Request, budget: int) -> int | None:
        """Start a request; return its tokens in this step, None: no blocks for any other."""
        if request.num_computed_tokens:
            return self._start(request, request.num_computed_tokens, budget)
        hits = self._hits(request)
        local = len(hits) * self._size
        external, is_loading = self._side.matched(request, local)
        if external is None:
            return 0
        assert is_loading == bool(external), f"{external} tokens in the step itself"
        if not self._fits(request):
            return None
        self._pool.hold(hits)
        before, request.blocks = request.blocks, [*hits]
        assert not before, f"{request.request_id} has blocks already"
        request.cached = len(hits)
        total = local + external
        if is_loading:
            if not self._grow_uncached(request, total):
                self._give_back(request)
                return None
            self._side.allocated(request, request, external)
            self._world.marks["vllm load"] += 1
            request.status, request.num_computed_tokens = Status.LOADING, total
            return 0
        count = self._start(request, total, budget)
        self._world.marks["vllm device hit"] += bool(hits) and count is not None
        if count is None:
            self._give_back(request)
        return count

    def _hits(self, request: Request) -> list[int]:
        """Return the leading blocks that the device's cache has; one token is always computed."""
        hits: list[int] = []
        for name in request.names[: (request.known - 1) // self._size]:
            block = self._pool.find(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def _fits(self, request: Request) -> bool:
        """Return whether all of a prompt has room beside what others were promised, or requests
        with a part of their blocks each would wait for each other."""
        promised = sum(
            -(-other.known // self._size) - len(other.blocks)
            for other in self.waiting
            if other.blocks
        )
        return -(-request.known // self._size) + promised <= self._pool.free_count

    def _grow_uncached(self, request: Request, tokens: int) -> bool:
        """Take blocks for a load: they are found when it has ended."""
        allocated = self._pool.allocate(-(-tokens // self._size) - len(request.blocks))
        if allocated is None:
            return False
        self._cache.say_removed(allocated[1])
        request.blocks += allocated[0]
        return True

    def _start(self, request: Request, computed: int, budget: int) -> int | None:
        count = min(request.known - computed, budget)
        if not self._grow(request, computed + count):
            return None
        self._side.allocated(request, request, 0)
        request.num_computed_tokens = computed
        request.status = Status.RUNNING
        self.waiting.remove(request)
        self.running.append(request)
        return count

    def _give_back(self, request: Request) -> None:
        self._pool.release(request.blocks)
        request.blocks, request.cached = [], 0

    # --- a step's output --------------------------------------------------------------------

    def update(self, step: Step) -> list[Request]:
        """Take the output of a step; return the requests that have finished."""
        self._processed = step.number
        self._drain_deferred()
        self._mark_invalid(step)
        finished: list[Request] = []
        for part in step.parts:
            self._update_one(part, finished)
        self._update_loads(step)
        return finished

    def _update_one(self, part: Scheduled, finished: list[Request]) -> None:
        request = part.request
        request.num_in_flight_tokens -= part.count
        is_stale = request.stale_tokens > 0
        request.stale_tokens -= part.count if is_stale else 0
        if request.status is not Status.RUNNING or is_stale:
            return
        if not part.samples:
            return
        request.placeholders -= 1
        request.known += 1
        self._cache_blocks(request, min(request.num_computed_tokens, request.known - 1))
        if request.known >= request.stop_at:
            self.running.remove(request)
            self.finish(request)
            finished.append(request)

    def _mark_invalid(self, step: Step) -> None:
        """As _handle_invalid_blocks: cut what counts as computed at the first bad block."""
        for request in self.waiting:
            if request.status is Status.LOADING and cut_at_bad(
                request, step.bad_blocks, self._size
            ):
                self._failed.add(request.request_id)

    def _update_loads(self, step: Step) -> None:
        """Hear the ranks, and free what has been sent."""
        for results in step.results:
            if results:
                self._side.reported(StepReport(tuple(results)))
            for result in results:
                self._load_arrived(result.load.request)
        for name in step.plan.sent:
            self._world.marks["vllm blocks sent"] += 1
            self._free_finished(self.requests[name])

    def _load_arrived(self, name: str) -> None:
        self._arrived[name] = self._arrived.get(name, 0) + 1
        if self._arrived[name] < self._ranks:
            return
        del self._arrived[name]
        request = self.requests[name]
        if request.status is Status.LOADING:
            self._received.add(name)
        else:
            assert request.status is Status.FINISHED, request
            self._free_finished(request)

    # --- ends -------------------------------------------------------------------------------

    def finish(self, request: Request) -> None:
        """End a request: its blocks are free now, or when the connector has said so."""
        name = request.request_id
        is_loading = request.status is Status.LOADING and name not in self._received
        self._received.discard(name)
        self._failed.discard(name)
        request.status = Status.FINISHED
        is_held = self._side.finished(request, [list(request.blocks)])
        if not is_held and not is_loading:
            self._free_finished(request)

    def abort(self, request: Request) -> None:
        """Drop a request between two steps."""
        if request.status is Status.LOADING:
            self._world.marks["vllm abort of a load"] += 1
        (self.running if request in self.running else self.waiting).remove(request)
        self.finish(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it begins anew, and what is in flight is dropped."""
        self._world.marks["vllm preempted"] += 1
        self.running.remove(request)
        self._free(request)
        request.status, request.num_computed_tokens = Status.WAITING, 0
        request.stale_tokens, request.placeholders = request.num_in_flight_tokens, 0
        self.waiting.insert(0, request)
        self._preempted.add(request.request_id)

    def reset(self, *, running: bool) -> bool:
        """Forget the device's cache; with `running`, preempt what runs."""
        if running:
            for request in reversed(list(self.running)):
                self.preempt(request)
        if not self._pool.reset():
            return False
        self._world.marks["vllm cache reset"] += 1
        self._cache.say_cleared()
        return True

    def _free_finished(self, request: Request) -> None:
        self._free(request)
        del self.requests[request.request_id]

    def _free(self, request: Request) -> None:
        """Give blocks back, when no step that is in flight writes them."""
        blocks, request.blocks, request.cached = request.blocks, [], 0
        if request.last_step <= self._processed:
            self._pool.release(blocks)
        elif blocks:
            self._world.marks["vllm free deferred"] += 1
            self._deferred.append((self._step, blocks))

    def _drain_deferred(self) -> None:
        while self._deferred and self._deferred[0][0] <= self._processed:
            self._pool.release(self._deferred.popleft()[1])

    # --- questions --------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return whether any step is needed."""
        return bool(self.requests or self._preempted)

    def unfinished(self) -> Iterable[Request]:
        """Return the requests that users wait for."""
        return [*self.waiting, *self.running]
