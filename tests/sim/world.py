"""The world of the simulation: one clock, one source of chance, and all that is between processes.

Everything that happens is a call in one queue, ordered by time; every choice is drawn from one
`random.Random(seed)`. So a seed and a commit are a whole bug report.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvbm_common.checksum import block_checksum
from kvbm_common.wire.events import Event
from kvbm_common.wire.verbs import ErrorBody

Call = Callable[[], None]
STALL_MS = 4_000
"""How late a message can be."""
LATE_MS = 9_000
"""How late a transfer can be: later than every deadline, sooner than the grace of a fill."""
TRANSFER_MS = 4.0
ROT = b"rot "
"""Content that begins so was changed by the world; no code of ours is to blame."""
LOG_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What is drawn before the start: sizes, and what may go wrong (each seed another part)."""

    engines: int
    ranks: int
    device_blocks: int
    host_slots: int
    disk_slots: int
    staging: bool
    filtered: bool
    verified: bool
    """Engines compare checksums after each load."""
    lease_ms: int
    loss: float
    duplicates: float
    delay_ms: float
    stalls: float
    """How often a message takes much longer than it should."""
    late: float
    """… or a transfer."""
    outbox_max: int
    stream_max: int
    replay_batches: int
    faults: tuple[str, ...]
    fault_every_ms: float


FAULTS = (
    "kill host", "kill disk", "kill index", "kill consolidator", "kill engine",
    "stop host", "stop disk", "power", "outage", "stream lost", "cut", "rot disk", "rot arena",
)  # fmt: skip


def draw_plan(rng: random.Random) -> Plan:
    """Swarm testing: leaving faults out reaches states that all of them together never would."""
    verified = rng.random() < 0.4
    faults = tuple(f for f in FAULTS if rng.random() < 0.4 and (verified or f != "rot arena"))
    rough = rng.random() < 0.6
    return Plan(
        engines=rng.choice((1, 2, 2)),
        ranks=rng.choice((1, 1, 2)),
        device_blocks=rng.randint(16, 36),
        host_slots=rng.randint(8, 30),
        disk_slots=rng.randint(10, 90),
        staging=rng.random() < 0.2,
        filtered=rng.random() < 0.2,
        verified=verified,
        lease_ms=rng.choice((800, 2_000, 5_000)),
        loss=rng.choice((0.002, 0.02)) if rough else 0.0,
        duplicates=rng.choice((0.0, 0.05)) if rough else 0.0,
        delay_ms=rng.choice((0.5, 3.0, 20.0)),
        stalls=rng.choice((0.0, 0.01, 0.05)) if rough else 0.0,
        late=rng.choice((0.0, 0.02, 0.2)),
        outbox_max=rng.choice((8, 10_000)),
        stream_max=rng.choice((20, 10_000)),
        replay_batches=rng.choice((5, 10_000, 10_000)),
        faults=faults,
        fault_every_ms=rng.choice((700.0, 2_500.0)),
    )


