"""Placement: which engines are ours, and telling the others where to go.

An engine that is another's by the newest map is told so, and goes when it has finished what is
under way: until then it is served as ever. Its workers are told when its scheduler half has said
good-bye, because what that half has found here they still have to load from here.
"""

from __future__ import annotations

from typing import assert_never

from kvbm_common.wire.local import Hello, Moved

from kvbm_host_tier.engines import Engine, Engines
from kvbm_host_tier.messages import ToEngine
from kvbm_host_tier.shard_messages import (
    FrontTaken,
    HandedOver,
    Leaving,
    MapTold,
    MemberEntered,
    MemberGone,
    SayPlace,
    ShardInput,
)
from kvbm_host_tier.sharding import Sharding
from kvbm_host_tier.tier import Tier

LEAVE_MS = 1_000
"""How long engines may finish when this process is to end; it has a few seconds in all."""


class Placement:
    """The engines of one host tier as far as the others of its host are concerned."""

    def __init__(self, tier: Tier, engines: Engines, sharding: Sharding) -> None:
        self._tier, self._engines, self.sharding = tier, engines, sharding
        self._leaving = False
        self._handed_over = False
        self._said = SayPlace(takes=True, shard_map=None)

    @property
    def takes(self) -> bool:
        """Whether engines are well placed here."""
        return not (self._tier.draining or self._leaving)

    def handle(self, event: ShardInput) -> None:
        """Something has changed among the host tiers of this host."""
        match event:
            case MemberEntered():
                changed = self.sharding.entered(
                    event.instance, event.epoch, endpoint=event.endpoint, takes=event.takes,
                    is_new=event.is_new,
                )  # fmt: skip
            case MemberGone(instance, epoch, said_so):
                changed = self.sharding.gone(instance, epoch, said_so=said_so)
            case MapTold(shard_map):
                changed = self.sharding.told(shard_map)
            case FrontTaken(now_us):
                changed = self.sharding.become_front(now_us)
            case Leaving():
                self._leaving, changed = True, True
            case _:
                assert_never(event)
        if changed:
            self._tier.counts["shard_maps"] += 1
            for engine in self._engines:
                self._tell(engine)

    def advance(self) -> None:
        """After every step: say what has changed about us."""
        speaks = self.sharding.is_front and self.sharding.map.version > 0
        place = SayPlace(self.takes, self.sharding.map if speaks else None)
        if place != self._said:
            self._said = place
            self._tier.emit(place)
        alone = not set(self.sharding.map.endpoints) - {self.sharding.own}
        if self._leaving and not self._handed_over and (alone or not len(self._engines)):
            self._handed_over = True
            self._tier.emit(HandedOver())

    # --- engines ----------------------------------------------------------------------------

    def sends_away(self, connection: bytes, hello: Hello) -> bool:
        """Is somebody who introduces himself another's? Then he is told whose."""
        self.sharding.heard_version(hello.shards)
        endpoint = self.sharding.elsewhere(hello.engine, hello.shards)
        if endpoint is None:
            return False
        self._tier.counts["engines_sent_on"] += 1
        version = self.sharding.map.version
        self._tier.emit(ToEngine(connection, Moved(endpoint=endpoint, version=version)))
        return True

    def is_others(self, engine: str) -> bool:
        """Does another host tier of this host serve this engine?"""
        return self.sharding.elsewhere(engine) is not None

    def remind(self, engine: Engine, connection: bytes, now_ms: int) -> None:
        """A beat of an engine that should have gone.

        If its scheduler half is not heard any more, it may be there already, without a word; then
        nobody else tells its workers.
        """
        if not self.is_others(engine.id.engine):
            return
        lost_ms = self._tier.limits.engine_lost_ms
        if engine.scheduler is not None and now_ms - engine.scheduler.seen_ms > lost_ms:
            engine.scheduler = None
        if engine.scheduler is None or engine.is_scheduler(connection):
            self._tell(engine)

    def _tell(self, engine: Engine) -> None:
        endpoint = self.sharding.elsewhere(engine.id.engine)
        if endpoint is None:
            return
        within_ms = LEAVE_MS if self._leaving else self._tier.limits.move_ms
        moved = Moved(endpoint=endpoint, version=self.sharding.map.version, within_ms=within_ms)
        scheduler = engine.scheduler
        halves = [worker.connection for worker in engine.workers.values()]
        if scheduler is not None and scheduler.welcomed:
            halves = [scheduler.connection]
        elif scheduler is not None:
            halves.append(scheduler.connection)
            engine.scheduler = None  # It goes at once, and says no good-bye.
        for connection in halves:
            self._tier.emit(ToEngine(connection, moved))

    def has_left(self, engine: Engine) -> None:
        """An engine has said good-bye; if it moves, its workers follow."""
        endpoint = self.sharding.elsewhere(engine.id.engine)
        if endpoint is None:
            return
        self._engines.pardon(engine.id)
        self._tier.counts["engines_moved"] += 1
        moved = Moved(endpoint=endpoint, version=self.sharding.map.version)
        for worker in engine.workers.values():
            self._tier.emit(ToEngine(worker.connection, moved))
