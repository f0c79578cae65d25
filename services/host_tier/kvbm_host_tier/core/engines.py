"""The engines that are attached: their lives, their memory, and when each was heard last.

An engine has one scheduler half and `world_size` workers, one per rank of any kind. It is
*complete* when every worker is ATTACHED; only then does its scheduler half get a `Welcome`, and
only then can its blocks be pulled. This is the leader/worker barrier. The states of a worker are
drawn in `docs/state_machines.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.layout import UNIT_BYTES
from kvbm_common.tier.parts import ONE_PART, Grid
from kvbm_common.tier.prefill_cost import PrefillCost
from kvbm_common.tier.slab_pool import SIZES_MAX
from kvbm_common.wire.local import Hello, Refused, Welcome
from kvbm_common.wire.tier_stats import WorkerStats

from kvbm_host_tier.core.arena import Arena
from kvbm_host_tier.core.findable import Findable
from kvbm_host_tier.core.former_lives import FormerLives
from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.messages import (
    AttachPeer,
    DetachPeer,
    EngineId,
    PeerAttached,
    PeerFailed,
    PullPart,
    ToEngine,
)
from kvbm_host_tier.core.workers import WORKER, Worker, WorkerStage, refusal_of_worker, refused


@dataclass(slots=True)
class Scheduler:
    """The half that looks blocks up. Before its `Welcome` it may leave without a `Bye`."""

    connection: bytes
    seen_ms: int
    welcomed: bool = False


@dataclass(slots=True)
class Engine:
    """One life of an engine."""

    id: EngineId
    hello: Hello
    seen_ms: int
    scheduler: Scheduler | None = None
    workers: dict[int, Worker] = field(default_factory=dict)
    label: str = ""
    """Its id as text: the owner of its leases."""
    namespaces: frozenset[bytes] = frozenset()
    """Digests of its KV groups' namespaces: what it may offer blocks under, and look up."""
    complete: bool = False
    """Every worker is ATTACHED."""
    block_bytes: int = 0
    """Bytes of a whole block; 0 until a rank has joined."""
    block_count: int = 0
    """Device blocks that every region of every rank has."""
    grid: Grid = ONE_PART
    """The cut of a block into parts, on which all ranks agree; known when a rank has joined."""
    pulled: tuple[PullPart, ...] = ()
    """The parts of device memory that a block is pulled from; empty until the engine is
    complete."""
    prefill: PrefillCost | None = None
    """The engine's measured time to compute, as its last lookup says; None: not known."""

    def __post_init__(self) -> None:
        self.label = str(self.id)
        self.namespaces = frozenset(one.digest for one in self.hello.namespaces)

    def workers_changed(self) -> None:
        """Compute what follows from the workers: completeness, block size, grid, regions."""
        workers = self.workers.values()
        assert len(workers) <= self.hello.world_size, self.label
        self.complete = sum(one.is_attached for one in workers) == self.hello.world_size
        first = next(iter(workers), None)
        self.block_bytes = first.block_bytes if first is not None else 0
        self.grid = first.share.grid if first is not None else ONE_PART
        self.block_count = min((worker.block_count for worker in workers), default=0)
        self.pulled = self._pulled() if self.complete else ()

    def _pulled(self) -> tuple[PullPart, ...]:
        """Return the ranks that together hold every part once, in their order."""
        ranks = [worker for _, worker in sorted(self.workers.items()) if worker.is_pulled]
        parts = tuple(PullPart(one.peer, tuple(one.hello.regions), one.share) for one in ranks)
        held = [part for one in parts for part in one.share.parts]
        assert sorted(held) == list(range(self.grid.count)), f"{self.label}: parts {held}"
        return parts

    def is_scheduler(self, connection: bytes) -> bool:
        """Tell whether this connection is the scheduler half's."""
        return self.scheduler is not None and connection == self.scheduler.connection

    def heard(self, connection: bytes, now_ms: int) -> bool:
        """Note that a half has spoken; False: this half has not said hello.

        A beat of one half must not hide that another half is silent.
        """
        assert now_ms >= self.seen_ms, self.label
        if self.scheduler is not None and self.is_scheduler(connection):
            self.scheduler.seen_ms = now_ms
        elif all(connection != worker.connection for worker in self.workers.values()):
            return False
        self.seen_ms = now_ms
        return True

    def parts(self) -> tuple[PullPart, ...]:
        """Return where a block is pulled from: together these ranks hold every part once."""
        assert self.complete, f"{self.label} is not complete"
        return self.pulled