class World:
    """Time, chance, and what was seen to happen (`marks`)."""

    def __init__(self, seed: int, *, traced: bool = False, check_every: int = 8) -> None:
        self.seed, self.traced, self.check_every = seed, traced, check_every
        self.rng = random.Random(seed)
        self.plan = draw_plan(self.rng)
        self.calm = False
        """The faults have stopped."""
        self.now = 0.0
        self.steps = 0
        self.digest = 0
        self.marks: Counter[str] = Counter()
        self.log: deque[str] = deque(maxlen=LOG_MAX)
        self.nodes: dict[str, Node] = {}
        self._queue: list[tuple[float, int, Call]] = []
        self._count = 0
        self._arrivals: dict[tuple[str, str], float] = {}
        self.cut: set[tuple[str, str]] = set()

    @property
    def now_ms(self) -> int:
        """The one monotonic clock of the host."""
        return int(self.now)

    def note(self, text: str) -> None:
        """Remember what happened, if somebody wants to read it."""
        if self.traced:
            line = f"{self.now:10.2f} {text}"
            self.digest = zlib.crc32(line.encode(), self.digest)
            self.log.append(line)

    def later(self, delay_ms: float, call: Call) -> None:
        """Call back after some time."""
        self._count += 1
        heappush(self._queue, (self.now + delay_ms, self._count, call))

    def run_until(self, end_ms: float) -> None:
        """Let everything happen that is due until then."""
        while self._queue and self._queue[0][0] <= end_ms:
            self.now, _, call = heappop(self._queue)
            call()
        self.now = end_ms

    def delay(self, mean_ms: float) -> float:
        """How long something takes: mostly about its mean, sometimes very long."""
        if not self.calm and self.rng.random() < self.plan.stalls:
            return self.rng.uniform(0, STALL_MS)
        return self.rng.expovariate(1 / mean_ms)

    def transfer_ms(self) -> float:
        """How long NIXL takes for a few blocks."""
        if not self.calm and self.rng.random() < self.plan.late:
            return self.rng.uniform(0, LATE_MS)
        return self.rng.expovariate(1 / TRANSFER_MS)

    def loses(self, source: str, target: str) -> bool:
        """Does the way between two processes lose this message?"""
        if self.calm:
            return False
        return (source, target) in self.cut or self.rng.random() < self.plan.loss

    def send(self, source: str, target: Node, call: Call, *, parked: bool = False) -> None:
        """A message on its way: first in, first out between two processes; may be lost.

        `parked`: it waits for a target that is down, as in a ZMQ socket that reconnects.
        """
        if self.loses(source, target.name):
            self.marks["message lost"] += 1
            return

        def arrive() -> None:
            if target.up:
                call()
            elif parked:
                target.parked.append(call)

        self.later(self.queue(source, target.name), arrive)

    def queue(self, source: str, target: str) -> float:
        """How long a message takes now: it does not overtake those before it."""
        at = self.now + self.delay(self.plan.delay_ms)
        at = self._arrivals[source, target] = max(self._arrivals.get((source, target), 0.0), at)
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
        """End it without a word."""
        assert self.up
        self.up = False
        self.world.note(f"{self.name} is killed")
        self.died()

    def boot(self) -> None:
        """What a process does first."""

    def died(self) -> None:
        """What its death leaves behind."""

    def later(self, delay_ms: float, call: Call) -> None:
        """Call back if this life still lasts."""
        life = self.life

        def still() -> None:
            if self.up and self.life == life:
                call()

        self.world.later(delay_ms, still)

    def every(self, period_ms: float, call: Call) -> None:
        """Call again and again in this life; not quite in step with others."""

        def again() -> None:
            call()
            self.later(period_ms * self.world.rng.uniform(0.8, 1.2), again)

        self.later(period_ms * self.world.rng.random(), again)

    def due_check(self) -> bool:
        """Count a step; is it time for `check`?"""
        self.world.steps += 1
        self._unchecked += 1
        if self._unchecked < self.world.check_every:
            return False
        self._unchecked = 0
        return True


# --- memory -----------------------------------------------------------------------------------


class Memory:
    """Slots full of content. Content that is right for a block is the block's own name."""

    def __init__(self, world: World, slot_count: int) -> None:
        self._world = world
        self.slots = [self.garbage() for _ in range(slot_count)]

    def garbage(self) -> bytes:
        """Bytes that are like no others."""
        self._world.marks["garbage"] += 1
        return b"garbage %d" % self._world.marks["garbage"]

    def rot(self, slot: int) -> None:
        """The medium has lost what was there."""
        self.slots[slot] = ROT + self.garbage()

    def checksum(self, slot: int) -> int:
        """As the mover sums up what has arrived."""
        return block_checksum(self.slots[slot])


def copy(
    mover: Node,
    source: tuple[Memory, Sequence[int]],
    target: tuple[Memory, Sequence[int]],
    duration_ms: float,
) -> None:
    """Move slots. Each is torn for a random part of the time, and right at the end of that only if
    its source has not changed meanwhile. The death of the mover leaves it torn."""
    (read, sources), (write, targets) = source, target
    for one, other in zip(sources, targets, strict=True):
        begin = mover.world.rng.uniform(0, duration_ms)
        mover.later(begin, lambda one=one, other=other, end=duration_ms - begin: (  # type: ignore[misc]
            _copy_slot(mover, read, one, write, other, end)
        ))  # fmt: skip


def _copy_slot(
    mover: Node, read: Memory, source: int, write: Memory, target: int, left_ms: float
) -> None:
    seen = read.slots[source]
    write.slots[target] = write.garbage()

    def end() -> None:
        found = read.slots[source]
        whole = found == seen or found.startswith(ROT)
        write.slots[target] = found if whole else write.garbage()

    mover.later(mover.world.rng.uniform(0, left_ms), end)


