"""The sim engine: a scheduler with a paged cache, chunk-free prefill and our connector.

It does what an engine does around its cache, and replaces the model: a prefill takes time per token
and fills the blocks with bytes that follow from their names. It is single-threaded, as engines'
schedulers are; transfers run in the connector's threads. The table of a request's states is drawn
in `docs/state_machines.md`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt
from kvbm_common.identity import Hasher, SequenceHash, request_extras
from kvbm_common.tier.machine import Machine

from kvbm_connectors.client.scheduler import SchedulerHalf
from kvbm_connectors.core.messages import Hit, LoadResult, OfferRun, offers_of
from kvbm_connectors.sim.control import EngineConfig, Finished, Submit
from kvbm_connectors.sim.device import SimDevice
from kvbm_connectors.sim.event_stream import EventStream
from kvbm_connectors.sim.paged import BlockPool

Tokens = npt.NDArray[np.uint32]


class RunState(Enum):
    """The states of a request in the engine."""

    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"
    COMPUTING = "computing"


RUN = Machine(
    "simulated request",
    {
        (None, "submitted"): RunState.WAITING,
        (RunState.WAITING, "nothing to load"): RunState.READY,
        (RunState.WAITING, "load taken"): RunState.LOADING,
        (RunState.LOADING, "load ended"): RunState.READY,
        (RunState.READY, "prefill begins"): RunState.COMPUTING,
        (RunState.COMPUTING, "prefill ended"): None,
    },
)


@dataclass(slots=True)
class Run:
    """A request in the engine."""

    submit: Submit
    prompt: Tokens
    outputs: Tokens
    names: list[SequenceHash]
    """The names of all full blocks, of prompt and outputs."""
    usable: int
    """Blocks of the prompt that may come from a cache: one token must be left to compute."""
    started_s: float
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Blocks whose content is there."""
    device_hit: int = 0
    hit: Hit = field(default_factory=lambda: Hit(0))
    loaded: int = 0
    failed: int = 0
    verified: int = 0
    mismatches: int = 0
    ready_s: float = 0.0
    state: RunState = field(default_factory=lambda: RUN.next(None, "submitted"))


