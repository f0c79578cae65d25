"""The world of the simulation: one clock, one source of chance, and the processes in it.

Everything that happens is a call in one queue, ordered by time; every choice is drawn from one
`random.Random(seed)`. So a seed and a commit are a whole bug report.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from math import log
from typing import Any

from tests.sim.plan import Transfer, draw_plan

Call = Callable[[], None]
Due = tuple[float, int, Call, "Node | None", int]
"""When, in what order, what, and in which life of which process only."""
STALL_MS = 4_000
"""How late a message can be."""
LATE_MS = (1_200, 3_000, 9_000)
"""How late a transfer can be: later than short leases, or than every deadline; always sooner than
the grace of a fill."""
TRANSFER_MS = 4.0
CHECK_EVERY = 64
"""A process is checked after so many of its steps. What is wrong mostly stays so until the process
dies, and it is checked before it dies, too."""
LOG_MAX = 100_000


class World:
    """Time, chance, and what was seen to happen (`marks`)."""

    def __init__(
        self, seed: int, *, traced: bool = False, check_every: int = CHECK_EVERY, **plan: Any
    ) -> None:
        self.seed, self.traced, self.check_every = seed, traced, check_every
        self.rng = random.Random(seed)
        self.plan = replace(draw_plan(self.rng, random.Random(f"shapes of {seed}")), **plan)
        self.calm = False
        """The faults have stopped."""
        self.pace = 1.0
        """How many times longer than usual processes wait between two looks at the clock."""
        self.now = 0.0
        self.bytes_until = 0.0
        """The last transfer that was begun ends then."""
        self._stopped_ms = 0.0
        """For how long all processes were stopped."""
        self.wall_ahead_us = 0
        """What an operator, or a time server, has set the time of day forward."""
        self._still_ms: int | None = None
        """What the monotonic clock shows while it stands still."""
        self.ages = random.Random(f"ages of {seed}")
        """Draws where counters begin, for plans that are aged."""
        self.steps = 0
        self.digest = 0
        self.marks: Counter[str] = Counter()
        self.log: deque[str] = deque(maxlen=LOG_MAX)
        self.nodes: dict[str, Node] = {}
        self._queue: list[Due] = []
        self._count = 0
        self._arrivals: dict[tuple[str, str], float] = {}
        self.cut: set[tuple[str, str]] = set()
        """Ways, from one process to another, on which nothing arrives."""
        self.is_resting = False
        """Nothing is lost or on its way: what a tier has is known to all."""
        self.bus_up = True
        """NATS answers."""

    @property
    def now_ms(self) -> int:
        """The one monotonic clock of the host."""
        return int(self.now) if self._still_ms is None else self._still_ms

    @property
    def awake_ms(self) -> float:
        """The time during which processes could run."""
        return self.now - self._stopped_ms

    @property
    def wall_us(self) -> int:
        """The time of day, which may step and stand still."""
        return 1_700_000_000_000_000 + int(self.now * 1_000) + self.wall_ahead_us

    def stand_still(self, duration_ms: float) -> None:
        """Have the monotonic clock show one time for a while, as a coarse one does."""
        self._still_ms = self.now_ms

        def goes_on() -> None:
            self._still_ms = None

        self.later(duration_ms, goes_on)

    def stop_all(self, duration_ms: float) -> None:
        """Stop all processes for so long, and continue them: what is due by then comes at once."""
        self.note(f"all processes are stopped for {duration_ms / 3_600_000:.1f} h")
        self.now += duration_ms
        self._stopped_ms += duration_ms

    def calm_down(self) -> None:
        """No more faults: nothing is lost, late or doubled from now on."""
        self.note("calm")
        self.calm = True
        self.cut.clear()

    def note(self, text: str) -> None:
        """Remember what happened, if somebody wants to read it."""
        if self.traced:
            line = f"{self.now:10.2f} {text}"
            self.digest = zlib.crc32(line.encode(), self.digest)
            self.log.append(line)

    def later(self, delay_ms: float, call: Call, node: Node | None = None) -> None:
        """Call back after some time; with `node`, only if its life still lasts then."""
        self._count += 1
        life = 0 if node is None else node.life
        heappush(self._queue, (self.now + delay_ms, self._count, call, node, life))

    def run_until(self, end_ms: float) -> None:
        """Let everything happen that is due until then."""
        queue = self._queue
        while queue and queue[0][0] <= end_ms:
            due, _, call, node, life = heappop(queue)
            if due > self.now:
                self.now = due
            if node is None or (node.up and node.life == life):
                call()
        self.now = end_ms

    def delay(self, mean_ms: float) -> float:
        """How long something takes: mostly about its mean, sometimes very long."""
        chance = self.rng.random
        if not self.calm and chance() < self.plan.stalls:
            return chance() * STALL_MS
        return -mean_ms * log(1.0 - chance())  # As expovariate, in half its time.

    def transfer_ms(self, kind: Transfer) -> float:
        """How long NIXL takes for a few blocks."""
        if not self.calm and self.rng.random() < self.plan.late[kind]:
            duration_ms = self.rng.uniform(0, self.rng.choice(LATE_MS))
        else:
            duration_ms = self.rng.expovariate(1 / TRANSFER_MS)
        self.bytes_until = max(self.bytes_until, self.now + duration_ms)
        return duration_ms

    def loses(self, source: str, target: str) -> bool:
        """Does the way between two processes lose this message?"""
        if self.calm:
            return False
        return (source, target) in self.cut or self.rng.random() < self.plan.loss

    def send(self, source: str, target: Node, call: Call, *, parked: bool = False) -> None:
        """A message on its way: first in, first out between two processes; may be lost.

        `parked`: it waits for a target that is down, as in a ZMQ socket that reconnects.
        """

        def arrive() -> None:
            if target.up:
                call()
            elif parked:
                target.parked.append(call)

        self.post(source, target.name, arrive)

    def post(self, source: str, target: str, call: Call, *, lane: str = "") -> None:
        """Send a message that decides on its arrival what becomes of it; it may be lost. Those of
        one lane do not overtake each other, whichever process they go to."""
        if self.loses(source, target):
            self.marks["message lost"] += 1
            return
        self.later(self.queue(source, lane or target), call)

    def queue(self, source: str, target: str) -> float:
        """How long a message takes now: it does not overtake those before it."""
        way, at = (source, target), self.now + self.delay(self.plan.delay_ms)
        at = self._arrivals[way] = max(self._arrivals.get(way, 0.0), at)
        return at - self.now


class Node:
    """A process: up or down, in its n-th life. What a dead life has asked for is never called."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.up = False
        self.life = 0
        self.parked: list[Call] = []
        self._unchecked = 0
        world.nodes[name] = self

    def start(self) -> None:
        """Begin a life."""
        assert not self.up
        self.up = True
        self.life += 1
        self.world.note(f"{self.name} starts")
        self.boot()
        parked, self.parked = self.parked, []
        for call in parked:
            call()

    def kill(self) -> None:
        """End it without a word; what is wrong in it must not end unseen."""
        assert self.up
        self.check()
        self.up = False
        self.world.note(f"{self.name} is killed")
        self.died()

    def stop(self) -> None:
        """End it in order; some have something to say before."""
        self.kill()

    def boot(self) -> None:
        """What a process does first."""

    def died(self) -> None:
        """What its death leaves behind."""

    def later(self, delay_ms: float, call: Call) -> None:
        """Call back if this life still lasts."""
        self.world.later(delay_ms, call, self)

    def every(self, period_ms: float, call: Call) -> None:
        """Call again and again in this life; not quite in step with others."""

        world, chance = self.world, self.world.rng.random

        def again() -> None:
            call()
            # As uniform(0.8, 1.2), in half its time.
            world.later(period_ms * world.pace * (0.8 + (1.2 - 0.8) * chance()), again, self)

        self.later(period_ms * self.world.rng.random(), again)

    def check(self) -> None:
        """Assert every invariant of the process."""

    def stepped(self) -> None:
        """Count a step, and check now and then."""
        self.world.steps += 1
        self._unchecked += 1
        if self._unchecked >= self.world.check_every:
            self._unchecked = 0
            self.check()
