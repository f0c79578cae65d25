"""JetStream: the log of events, those who write it and those who read it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from kvbm_common.wire.events import Event

from tests.sim.world import Node, World

UNACKNOWLEDGED_MAX = 4
"""So many events at the end of an outbox may have been stored though no acknowledgement came."""


class Stream:
    """The log that every event goes through. It keeps only so many, and may be lost."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.log: list[Event] = []
        self.first = 0
        """Position of `log[0]`."""
        self.life = 0
        self._subscriptions: list[Subscription] = []
        self._publishers: list[Publisher] = []

    def lose(self) -> None:
        """NATS will come back without its store."""
        self.log, self.first = [], 0
        self.life += 1

    def resume(self) -> None:
        """NATS is back: everybody goes on."""
        for publisher in self._publishers:
            publisher.send_again()
            publisher.pump()
        for subscription in self._subscriptions:
            subscription.wake()

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
        lost: Callable[[], None] = lambda: None,
        resume: tuple[int, int] | None = None,
    ) -> Subscription:
        """Give a node's life every event that it wants, from now on (`new`) or from the first.

        `lost` is called when the reader finds another stream. `resume` is a life of the stream, and
        how many of its events were read.
        """
        position = self.first + len(self.log) if new else 0
        subscription = Subscription(self, node, wanted, take, position)
        subscription.lost = lost
        if resume is not None:
            subscription.life, subscription.position = resume
        self._subscriptions = [s for s in self._subscriptions if s.alive] + [subscription]
        subscription.wake()
        return subscription

    def store(self, event: Event) -> None:
        """JetStream has it."""
        self.log.append(event)
        if len(self.log) > self.world.plan.stream_max:
            self.first += 1
            del self.log[0]
        for subscription in self._subscriptions:
            if not subscription.is_awake and subscription.wanted(event):
                subscription.wake()


class Publisher:
    """As kvbm_common.nats.event_publisher: in order, bounded, the oldest is dropped."""

    def __init__(self, stream: Stream, node: Node) -> None:
        self._stream, self._node, self._life = stream, node, node.life
        self._outbox: deque[Event] = deque()
        self._unacknowledged: deque[Event] = deque(maxlen=UNACKNOWLEDGED_MAX)
        self._free_at = 0.0

    @property
    def alive(self) -> bool:
        """Does the process still run, or is something of it on its way?"""
        return (self._node.up and self._node.life == self._life) or bool(self._outbox)

    def publish(self, event: Event) -> None:
        """Send an event as soon as NATS takes it."""
        world = self._stream.world
        self._outbox.append(event)
        if len(self._outbox) > world.plan.outbox_max:
            self._drop()
            world.marks["event dropped"] += 1
        self._free_at = max(self._free_at, world.now + world.delay(world.plan.delay_ms))
        world.later(self._free_at - world.now, self.pump)

    def _drop(self) -> None:
        """The oldest; a source's last event only if there is no other."""
        waiting = Counter(event.source for event in self._outbox)
        for _ in waiting:
            if waiting[self._outbox[0].source] > 1:
                break
            self._outbox.rotate(-1)
        self._outbox.popleft()

    def died(self) -> None:
        """What NATS has got already is stored late; the rest is lost."""
        self._unacknowledged.clear()
        for _ in range(self._stream.world.rng.randint(0, len(self._outbox))):
            self._outbox.pop()

    def pump(self) -> None:
        """Everything that waits is stored, in order."""
        while self._outbox and self._stream.world.bus_up:
            event = self._outbox.popleft()
            self._unacknowledged.append(event)
            self._stream.store(event)

    def send_again(self) -> None:
        """After a reconnection: acknowledgements that were lost make duplicates."""
        world = self._stream.world
        if world.rng.random() < world.plan.duplicates:
            world.marks["event duplicated"] += len(self._unacknowledged)
            self._outbox.extendleft(reversed(self._unacknowledged))
            self._unacknowledged.clear()


class Subscription:
    """As `event_subscription`: in order, complete as far as the stream reaches back."""

    def __init__(
        self,
        stream: Stream,
        node: Node,
        wanted: Callable[[Event], bool],
        take: Callable[[list[Event]], None],
        position: int,
    ) -> None:
        self._stream, self._node, self._life = stream, node, node.life
        self.wanted, self._take = wanted, take
        self.position, self.life = position, stream.life
        """How many events were read, of this life of the stream."""
        self.is_awake = False
        """It reads soon."""
        self.lost: Callable[[], None] = lambda: None

    @property
    def alive(self) -> bool:
        """Does the reader still run?"""
        return self._node.up and self._node.life == self._life

    def wake(self) -> None:
        """There may be something to read."""
        if not self.is_awake and self.alive:
            self.is_awake = True
            world = self._stream.world
            self._node.later(world.delay(world.plan.delay_ms), self._read)

    def _read(self) -> None:
        self.is_awake = False
        stream = self._stream
        if not stream.world.bus_up:
            return
        if self.life != stream.life:
            self.life, self.position = stream.life, 0
            self.lost()
        elif 0 < self.position < stream.first:
            self.lost()  # Dropped before it was read, by a stream that is too small.
        start = max(self.position, stream.first) - stream.first
        batch = stream.log[start : start + stream.world.rng.randint(1, 16)]
        self.position = stream.first + start + len(batch)
        if self.position < stream.first + len(stream.log):
            self.wake()
        events = [event for event in batch if self.wanted(event)]
        if events:
            self._take(events)
