"""The loop between a pure core and its shell: one task owns the core and carries out its effects.

```
 offer() ──► bounded queue ──┐                      ┌──► carry_out(effect) ── plain: done at once
                             ├─► core.step(input) ──┤                     └── async: a task
 complete() ─► completions ──┘        ▲             └── its result, an input ──┐
                  ▲                   └─ ticker                                │
                  └────────────────────────────────────────────────────────────┘
```

Inputs of different lanes take turns (`fair_queue`), by the processor time of their steps: one that
floods its lane delays no other.
Outsiders wait for room; completions never wait, because they are bounded by the effects in flight,
which the core decides. Completions go first: they free what new inputs would wait for. An exception
in the core or in an effect ends `run`: expected failures come back as inputs.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from kvbm_common.errors import DeadlineExceeded
from kvbm_common.runtime.fair_queue import FairQueue
from kvbm_common.runtime.pauses import pause_s
from kvbm_common.wire.bounds import Usage

BURST_MAX = 128
"""Steps before other tasks get their turn: about 1 ms of core work."""
BURST_MS = 2
"""The longest wait of other tasks for their turn, beside the step that is being taken."""
TURNS = 2
"""Turns of the event loop that an async effect gets before the next step: in the first it asks, in
the second the NATS client sends. So its request leaves before the next step runs."""
LANE_TURN_NS = 500_000
"""Processor time of a lane's turn: a few small inputs, half an offer."""
QUIET_TICK_MS = 1_000
"""The pause between ticks of a quiet core, at most a tenth more. Late by it are ends of leases and
of silence, and what a tick itself tells."""

Input = TypeVar("Input")
Effect = TypeVar("Effect")
InputIn = TypeVar("InputIn", contravariant=True)
EffectOut = TypeVar("EffectOut", covariant=True)


class Core(Protocol[InputIn, EffectOut]):
    """A pure state machine."""

    def step(self, event: InputIn, now_ms: int, /) -> Sequence[EffectOut]:
        """Take one input, change the state, say what is to be done."""


def monotonic_ms() -> int:
    """Read the clock of every core in production: milliseconds that only grow."""
    return time.monotonic_ns() // 1_000_000


