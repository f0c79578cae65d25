"""An engine with vLLM's scheduler and the connector's scheduler side, on modelled devices.

    schedule --plan--> in flight (one step, or two) --computed--> output --> schedule

Each device block has content that becomes right when the step that computes it has *finished*;
until then it is garbage. What the host tier pulls is what is there at that moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.tier.prefill_cost import PrefillCost
from kvbm_common.wire.session_hint import Action
from kvbm_connectors.core.messages import Hit, Load, LoadResult, OfferEnded, OfferRun
from kvbm_connectors.vllm.engine_types import EngineRequest
from kvbm_connectors.vllm.scheduler_side import SchedulerSide

from tests.sim import invariants
from tests.sim.conversations import say
from tests.sim.engine_node import REQUEST_MS_MAX, EngineNode
from tests.sim.miss_filter import denies
from tests.sim.vllm_requests import Request, Scheduled, Status, Step
from tests.sim.vllm_scheduler import Scheduler

STEP_MS = 2.0
TOKEN_MS = 0.5
OUTPUT_MS = 0.5
"""How long the output of a step is on its way to the scheduler."""
PARTIAL = b"partial"


class Half:
    """The scheduler half, as the scheduler side uses it: the real core, without a thread."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.ended: list[OfferEnded] = []

    @property
    def epoch(self) -> int:
        """Return the life of the host tier that is there."""
        return self._engine.core.view.epoch

    def lookup(
        self,
        request: str,
        hashes: Sequence[SequenceHash],
        *,
        first_tokens: Sequence[int] | None = None,
        trace: str = "",
        groups: Sequence[GroupRun] = (),
        prefill: PrefillCost | None = None,
    ) -> Hit | None:
        """See ConnectorCore.lookup."""
        engine = self._engine
        hit, effects = engine.core.lookup(
            request, hashes, engine.world.now_ms, groups=groups,
            is_absent=denies(engine, hashes, groups), prefill=prefill,
        )  # fmt: skip
        engine.carry_out(effects)
        return hit

    def take(self, request: str, blocks: Sequence[int]) -> Load:
        """See ConnectorCore.take."""
        return self._engine.take_found(request, blocks)

    def load_ended(self, result: LoadResult) -> None:
        """See ConnectorCore.load_ended."""
        self._engine.load_ended(result)

    def forget(self, request: str) -> None:
        """See ConnectorCore.forget."""
        self._engine.carry_out(self._engine.core.forget(request))

    def hint(
        self, session: str, action: Action, names: Sequence[SequenceHash] = (), *, ttl_ms: int = 0
    ) -> None:
        """See ConnectorCore.hint."""
        self._engine.carry_out(self._engine.core.hint(session, action, names, ttl_ms=ttl_ms))

    def offer(
        self, runs: Sequence[OfferRun], *, priority: int = 0, namespace: bytes = b"",
        hurry: bool = True,
    ) -> int | None:  # fmt: skip
        """See ConnectorCore.offer."""
        engine = self._engine
        offer, effects = engine.core.offer(
            runs, engine.world.now_ms, priority=priority, namespace=namespace
        )
        engine.carry_out(effects)
        engine.world.marks["vllm offer"] += offer is not None
        return offer

    def revoke(self, offer: int) -> None:
        """See ConnectorCore.revoke."""
        self._engine.world.marks["vllm offer revoked"] += 1
        self._engine.carry_out(self._engine.core.revoke(offer))

    def drain_ended(self) -> list[OfferEnded]:
        """Return the offers that have ended since the last call."""
        ended, self.ended = self.ended, []
        return ended


