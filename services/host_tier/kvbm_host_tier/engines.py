"""The engines that are attached: who they are, where their memory is, when they were last heard.

An engine has one scheduler half and `world_size` workers, one per tensor-parallel rank. It is
*complete* when every worker has been attached; only then does its scheduler half get a `Welcome`,
and only then can its blocks be pulled. This is the leader/worker barrier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbm_common.wire.local import Hello, Refused, Region, Welcome
from kvbm_common.wire.verbs import WorkerStats

from kvbm_host_tier.messages import (
    AttachPeer,
    DetachPeer,
    EngineId,
    PeerAttached,
    PeerFailed,
    PullPart,
    ToEngine,
)
from kvbm_host_tier.tier import Tier

SUPERSEDED_MAX = 256
"""Old incarnations that are remembered, so that a confused twin is told once and for all."""


@dataclass(slots=True)
class Worker:
    """One rank's memory. `peer` is None while NIXL learns of it (one AttachPeer is in flight)."""

    hello: Hello
    connection: bytes
    peer: str | None = None
    outdated: bool = False
    """The AttachPeer in flight is of memory that has been replaced since."""

    @property
    def part_bytes(self) -> int:
        return sum(region.piece_bytes for region in self.hello.regions)


@dataclass(slots=True)
class Scheduler:
    """The half that asks. Before it is welcomed it may go elsewhere without a word."""

    connection: bytes
    seen_ms: int
    welcomed: bool = False


@dataclass(slots=True)
class Engine:
    """One life of an engine."""

    id: EngineId
    hello: Hello
    namespace: bytes
    seen_ms: int
    scheduler: Scheduler | None = None
    workers: dict[int, Worker] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        attached = sum(worker.peer is not None for worker in self.workers.values())
        return attached == self.hello.world_size

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all ranks."""
        return sum(worker.part_bytes for worker in self.workers.values())

    @property
    def block_count(self) -> int:
        """Device blocks that every region of every rank has."""
        return min(
            region.blocks for worker in self.workers.values() for region in worker.hello.regions
        )

    def is_scheduler(self, connection: bytes) -> bool:
        """Is this the half that asks?"""
        return self.scheduler is not None and connection == self.scheduler.connection

    def heard(self, connection: bytes, now_ms: int) -> bool:
        """One of its halves speaks; False: it has not introduced itself.

        A beat of one half must not keep another one silent.
        """
        if self.scheduler is not None and self.is_scheduler(connection):
            self.scheduler.seen_ms = now_ms
        elif all(connection != worker.connection for worker in self.workers.values()):
            return False
        self.seen_ms = now_ms
        return True

    def parts(self) -> tuple[PullPart, ...]:
        """Where the ranks' shares of a block are, in the order in which they are stored."""
        parts: list[PullPart] = []
        offset = 0
        for _, worker in sorted(self.workers.items()):
            assert worker.peer is not None, f"{self.id} is not complete"
            regions: tuple[Region, ...] = tuple(worker.hello.regions)
            parts.append(PullPart(worker.peer, regions, offset))
            offset += worker.part_bytes
        return tuple(parts)