class CoreLoop(Generic[Input, Effect]):
    """Runs one core until it is cancelled.

    `carry_out` may answer at once with the next input (or None), or with an awaitable that gives
    it: that one runs as a task. With `tick`, the input that it makes arrives every `tick_ms`;
    ticks do not pile up behind a slow core, because the ticker takes its turn between bursts. While
    `is_quiet` says that nothing waits for a tick, they come every QUIET_TICK_MS. `settle` is called
    when no input is left: the core then does what no answer waits for.
    """

    def __init__(
        self,
        core: Core[Input, Effect],
        carry_out: Callable[[Effect], Input | Awaitable[Input | None] | None],
        *,
        inbox_size: int,
        now_ms: Callable[[], int] = monotonic_ms,
        tick: Callable[[], Input] | None = None,
        tick_ms: int = 100,
        is_quiet: Callable[[], bool] = lambda: False,
        settle: Callable[[], Sequence[Effect]] = tuple,
        spent_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        assert inbox_size > 0
        assert tick_ms > 0
        self.core = core
        self._carry_out = carry_out
        self._inbox_size = inbox_size
        self._now_ms = now_ms
        self._tick = tick
        self._tick_ms = tick_ms
        self._is_quiet = is_quiet
        self._settle = settle
        self._spent_ns = spent_ns
        """The processor time of this thread: a lane is not charged for other processes."""
        self._hurry = asyncio.Event()
        self._hurry.set()
        """Clear: the ticker waits for longer, until a step has left something to wait for."""
        self._offers: FairQueue[Input] = FairQueue()
        self._completions: deque[Input] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        self._refused = 0
        self._waiting: asyncio.TaskGroup | None = None
        """The task group of `run`, while it waits for an input and no effect has its turn."""
        self._turns = 0
        """Turns that the last burst beside `run` has left to others."""
        self._is_settled = True
        """The last burst ended because no input was left; else `run` goes on from there."""

    def usage(self) -> Usage:
        """Return how full the queue of inputs is."""
        return Usage(len(self._offers), self._inbox_size, self._refused)

    @property
    def depth(self) -> int:
        """Inputs that wait for their step."""
        return len(self._offers) + len(self._completions)

    @property
    def in_flight(self) -> int:
        """Async effects that are being carried out."""
        return self._in_flight

    async def offer(self, event: Input, *, deadline_s: float) -> None:
        """Hand in an input, waiting for room; raises DeadlineExceeded when no room comes."""
        try:
            async with asyncio.timeout(deadline_s):
                while not self._has_taken(event):
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError as error:
            self._refused += 1
            raise DeadlineExceeded(f"no room in the inbox for {deadline_s} s") from error

    def offer_nowait(self, event: Input, *, lane: Hashable = None) -> bool:
        """Hand in an input if there is room. False: the queue is full, and the caller counts it."""
        if self._has_taken(event, lane):
            return True
        self._refused += 1
        return False

    def hand_in(self, event: Input, *, lane: Hashable = None) -> bool:
        """Hand in an input like `offer_nowait`; `turn_nowait` must follow in the same turn."""
        if not self._has_room(lane):
            self._refused += 1
            return False
        self._idle.clear()
        self._offers.append(event, lane)
        return True

    def turn_nowait(self) -> None:
        """Take the steps of what waits in this turn of the event loop, if `run` waits for an input.

        For inputs whose answers are waited for: `run` itself would have its turn two turns later.
        """
        if self._waiting is None:
            self._wake.set()
        elif self.depth:
            in_flight_before = self._in_flight
            self._turns = self._burst(self._waiting)
            if not self._is_settled or self._in_flight > in_flight_before:
                self._waiting = None
                self._wake.set()

    def _has_room(self, lane: Hashable) -> bool:
        """Tell whether an input can wait; a lane has half of the queue, the nameless one all."""
        if len(self._offers) >= self._inbox_size:
            return False
        return lane is None or 2 * self._offers.depth(lane) < self._inbox_size

    def _has_taken(self, event: Input, lane: Hashable = None) -> bool:
        if not self._has_room(lane):
            return False
        self._offers.append(event, lane)
        self._signal()
        return True

    def complete(self, event: Input) -> None:
        """Hand in the outcome of an effect. Never waits; for tasks of this event loop."""
        self._completions.append(event)
        self._signal()

    async def wait_idle(self, *, deadline_s: float) -> None:
        """Wait until no input waits and no effect is in flight; raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError as error:
            text = f"{self.depth} inputs and {self._in_flight} effects left after {deadline_s} s"
            raise DeadlineExceeded(text) from error

    async def run(self, first: Sequence[Effect] = ()) -> None:
        """Carry out what is due at `first`, and own the core until cancelled.

        Effects in flight are cancelled with it.
        """
        async with asyncio.TaskGroup() as tasks:
            if self._tick is not None:
                tasks.create_task(self._run_ticker(), name="ticker")
            for effect in first:
                self._start(effect, tasks)
            try:
                while True:
                    self._waiting = tasks
                    await self._wake.wait()
                    self._waiting, turns, self._turns = None, self._turns, 0
                    for _ in range(max(turns, self._burst(tasks))):
                        await asyncio.sleep(0)
            finally:
                self._waiting = None

    def _burst(self, tasks: asyncio.TaskGroup) -> int:
        """Run some steps, then let others have their turn; return how many turns.

        An input may be a batch of many events.
        """
        until_ms, in_flight_before = self._now_ms() + BURST_MS, self._in_flight
        self._is_settled = False
        for count in range(BURST_MAX):
            now_ms = self._now_ms()
            if count and now_ms >= until_ms:
                break
            if self._completions:
                self._step(self._completions.popleft(), now_ms, tasks)
            elif self._offers:
                self._take_offer(now_ms, tasks)
            else:
                for effect in self._settle():
                    self._start(effect, tasks)
                if self._completions:
                    continue
                self._wake.clear()
                self._is_settled = True
                break
            if self._in_flight > in_flight_before:
                break
        if self._is_settled and self._in_flight == 0 and self.depth == 0:
            self._idle.set()
        if not self._hurry.is_set() and not self._is_quiet():
            self._hurry.set()
        return TURNS if self._in_flight > in_flight_before else 1

    def _take_offer(self, now_ms: int, tasks: asyncio.TaskGroup) -> None:
        """Take the step of the next offer, and charge its lane for the time."""
        event, before_ns = self._offers.popleft(), self._spent_ns()
        self._room.set()
        self._step(event, now_ms, tasks)
        self._offers.charge((self._spent_ns() - before_ns) / LANE_TURN_NS)

    def _step(self, event: Input, now_ms: int, tasks: asyncio.TaskGroup) -> None:
        for effect in self.core.step(event, now_ms):
            self._start(effect, tasks)

    def _start(self, effect: Effect, tasks: asyncio.TaskGroup) -> None:
        outcome = self._carry_out(effect)
        if inspect.isawaitable(outcome):
            self._in_flight += 1
            tasks.create_task(self._finish(outcome), name=type(effect).__name__)
        elif outcome is not None:
            self.complete(outcome)

    async def _finish(self, outcome: Awaitable[Input | None]) -> None:
        try:
            event = await outcome
        finally:
            self._in_flight -= 1
        if event is not None:
            self.complete(event)
        else:
            # Wakes the loop, which alone knows whether everything is idle now.
            self._wake.set()

    async def _run_ticker(self) -> None:
        assert self._tick is not None
        while True:
            if self._is_quiet():
                await self._pause_quietly()
            else:
                await asyncio.sleep(self._tick_ms / 1000)
            self.complete(self._tick())

    async def _pause_quietly(self) -> None:
        """Wait for the next tick of a quiet core, or until it has something to wait for."""
        self._hurry.clear()
        try:
            async with asyncio.timeout(pause_s(QUIET_TICK_MS / 1000)):
                await self._hurry.wait()
        except TimeoutError:
            self._hurry.set()  # The pause is over.

    def _signal(self) -> None:
        self._idle.clear()
        self._wake.set()
