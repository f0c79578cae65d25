"""NATS: core messages, requests with a deadline, the stream of events and the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.sim.registry import Registry
from tests.sim.stream import Stream
from tests.sim.world import STALL_MS, Call, Node, World


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that got no good answer."""

    code: str


Done = Callable[[object], None]
Serve = Callable[[Done], None]


class Bus:
    """One NATS server; `world.bus_up` says whether it answers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stream = Stream(world)
        self.registry = Registry(world)
        self._waiting: list[Done] = []

    def outage(self, duration_ms: float, *, stream_lost: bool) -> None:
        """NATS goes away, and comes back; maybe as another one."""
        if not self.world.bus_up:
            return
        self.world.bus_up = False
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done(Failure("bus_unavailable"))
        if stream_lost:
            self.stream.lose()
        self.world.later(duration_ms, self._back)

    def _back(self) -> None:
        self.world.bus_up = True
        self.stream.resume()

    def publish(self, source: Node, target: Node, call: Call) -> None:
        """A core message: at most once, unless the plan duplicates; a copy may overtake others."""
        world = self.world
        if not world.bus_up:
            return

        def arrive() -> None:
            if world.bus_up and target.up:
                call()

        world.send(source.name, target, arrive)
        if not world.calm and world.rng.random() < world.plan.duplicates:
            world.marks["message duplicated"] += 1
            world.send(source.name, target, arrive)
            world.later(world.rng.uniform(0, STALL_MS), arrive)

    def request(
        self, asker: Node, target: Node, serve: Serve, done: Done, *, limit_ms: float
    ) -> None:
        """Ask; `done` gets a reply, an ErrorBody or a Failure, once, in this life of the asker."""
        life, finished = asker.life, False

        def finish(reply: object) -> None:
            nonlocal finished
            if not finished and asker.up and asker.life == life:
                finished = True
                asker.later(0, lambda: done(reply))
            if finish in self._waiting:
                self._waiting.remove(finish)

        def respond(reply: object) -> None:
            if self.world.bus_up:
                self.world.send(target.name, asker, lambda: finish(reply))

        if not self.world.bus_up:
            finish(Failure("bus_unavailable"))
            return
        self._waiting.append(finish)
        asker.later(limit_ms, lambda: finish(Failure("deadline_exceeded")))
        if not target.up:
            asker.later(self.world.plan.delay_ms, lambda: finish(Failure("no_responder")))
            return
        self.world.send(asker.name, target, lambda: serve(respond) if self.world.bus_up else None)