class Engines:
    """All attached engines, by name: at most one life each."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._engines: dict[str, Engine] = {}
        self._superseded: dict[str, None] = {}

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, engine: str, incarnation: str) -> Engine | None:
        """The engine, if this very life of it is attached."""
        found = self._engines.get(engine)
        return found if found is not None and found.id.incarnation == incarnation else None

    def hello(self, connection: bytes, hello: Hello, now_ms: int) -> EngineId | None:
        """Somebody introduces himself.

        Returns the life whose offers and lookups this ends, if any: an older one, or this one when
        one of its workers has come back with other memory.
        """
        refusal = self._refusal(hello)
        if refusal is not None:
            self._tier.counts[f"refused.{refusal.code}"] += 1
            self._tier.emit(ToEngine(connection, refusal))
            return None
        ended = self._supersede(hello)
        engine = self._engines.get(hello.engine)
        if engine is None:
            engine = Engine(
                EngineId(hello.engine, hello.incarnation), hello, hello.namespace.digest, now_ms
            )
            self._engines[hello.engine] = engine
        engine.seen_ms = now_ms
        if hello.role == "scheduler":
            if not engine.is_scheduler(connection):
                engine.scheduler = Scheduler(connection, now_ms)
            self._welcome_if_complete(engine)
        elif self._attach(engine, Worker(hello, connection)):
            ended = engine.id
        return ended

    def _refusal(self, hello: Hello) -> Refused | None:
        if f"{hello.engine}:{hello.incarnation}" in self._superseded:
            return _refused("superseded", "a newer life of this engine is attached", "incarnation")
        known = self.get(hello.engine, hello.incarnation)
        if known is not None and known.hello.namespace != hello.namespace:
            return _refused("namespace", "differs from the engine's other halves", "namespace")
        if known is not None and known.hello.world_size != hello.world_size:
            return _refused("world_size", "differs from the engine's other halves", "world_size")
        if hello.role == "scheduler":
            return None
        if hello.rank >= hello.world_size:
            return _refused("rank", f"must be below world_size {hello.world_size}", "rank")
        if not hello.regions or not hello.agent:
            return _refused("regions", "a worker needs regions and agent metadata", "regions")
        block_bytes = sum(r.piece_bytes for r in hello.regions) * hello.world_size
        if self._tier.want_arena(block_bytes):
            text = self._tier.arena_failure or "the arena is being made, say hello again"
            return _refused("arena_pending", text, "regions")
        if not self._tier.format(block_bytes):
            return _refused(
                "block_size",
                f"blocks of {block_bytes} bytes do not fit the slots of this arena "
                f"({self._tier.slot_bytes or self._tier.arena.capacity_bytes} bytes)",
                "regions",
            )
        return None

    def _supersede(self, hello: Hello) -> EngineId | None:
        older = self._engines.get(hello.engine)
        if older is None or older.id.incarnation == hello.incarnation:
            return None
        self.end(older.id)
        return older.id

    def end(self, engine_id: EngineId) -> None:
        """An engine's life is over: forget its memory."""
        engine = self._engines.pop(engine_id.engine)
        assert engine.id == engine_id
        for worker in engine.workers.values():
            if worker.peer is not None:
                self._tier.emit(DetachPeer(worker.peer))
        self._superseded[str(engine_id)] = None
        while len(self._superseded) > SUPERSEDED_MAX:
            del self._superseded[next(iter(self._superseded))]

    def lost(self, now_ms: int) -> list[EngineId]:
        """Engines that have not been heard for too long. They may come back with a Hello."""
        silent_ms = self._tier.limits.engine_lost_ms
        return [engine.id for engine in self if now_ms - engine.seen_ms > silent_ms]

    def pardon(self, engine_id: EngineId) -> None:
        """A life that was only silent, not replaced, may introduce itself again."""
        self._superseded.pop(str(engine_id), None)

    def _attach(self, engine: Engine, worker: Worker) -> bool:
        """Take a worker in; True: it replaces other memory of the same rank."""
        rank = worker.hello.rank
        known = engine.workers.get(rank)
        if known is None:
            engine.workers[rank] = worker
            self._attach_peer(engine, worker)
            return False
        known.connection = worker.connection
        if known.hello == worker.hello:
            if known.peer is not None:
                self._welcome(engine, known.connection)
            return False
        known.hello = worker.hello
        if known.peer is None:
            known.outdated = True
        else:
            self._tier.emit(DetachPeer(known.peer))
            known.peer = None
            self._attach_peer(engine, known)
        return True

    def _attach_peer(self, engine: Engine, worker: Worker) -> None:
        worker.outdated = False
        self._tier.emit(AttachPeer(engine.id, worker.hello.rank, worker.hello.agent))

    def peer_attached(self, event: PeerAttached) -> None:
        """NIXL knows a worker now."""
        engine = self.get(event.engine.engine, event.engine.incarnation)
        worker = engine.workers.get(event.rank) if engine is not None else None
        if engine is None or worker is None or worker.outdated:
            self._tier.emit(DetachPeer(event.peer))
            if engine is not None and worker is not None:
                self._attach_peer(engine, worker)
            return
        worker.peer = event.peer
        self._welcome(engine, worker.connection)
        self._welcome_if_complete(engine)

    def reattach(self, engine_id: EngineId) -> None:
        """A worker could not be reached: NIXL has forgotten it by now, introduce it again."""
        engine = self.get(engine_id.engine, engine_id.incarnation)
        for worker in engine.workers.values() if engine is not None else ():
            if engine is not None and worker.peer is not None:
                self._tier.emit(DetachPeer(worker.peer))
                worker.peer = None
                self._attach_peer(engine, worker)

    def peer_failed(self, event: PeerFailed) -> None:
        """NIXL refused a worker."""
        self._tier.counts["refused.agent"] += 1
        engine = self.get(event.engine.engine, event.engine.incarnation)
        worker = engine.workers.get(event.rank) if engine is not None else None
        if engine is None or worker is None or worker.peer is not None:
            return
        if worker.outdated:
            self._attach_peer(engine, worker)
            return
        del engine.workers[event.rank]
        refusal = _refused("agent", event.reason, "agent")
        self._tier.emit(ToEngine(worker.connection, refusal))

    def _welcome_if_complete(self, engine: Engine) -> None:
        if engine.scheduler is not None and engine.complete:
            engine.scheduler.welcomed = True
            self._welcome(engine, engine.scheduler.connection)

    def _welcome(self, engine: Engine, connection: bytes) -> None:
        tier = self._tier
        welcome = Welcome(
            host=tier.announcer.host,
            instance=tier.announcer.source,
            epoch=tier.announcer.epoch,
            agent=tier.arena.agent,
            arena_address=tier.arena.address,
            arena_path=tier.arena.path,
            slot_bytes=tier.slot_bytes,
            slot_count=tier.table.slot_count,
            beat_ms=tier.limits.beat_ms,
            explains=tier.limits.explain_requests > 0,
            traces=tier.limits.traces,
        )
        tier.emit(ToEngine(connection, welcome))

    def statistics(self, now_ms: int) -> list[WorkerStats]:
        """Every attached worker."""
        return [
            WorkerStats(
                engine=engine.id.engine,
                incarnation=engine.id.incarnation,
                rank=rank,
                world_size=engine.hello.world_size,
                namespace=engine.hello.namespace,
                block_bytes=engine.block_bytes,
                seen_ms_ago=max(0, now_ms - engine.seen_ms),
            )
            for engine in self
            for rank in sorted(engine.workers)
        ]


def _refused(code: str, message: str, field_name: str) -> Refused:
    return Refused(about="hello", code=code, message=message, field=field_name)