class SimEngine:
    """One engine. `step` does what can be done now; `wait_s` says how long nothing will happen."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        hasher: Hasher,
        device: SimDevice,
        scheduler: SchedulerHalf | None,
        events: EventStream,
        finished: Callable[[Finished], None],
    ) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self.load_seconds = 0.0
        self.load_bytes = 0
        self._hasher = hasher
        self._device = device
        self._scheduler = scheduler
        self._events = events
        self._finished = finished
        self.pool = BlockPool(config.block_count)
        self._waiting: deque[Run] = deque()
        self._loading: dict[str, Run] = {}
        self._ready: deque[Run] = deque()
        self._computing: Run | None = None
        self._offered: dict[int, list[int]] = {}

    @property
    def idle(self) -> bool:
        """No request is in the engine and no block is on offer."""
        busy = self._waiting or self._loading or self._ready or self._computing or self._offered
        return not busy

    def submit(self, submit: Submit) -> None:
        """Queue a request that has come in, or report an error if its prompt is empty or it is too
        large."""
        prompt = np.frombuffer(submit.prompt, dtype="<u4")
        outputs = np.frombuffer(submit.outputs, dtype="<u4")
        block_tokens = self.config.block_tokens
        tokens = np.concatenate([prompt, outputs])
        names = self._hasher.chain(tokens, extras=request_extras(salt=submit.salt))
        usable = 0 if submit.bypass else (len(prompt) - 1) // block_tokens
        run = Run(submit, prompt, outputs, names, usable, time.perf_counter())
        if self._blocks_needed(run) > self.config.block_count or not len(prompt):
            self._report(run, error="prompt empty or larger than the device's cache")
            return
        self._waiting.append(run)

    def _blocks_needed(self, run: Run) -> int:
        return -(-(len(run.prompt) + len(run.outputs)) // self.config.block_tokens)

    def step(self) -> None:
        """Move everything that can move."""
        self._free_offered()
        self._take_loads()
        self._compute()
        self._admit()
        self._compute()
        self._events.flush()

    def wait_s(self) -> float:
        """Return the seconds until time alone makes something happen."""
        if self._computing is None:
            return 0.1
        return max(0.0, self._computing.ready_s - time.perf_counter())

    # --- admission --------------------------------------------------------------------------

    def _admit(self) -> None:
        """Ask for every waiting request; start those that have their answer and their blocks."""
        room = self.config.running_max - len(self._loading) - len(self._ready)
        for run in list(self._waiting)[: max(0, room)]:
            local = self._local_hit(run)
            hit = self._lookup(run, local)
            if hit is None:
                continue
            if not self._allocate(run, local):
                return  # First come, first served: no request overtakes for lack of blocks.
            self._waiting.remove(run)
            self._start(run, len(local), hit)

    def _local_hit(self, run: Run) -> list[int]:
        blocks: list[int] = []
        for name in run.names[: run.usable]:
            block = self.pool.find(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _lookup(self, run: Run, local: list[int]) -> Hit | None:
        missing = run.names[len(local) : run.usable]
        if self._scheduler is None or not missing:
            return Hit(0)
        first = None if local else run.prompt[: self.config.block_tokens]
        return self._scheduler.lookup(run.submit.request, missing, first_tokens=first)

    def _allocate(self, run: Run, local: list[int]) -> bool:
        self.pool.hold(local)
        allocated = self.pool.allocate(self._blocks_needed(run) - len(local))
        if allocated is None:
            self.pool.release(local)
            return False
        blocks, evicted = allocated
        self._events.removed(evicted)
        run.blocks = local + blocks
        return True

    def _start(self, run: Run, local: int, hit: Hit) -> None:
        run.device_hit, run.computed, run.hit = local, local, hit
        if self._scheduler is None or hit.blocks == 0:
            self._forget(run)
            self._move(run, "nothing to load")
            self._ready.append(run)
            return
        targets = run.blocks[local : local + hit.blocks]
        load = self._scheduler.take(run.submit.request, targets)
        self._move(run, "load taken")
        self._loading[run.submit.request] = run
        self._device.start_load(load)

    def _forget(self, run: Run) -> None:
        if self._scheduler is not None:
            self._scheduler.forget(run.submit.request)

    # --- loads ------------------------------------------------------------------------------

    def _take_loads(self) -> None:
        for result in self._device.drain_ended():
            assert self._scheduler is not None
            run = self._loading.pop(result.load.request)
            self._take_loaded(run, result)
            self._scheduler.load_ended(result)
            self.load_seconds += result.seconds
            self.load_bytes += sum(result.intact) * result.load.block_bytes
            self._move(run, "load ended")
            self._ready.append(run)

    def _take_loaded(self, run: Run, result: LoadResult) -> None:
        first = run.device_hit
        usable = result.usable
        run.loaded = usable
        run.failed = len(result.intact) - usable
        run.computed = first + usable
        self._give_names(run, first, run.computed)

    def _compare(self, run: Run) -> None:
        """Compare every block that was loaded with what it must hold.

        After the first token: no engine pays for this, and its blocks are held until it is done.
        """
        for index in range(run.device_hit, run.device_hit + run.loaded):
            run.verified += 1
            if not self._device.holds(run.blocks[index], run.names[index]):
                run.mismatches += 1

    # --- compute ----------------------------------------------------------------------------

    def _compute(self) -> None:
        """Compute one prefill at a time, as on a busy device."""
        now_s = time.perf_counter()
        if self._computing is not None and now_s >= self._computing.ready_s:
            run, self._computing = self._computing, None
            self._end_prefill(run)
        if self._computing is None and self._ready:
            run = self._ready.popleft()
            tokens = len(run.prompt) - run.computed * self.config.block_tokens
            assert tokens > 0
            self._move(run, "prefill begins")
            run.ready_s = now_s + tokens * self.config.prefill_us_per_token / 1e6
            self._computing = run

    def _end_prefill(self, run: Run) -> None:
        ttft_ms = (time.perf_counter() - run.started_s) * 1e3
        self._compare(run)
        first = run.computed
        for index in range(first, len(run.names)):
            self._device.compute(run.blocks[index], run.names[index])
        run.computed = len(run.names)
        if not run.submit.bypass:
            self._give_names(run, first, run.computed)
            self._offer(run, first)
        self.pool.release(run.blocks)
        RUN.end(run.state, "prefill ended", run.submit.request)
        self._report(run, ttft_ms=ttft_ms)

    def _move(self, run: Run, event: str) -> None:
        run.state = RUN.next(run.state, event, run.submit.request)

    def _give_names(self, run: Run, first: int, end: int) -> None:
        if first == end:
            return
        for index in range(first, end):
            self.pool.give_name(run.blocks[index], run.names[index])
        size = self.config.block_tokens
        tokens = np.concatenate([run.prompt, run.outputs])[first * size : end * size]
        self._events.stored(
            run.names[first:end],
            parent=run.names[first - 1] if first else None,
            tokens=tokens.tolist(),
            block_tokens=size,
            salt=run.submit.salt,
        )

    # --- offers -----------------------------------------------------------------------------

    def _offer(self, run: Run, first: int) -> None:
        """Offer what was computed. The device blocks are held until the offer has ended."""
        if self._scheduler is None:
            return
        count = len(run.names)
        parent = run.names[first - 1] if first else self._hasher.root
        computed = OfferRun(parent, tuple(run.names[first:]), tuple(run.blocks[first:count]))
        for part in offers_of(computed):
            offer = self._scheduler.offer([part])
            if offer is not None:
                blocks = list(part.blocks)
                self.pool.hold(blocks)
                self._offered[offer] = blocks
        self._device.expect_reads(expected=bool(self._offered))

    def _free_offered(self) -> None:
        if self._scheduler is None:
            return
        for ended in self._scheduler.drain_ended():
            self.pool.release(self._offered.pop(ended.offer))
            self._device.expect_reads(expected=bool(self._offered))

    def reset(self) -> bool:
        """Forget the prefix cache, as vLLM's /reset_prefix_cache."""
        if not self.idle or not self.pool.reset():
            return False
        self._events.cleared()
        self._events.flush()
        return True

    def _report(self, run: Run, *, ttft_ms: float = 0.0, error: str = "") -> None:
        # What a failed load promised from disk and did not bring is no hit.
        disk = min(run.hit.disk, run.loaded)
        self._finished(
            Finished(
                request=run.submit.request,
                ttft_ms=ttft_ms,
                tokens=len(run.prompt),
                blocks=len(run.prompt) // self.config.block_tokens,
                device_blocks=run.device_hit,
                host_blocks=run.loaded - disk,
                disk_blocks=disk,
                verified=run.verified,
                mismatches=run.mismatches,
                failed_blocks=run.failed,
                error=error,
            )
        )