# --- NATS -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that got no good answer."""

    code: str


Done = Callable[[object], None]
Serve = Callable[[Done], None]


class Bus:
    """NATS: core messages, requests, and the JetStream log of events."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.log: list[Event] = []
        self.first = 0
        """Position of `log[0]`: the stream keeps only so many."""
        self.stream_life = 0
        self._subscriptions: list[Subscription] = []
        self._publishers: list[Publisher] = []
        self._waiting: list[Done] = []
        self.registry = Registry(self)

    def outage(self, duration_ms: float, *, stream_lost: bool) -> None:
        """NATS goes away, and comes back; maybe as another one."""
        if not self.up:
            return
        self.up = False
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done(Failure("bus_unavailable"))
        if stream_lost:
            self.log, self.first = [], 0
            self.stream_life += 1
        self.world.later(duration_ms, self._back)

    def _back(self) -> None:
        self.up = True
        for publisher in self._publishers:
            publisher.pump()
        for subscription in self._subscriptions:
            subscription.wake()

    def publish(self, source: Node, targets: Sequence[Node], call: Callable[[Node], None]) -> None:
        """A core message: at most once each, unless the plan duplicates."""
        if not self.up:
            return
        for target in targets:
            twice = not self.world.calm and self.world.rng.random() < self.world.plan.duplicates
            for _ in range(2 if twice else 1):
                self.world.send(source.name, target, lambda target=target: self._arrive(target, call))  # type: ignore[misc] # fmt: skip # noqa: E501
            if twice:
                delay_ms = self.world.rng.uniform(0, STALL_MS)
                self.world.later(delay_ms, lambda target=target: self._arrive(target, call))  # type: ignore[misc]

    def _arrive(self, target: Node, call: Callable[[Node], None]) -> None:
        if self.up and target.up:
            call(target)

    def request(self, asker: Node, target: Node, serve: Serve, done: Done, limit_ms: float) -> None:
        """Ask; `done` gets the reply, an ErrorBody or a Failure, once, in this life of the asker."""
        life, finished = asker.life, False

        def finish(reply: object) -> None:
            nonlocal finished
            if not finished and asker.up and asker.life == life:
                finished = True
                asker.later(0, lambda: done(reply))
            if finish in self._waiting:
                self._waiting.remove(finish)

        def respond(reply: object) -> None:
            if self.up:
                assert isinstance(reply, ErrorBody) or reply is not None
                self.world.send(target.name, asker, lambda: finish(reply))

        if not self.up:
            finish(Failure("bus_unavailable"))
            return
        self._waiting.append(finish)
        asker.later(limit_ms, lambda: finish(Failure("deadline_exceeded")))
        if not target.up:
            asker.later(self.world.plan.delay_ms, lambda: finish(Failure("no_responder")))
            return
        self.world.send(asker.name, target, lambda: serve(respond) if self.up else None)

    def publisher(self, node: Node) -> Publisher:
        """The outbox of one source's life."""
        publisher = Publisher(self, node)
        self._publishers = [p for p in self._publishers if p.alive] + [publisher]
        return publisher

    def follow(
        self,
        node: Node,
        wanted: Callable[[Event], bool],
        take: Callable[[list[Event]], None],
        *,
        new: bool,
    ) -> None:
        """Give a node's life every event that it wants, from now on (`new`) or from the first."""
        position = self.first + len(self.log) if new else 0
        subscription = Subscription(self, node, wanted, take, position)
        self._subscriptions = [s for s in self._subscriptions if s.alive] + [subscription]
        subscription.wake()

    def store(self, event: Event) -> None:
        """JetStream has it."""
        self.log.append(event)
        if len(self.log) > self.world.plan.stream_max:
            self.first += 1
            del self.log[0]
        for subscription in self._subscriptions:
            if subscription.wanted(event):
                subscription.wake()