class Engines:
    """All attached engines, by name: at most one life each."""

    def __init__(
        self, arena: Arena, announcer: Announcer, findable: Findable, means: Means
    ) -> None:
        assert means.limits.engine_lost_ms > 0
        self._findable = findable
        self._arena = arena
        self._announcer = announcer
        self._limits, self._counts, self._emit = means.limits, means.counts, means.emit
        self._engines: dict[str, Engine] = {}
        self._former = FormerLives()

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, engine: str, incarnation: str) -> Engine | None:
        """Return the engine if this life of it is attached."""
        found = self._engines.get(engine)
        return found if found is not None and found.id.incarnation == incarnation else None

    def hello(self, connection: bytes, hello: Hello, now_ms: int) -> EngineId | None:
        """Take the hello of a half in; returns the life whose offers and lookups end with it.

        That is an older life, or this one when a worker has come back with other memory.
        """
        refusal = self._refusal(hello)
        if refusal is not None:
            self._counts[f"refused.{refusal.code}"] += 1
            self._emit(ToEngine(connection, refusal))
            return None
        ended, engine = None, self._engines.get(hello.engine)
        if engine is not None and engine.id.incarnation != hello.incarnation:
            ended, engine = engine.id, None
            self.end(ended)
            self._former.add(ended)
        if engine is None:
            engine = Engine(EngineId(hello.engine, hello.incarnation), hello, now_ms)
            self._engines[hello.engine] = engine
        assert engine.id.incarnation == hello.incarnation, engine.label
        engine.seen_ms = now_ms
        if hello.role == "scheduler":
            if not engine.is_scheduler(connection):
                engine.scheduler = Scheduler(connection, now_ms)
            self._welcome_if_complete(engine)
        elif self._attach(engine, Worker(hello, connection)):
            ended = engine.id
        return ended

    def _refusal(self, hello: Hello) -> Refused | None:
        if EngineId(hello.engine, hello.incarnation) in self._former:
            return refused("superseded", "a newer life of this engine is attached", "incarnation")
        known = self.get(hello.engine, hello.incarnation)
        if known is not None and known.hello.namespaces != hello.namespaces:
            return refused("namespace", "differs from the engine's other halves", "namespace")
        if known is not None and known.hello.world_size != hello.world_size:
            return refused("world_size", "differs from the engine's other halves", "world_size")
        if hello.role == "scheduler":
            return None
        workers = known.workers if known is not None else {}
        others = [worker for rank, worker in workers.items() if rank != hello.rank]
        refusal = refusal_of_worker(hello, others)
        return refusal or self._arena_refusal(Worker(hello, b"").block_bytes)

    def _arena_refusal(self, block_bytes: int) -> Refused | None:
        """Return why blocks of this size cannot be kept here, or have the arena cut for them."""
        arena = self._arena
        if arena.is_missing(block_bytes):
            if arena.failure:
                return refused("arena_refused", arena.failure, "regions")
            return refused("arena_pending", "the arena is being made, say hello again", "regions")
        if arena.takes(block_bytes):
            return None
        if block_bytes <= arena.max_block_bytes():
            text = (
                f"blocks of {block_bytes} bytes would be of one size more than the {SIZES_MAX} "
                "that this arena can have at a time: evict the blocks of models that are gone"
            )
            return refused("size_limit", text, "regions")
        text = (
            f"blocks of {block_bytes} bytes do not fit the slabs of this arena "
            f"({arena.max_block_bytes()} bytes): make the arena larger (DYN_KVBM_CPU_CACHE_GB), or "
            "start the engine with the largest blocks first"
        )
        return refused("block_size", text, "regions")

    def end(self, engine_id: EngineId) -> None:
        """Forget an engine whose life is over, and its memory."""
        engine = self._engines.pop(engine_id.engine)
        assert engine.id == engine_id
        for worker in engine.workers.values():
            if worker.is_attached:
                self._emit(DetachPeer(worker.peer))

    def lost(self, now_ms: int) -> list[EngineId]:
        """Return the engines that were silent for too long; they may come back with a hello."""
        assert now_ms >= 0
        silent_ms = self._limits.engine_lost_ms
        return [engine.id for engine in self if now_ms - engine.seen_ms > silent_ms]

    def pardon(self, engine: str) -> None:
        """Let every life of an engine say hello again: the last one is silent or has left."""
        assert engine not in self._engines, engine
        self._former.pardon(engine)

    def _move(self, worker: Worker, event: str, peer: str = "") -> None:
        """Move a worker by its table; NIXL forgets the memory of a worker that was ATTACHED.

        A worker may be attached twice: for its engine before it fell silent, and after that.
        """
        story = f"rank {worker.hello.rank} of {worker.hello.engine}"
        if worker.is_attached and not peer:
            self._emit(DetachPeer(worker.peer))
        worker.stage = WORKER.next(worker.stage, event, story)
        assert worker.is_attached == bool(peer), story
        worker.peer = peer

    def _attach(self, engine: Engine, worker: Worker) -> bool:
        """Take a worker in; True: it replaces other memory of the same rank."""
        rank = worker.hello.rank
        assert rank < engine.hello.world_size, engine.label
        known = engine.workers.get(rank)
        if known is None:
            engine.workers[rank] = worker
            self._ask_to_attach(engine, worker)
            return False
        known.connection = worker.connection
        if known.hello == worker.hello:
            if known.is_attached:
                self._welcome(known.connection)
            return False
        known.take(worker.hello)
        self._move(known, "memory replaced")
        if known.stage is WorkerStage.ATTACHING:
            self._ask_to_attach(engine, known)
        else:
            engine.workers_changed()
        return True

    def _ask_to_attach(self, engine: Engine, worker: Worker) -> None:
        assert worker.stage is WorkerStage.ATTACHING, engine.label
        engine.workers_changed()
        self._emit(AttachPeer(engine.id, worker.hello.rank, worker.hello.agent))

    def peer_attached(self, event: PeerAttached) -> None:
        """Welcome a worker whose memory NIXL knows now, and the scheduler after the last one."""
        assert event.peer
        engine = self.get(event.engine.engine, event.engine.incarnation)
        worker = engine.workers.get(event.rank) if engine is not None else None
        if engine is None or worker is None:
            self._emit(DetachPeer(event.peer))
            return
        if worker.stage is WorkerStage.OUTDATED:
            self._emit(DetachPeer(event.peer))
            self._move(worker, "attached")
            self._ask_to_attach(engine, worker)
            return
        self._move(worker, "attached", event.peer)
        engine.workers_changed()
        self._welcome(worker.connection)
        self._welcome_if_complete(engine)

    def reattach(self, engine_id: EngineId) -> None:
        """Have NIXL learn of an engine's workers again: one of them could not be reached."""
        engine = self.get(engine_id.engine, engine_id.incarnation)
        for worker in engine.workers.values() if engine is not None else ():
            if engine is not None and worker.is_attached:
                self._move(worker, "unreachable")
                self._ask_to_attach(engine, worker)

    def peer_failed(self, event: PeerFailed) -> None:
        """Refuse a worker that NIXL has refused."""
        self._counts["refused.agent"] += 1
        engine = self.get(event.engine.engine, event.engine.incarnation)
        worker = engine.workers.get(event.rank) if engine is not None else None
        if engine is None or worker is None or worker.is_attached:
            return
        if worker.stage is WorkerStage.OUTDATED:
            self._move(worker, "refused")
            self._ask_to_attach(engine, worker)
            return
        WORKER.end(worker.stage, "refused", engine.label)
        del engine.workers[event.rank]
        engine.workers_changed()
        self._emit(ToEngine(worker.connection, refused("agent", event.reason, "agent")))

    def _welcome_if_complete(self, engine: Engine) -> None:
        if engine.scheduler is not None and engine.complete:
            engine.scheduler.welcomed = True
            self._welcome(engine.scheduler.connection)

    def _welcome(self, connection: bytes) -> None:
        announcer, arena, limits = self._announcer, self._arena, self._limits
        assert arena.unit_count, "an engine is welcomed before the arena is cut"
        welcome = Welcome(
            host=announcer.host,
            instance=announcer.source,
            epoch=announcer.epoch,
            agent=arena.info.agent,
            arena_address=arena.info.address,
            arena_path=arena.info.path,
            slot_bytes=UNIT_BYTES,
            slot_count=arena.unit_count,
            beat_ms=limits.beat_ms,
            explains=limits.explain_requests > 0,
            traces=limits.traces,
            filter=self._findable.generation,
            hints=limits.hint_pin_percent > 0,
        )
        self._emit(ToEngine(connection, welcome))

    def statistics(self, now_ms: int) -> list[WorkerStats]:
        """Return every worker of every engine."""
        return [
            WorkerStats(
                engine=engine.id.engine,
                incarnation=engine.id.incarnation,
                rank=rank,
                world_size=engine.hello.world_size,
                namespace=engine.hello.namespace,
                block_bytes=engine.block_bytes,
                seen_ms_ago=max(0, now_ms - engine.seen_ms),
                verify=worker.hello.verify,
                prefill_tokens_per_s=1e9 / engine.prefill.token_ns if engine.prefill else 0.0,
            )
            for engine in self
            for rank, worker in sorted(engine.workers.items())
        ]
