"""Placement: the redirection of engines that another host tier of this host serves.

An engine that the newest map gives to another host tier is redirected, and leaves when it has
finished what is under way: until then it is served as before. Its workers are redirected when its
scheduler half has said Bye, because they still have to load what that half has found here.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import assert_never

from kvbm_common.tier.machine import Machine
from kvbm_common.wire.local import Hello, Moved

from kvbm_host_tier.core.engines import Engine, Engines
from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.messages import ToEngine
from kvbm_host_tier.core.shard_map import (
    FrontTaken,
    HandedOver,
    Leaving,
    MapTold,
    MemberJoined,
    MemberLeft,
    SayPlace,
    Sharding,
    ShardInput,
)

LEAVE_MS = 1_000
"""The time that engines have to finish when this process is to end, in milliseconds. The process
has a few seconds in all."""


class Stay(Enum):
    """The states of this instance at its end."""

    SERVING = "serving"
    LEAVING = "leaving"
    """Its engines finish what is under way and go to other instances."""
    HANDED_OVER = "handed over"
    """No engine is left, or there is no other instance to go to."""


STAY = Machine(
    "stay",
    {
        (Stay.SERVING, "leave"): Stay.LEAVING,
        (Stay.LEAVING, "leave"): Stay.LEAVING,
        (Stay.LEAVING, "engines gone"): Stay.HANDED_OVER,
        (Stay.HANDED_OVER, "leave"): Stay.HANDED_OVER,
    },
)


class Placement:
    """The engines of one host tier as far as the others of its host are concerned."""

    def __init__(
        self,
        engines: Engines,
        sharding: Sharding,
        means: Means,
        *,
        is_draining: Callable[[], bool],
        is_cut: Callable[[], bool],
    ) -> None:
        assert means.limits.move_ms >= 0
        self._engines, self._sharding = engines, sharding
        self._is_draining, self._is_cut = is_draining, is_cut
        self._limits, self._counts, self._emit = means.limits, means.counts, means.emit
        self._stay = Stay.SERVING
        self._said = SayPlace(takes=True, shard_map=None)

    @property
    def takes(self) -> bool:
        """Tell whether other instances should give engines to this one."""
        return self._stay is Stay.SERVING and not self._is_draining()

    def _move(self, event: str) -> None:
        self._stay = STAY.next(self._stay, event)

    def handle(self, event: ShardInput) -> None:
        """Take in what has changed among the host tiers of this host."""
        match event:
            case MemberJoined():
                changed = self._sharding.joined(
                    event.instance, event.epoch, endpoint=event.endpoint, takes=event.takes,
                    is_new=event.is_new,
                )  # fmt: skip
            case MemberLeft(instance, epoch, said_so):
                changed = self._sharding.left(instance, epoch, said_so=said_so)
            case MapTold(shard_map):
                changed = self._sharding.told(shard_map)
            case FrontTaken(now_us):
                changed = self._sharding.become_front(now_us)
            case Leaving():
                self._move("leave")
                changed = True
            case _:
                assert_never(event)
        if changed:
            self._counts["shard_maps"] += 1
            for engine in self._engines:
                self._tell(engine)
        self.advance()

    def advance(self) -> None:
        """Tell others what has changed here: draining, the map, the first engine, the last one."""
        speaks = self._sharding.is_front and self._sharding.map.version > 0
        place = SayPlace(self.takes, self._sharding.map if speaks else None, self._is_cut())
        if place != self._said:
            self._said = place
            self._emit(place)
        alone = not set(self._sharding.map.endpoints) - {self._sharding.own}
        if self._stay is Stay.LEAVING and (alone or not len(self._engines)):
            self._move("engines gone")
            self._emit(HandedOver())

    # --- engines ----------------------------------------------------------------------------

    def sends_away(self, connection: bytes, hello: Hello) -> bool:
        """Redirect an engine that another host tier owns; False: this one serves it."""
        assert connection
        self._sharding.heard_version(hello.shards)
        endpoint = self._sharding.elsewhere(hello.engine, hello.shards)
        if endpoint is None:
            return False
        self._counts["engines_sent_on"] += 1
        version = self._sharding.map.version
        self._emit(ToEngine(connection, Moved(endpoint=endpoint, version=version)))
        return True

    def is_others(self, engine: str) -> bool:
        """Tell whether another host tier of this host serves this engine."""
        assert engine
        return self._sharding.elsewhere(engine) is not None

    def remind(self, engine: Engine, connection: bytes, now_ms: int) -> None:
        """Redirect an engine that beats here and should have gone elsewhere.

        A scheduler half that has fallen silent may have gone without a Bye. Its workers then learn
        of the other host tier from this one only.
        """
        assert engine.label
        if not self.is_others(engine.id.engine):
            return
        lost_ms = self._limits.engine_lost_ms
        if engine.scheduler is not None and now_ms - engine.scheduler.seen_ms > lost_ms:
            engine.scheduler = None
        if engine.scheduler is None or engine.is_scheduler(connection):
            self._tell(engine)

    def _tell(self, engine: Engine) -> None:
        endpoint = self._sharding.elsewhere(engine.id.engine)
        if endpoint is None:
            return
        within_ms = LEAVE_MS if self._stay is not Stay.SERVING else self._limits.move_ms
        moved = Moved(endpoint=endpoint, version=self._sharding.map.version, within_ms=within_ms)
        scheduler = engine.scheduler
        halves = [worker.connection for worker in engine.workers.values()]
        if scheduler is not None and scheduler.welcomed:
            halves = [scheduler.connection]
        elif scheduler is not None:
            halves.append(scheduler.connection)
            engine.scheduler = None  # It goes at once, without a Bye.
        for connection in halves:
            self._emit(ToEngine(connection, moved))

    def has_left(self, engine: Engine) -> None:
        """Redirect the workers of an engine whose scheduler half has said Bye."""
        assert self._engines.get(engine.id.engine, engine.id.incarnation) is None, engine.label
        endpoint = self._sharding.elsewhere(engine.id.engine)
        if endpoint is None:
            return
        self._counts["engines_moved"] += 1
        moved = Moved(endpoint=endpoint, version=self._sharding.map.version)
        for worker in engine.workers.values():
            self._emit(ToEngine(worker.connection, moved))