class VllmEngine(EngineNode):
    """An engine as vLLM runs it."""

    block_tokens = 2

    def begin(self) -> None:
        plan = self.world.plan
        self.half = Half(self)
        self.side = SchedulerSide(self.half, self.hasher, world_size=len(self.shape))
        self.scheduler = Scheduler(
            self.world, self, self.pool, self.side, self.block_tokens, len(self.shape)
        )
        self.side.evict = self._evict
        self._in_flight_max = 2 if plan.overlapped else 1
        self._in_flight: deque[Step] = deque()
        self._ended: list[list[LoadResult]] = [[] for _ in self.workers]

    def offer_ended(self, ended: OfferEnded) -> None:
        self.half.ended.append(ended)

    # --- users ------------------------------------------------------------------------------

    def submit(self) -> None:
        """Take a prompt, of which several answers may be wanted."""
        rng = self.world.rng
        prompt = self.conversations.next(grows_by=10)
        copies = rng.choice((1, 1, 1, 2, 3))
        self.world.marks["vllm several answers"] += copies > 1
        for copy in range(copies):
            sampled = [say(rng) for _ in range(rng.randint(1, 4))]
            stop_at = len(prompt) + len(sampled)
            tokens = [*prompt, *sampled, *[say(rng) for _ in range(3)]]
            name = f"{self.name}/{self.life}/{rng.getrandbits(32)}/{copy}"
            full = len(tokens) // self.block_tokens * self.block_tokens
            names = self.hasher.chain(tokens[:full])
            request = Request(
                name, tokens, names, len(prompt), stop_at, rng.random() < 0.5, self.world.awake_ms
            )
            self.scheduler.requests[name] = request
            self.scheduler.waiting.append(request)
        self.poke()

    @property
    def tokens_max(self) -> int:
        return (self.world.plan.device_blocks - 2) * self.block_tokens - 12

    @property
    def request_count(self) -> int:
        return len(self.scheduler.requests)

    def disturb(self) -> None:
        rng, scheduler = self.world.rng, self.scheduler
        requests = list(scheduler.unfinished())
        if requests and rng.random() < 0.05:
            self.world.marks["vllm abort"] += 1
            loading = [r for r in requests if r.status is Status.LOADING]
            scheduler.abort(rng.choice(loading or requests))  # They are few, and never long.
            self.poke()
        if self._in_flight and not self.world.plan.overlapped:
            return  # Aborts are all that vLLM takes while its only step is computed.
        if scheduler.running and rng.random() < 0.1:
            scheduler.preempt(scheduler.running[-1])
            self.poke()
        if rng.random() < 0.02:
            scheduler.reset(running=rng.random() < 0.5)
            self.poke()

    def _evict(self, request: EngineRequest, written: int) -> None:
        """Let no block of a request be found from an index on, as evict_from does in vLLM."""
        assert isinstance(request, Request)
        first = written // self.block_tokens
        gone = [name for name in request.names[first:] for _ in range(self.pool.evict(name))]
        self.world.marks["vllm blocks evicted by us"] += len(gone)
        self.say_removed(gone)

    # --- steps ------------------------------------------------------------------------------

    def work(self) -> None:
        """Schedule as many steps as may be in flight."""
        while self.scheduler.has_work and len(self._in_flight) < self._in_flight_max:
            step = self.scheduler.schedule()
            self._note(step)
            self._in_flight.append(step)
            if len(self._in_flight) == 1:
                self._compute(step)
            else:
                self.world.marks["vllm steps overlap"] += bool(step.parts)
            if not step.parts:
                break

    def _note(self, step: Step) -> None:
        marks = self.world.marks
        marks["vllm step"] += 1
        writing = {
            block for part in step.parts for block in part.blocks[part.start // self.block_tokens :]
        }
        shared = [
            part
            for part in step.parts
            if writing & set(part.blocks[: part.start // self.block_tokens])
        ]
        marks["vllm hit in the same step"] += bool(shared)

    def _compute(self, step: Step) -> None:
        """Begin to compute a step; its loads begin before it."""
        for load in step.plan.loads:
            for worker in self.workers:
                worker.start(load, partial(self._part_ended, worker.rank))
        self._forward(step)

    def _part_ended(self, rank: int, result: LoadResult) -> None:
        self._ended[rank].append(result)
        self.poke()

    def _forward(self, step: Step) -> None:
        """Compute: what is written is garbage until the end."""
        for part in step.parts:
            for index in self._written(part):
                for worker in self.workers:
                    worker.device.tear(part.blocks[index])
        base_ms = STEP_MS if step.parts else OUTPUT_MS
        duration_ms = base_ms + TOKEN_MS * step.token_count
        self.later(self.world.rng.uniform(0.5, 1.5) * duration_ms, partial(self._computed, step))

    def _written(self, part: Scheduled) -> range:
        """Return which blocks of a request's table a step writes."""
        size = self.block_tokens
        return range(part.start // size, -(-(part.start + part.count) // size))

    def _computed(self, step: Step) -> None:
        for part in step.parts:
            self._write(part)
        step.results, self._ended = self._ended, [[] for _ in self.workers]
        for results in step.results:
            for result in results:
                step.bad_blocks.update(result.load.blocks[result.usable :])
        for part in step.parts:
            self._check_inputs(part)
        self.later(self.world.rng.uniform(0.2, 1.5) * OUTPUT_MS, partial(self._output, step))

    def _write(self, part: Scheduled) -> None:
        size, end = self.block_tokens, part.start + part.count
        for index in self._written(part):
            if (index + 1) * size <= end:
                self.write_block(part.request.names[index], part.blocks[index])
            else:
                for worker in self.workers:
                    garbage = [PARTIAL + worker.device.garbage() for _ in worker.share.parts]
                    worker.device.put(part.blocks[index], garbage)

    def _check_inputs(self, part: Scheduled) -> None:
        """Require that everything which a step has read was right when it was over: blocks of
        earlier steps, and of requests before it in the same step."""
        for index in range(part.start // self.block_tokens):
            where = f"{part.request.request_id} block {index}"
            self.check_block(part.request.names[index], part.blocks[index], where)

    def _output(self, step: Step) -> None:
        assert self._in_flight.popleft() is step
        for request in self.scheduler.update(step):
            self.finished += 1
            took_ms = self.world.awake_ms - request.since_ms
            invariants.check_request_time(took_ms, REQUEST_MS_MAX)
        if self._in_flight:
            self._compute(self._in_flight[0])
        if step.parts or step.plan.sent or self._has_loaded(step):
            self.later(0, self.step)  # As vLLM does; without news it looks at its next tick.

    def _has_loaded(self, step: Step) -> bool:
        return any(step.results) or any(self._ended)

    # --- checks -----------------------------------------------------------------------------

    def check_idle(self) -> None:
        left = sorted(self.scheduler.requests)
        invariants.require(not left, f"{self.name} has not finished {left}")
        invariants.require(self.side.idle, f"{self.name}: the scheduler side follows requests")
        invariants.require(not self._in_flight, f"{self.name}: a step has no end")