class Publisher:
    """As kvbm_common.event_publisher: in order, bounded, the oldest is dropped."""

    def __init__(self, bus: Bus, node: Node) -> None:
        self._bus, self._node, self._life = bus, node, node.life
        self._outbox: deque[Event] = deque()
        self._free_at = 0.0

    @property
    def alive(self) -> bool:
        """Does the process still run, or is something of it on its way?"""
        return (self._node.up and self._node.life == self._life) or bool(self._outbox)

    def publish(self, event: Event) -> None:
        """Send an event as soon as NATS takes it."""
        self._outbox.append(event)
        if len(self._outbox) > self._bus.world.plan.outbox_max:
            self._outbox.popleft()
            self._bus.world.marks["event dropped"] += 1
        world = self._bus.world
        self._free_at = max(self._free_at, world.now + world.delay(world.plan.delay_ms))
        world.later(self._free_at - world.now, self.pump)

    def died(self) -> None:
        """What NATS has got already is stored late; the rest is lost."""
        for _ in range(self._bus.world.rng.randint(0, len(self._outbox))):
            self._outbox.pop()

    def pump(self) -> None:
        """Everything that waits is stored, in order."""
        while self._outbox and self._bus.up:
            self._bus.store(self._outbox.popleft())


class Subscription:
    """As kvbm_common.event_subscription: in order, complete as far as the stream reaches back."""

    def __init__(
        self,
        bus: Bus,
        node: Node,
        wanted: Callable[[Event], bool],
        take: Callable[[list[Event]], None],
        position: int,
    ) -> None:
        self._bus, self._node, self._life = bus, node, node.life
        self.wanted, self._take = wanted, take
        self._position, self._stream_life = position, bus.stream_life
        self._scheduled = False

    @property
    def alive(self) -> bool:
        """Does the reader still run?"""
        return self._node.up and self._node.life == self._life

    def wake(self) -> None:
        """There may be something to read."""
        if not self._scheduled and self.alive:
            self._scheduled = True
            world = self._bus.world
            self._node.later(world.delay(world.plan.delay_ms), self._read)

    def _read(self) -> None:
        self._scheduled = False
        bus = self._bus
        if not bus.up:
            return
        if self._stream_life != bus.stream_life:
            self._stream_life, self._position = bus.stream_life, 0
        start = max(self._position, bus.first) - bus.first
        batch = bus.log[start : start + bus.world.rng.randint(1, 16)]
        self._position = bus.first + start + len(batch)
        if self._position < bus.first + len(bus.log):
            self.wake()
        events = [event for event in batch if self.wanted(event)]
        if events:
            self._take(events)


@dataclass(slots=True)
class Registry:
    """Who lives. Entries of the dead expire; watchers hear of everything in order, with a delay."""

    bus: Bus
    ttl_ms: float = 2_000.0
    entries: dict[str, int] = field(default_factory=dict)
    _watchers: list[tuple[Node, int, Callable[[str, int, bool], None]]] = field(
        default_factory=list
    )
    _epoch: int = 1_000

    def register(self, source: str, node: Node, lost: Callable[[int], None] | None = None) -> int:
        """A new life of a source, kept alive by `node`: its epoch.

        `lost` is called when a heartbeat finds that another life has taken the entry over.
        """
        world = self.bus.world
        self._epoch += world.rng.randint(1, 3)
        epoch, life = self._epoch, node.life
        self.entries[source] = epoch
        self._tell(source, epoch, there=True)

        def beat() -> None:
            alive = node.up and node.life == life
            found = self.entries.get(source, 0)
            if found > epoch and alive and lost is not None:
                lost(epoch)
            elif found == epoch and self.bus.up and not alive:
                self.leave(source, epoch)
            elif found == epoch:
                world.later(self.ttl_ms, beat)

        world.later(self.ttl_ms, beat)
        return epoch

    def leave(self, source: str, epoch: int) -> None:
        """An entry is gone."""
        if self.entries.get(source) == epoch:
            del self.entries[source]
            self._tell(source, epoch, there=False)

    def watch(self, node: Node, take: Callable[[str, int, bool], None]) -> None:
        """Tell a node's life of everybody who is there, then of every change."""
        self._watchers.append((node, node.life, take))
        for source, epoch in self.entries.items():
            self._tell_one(len(self._watchers) - 1, source, epoch, there=True)

    def _tell(self, source: str, epoch: int, *, there: bool) -> None:
        for number in range(len(self._watchers)):
            self._tell_one(number, source, epoch, there=there)

    def _tell_one(self, number: int, source: str, epoch: int, *, there: bool) -> None:
        node, life, take = self._watchers[number]
        if not node.up or node.life != life:
            return
        node.later(self.bus.world.queue("registry", node.name), lambda: take(source, epoch, there))
