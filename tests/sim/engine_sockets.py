"""The links of an engine of the simulation: the product's own, on sockets of ours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import zmq
from kvbm_common.tier.layout import UNIT_BYTES
from kvbm_common.wire.consolidator import Attach, from_consolidator, to_consolidator
from kvbm_common.wire.local import (
    Beat,
    Bye,
    FromHostTier,
    Hello,
    Moved,
    Region,
    Welcome,
    from_host_tier,
    to_host_tier,
)
from kvbm_connectors.client.link import Link

if TYPE_CHECKING:
    from tests.sim.engine_node import EngineNode
    from tests.sim.workers import Worker

Take = Callable[[Any], None]
Send = Callable[[bytes], None]
NOTHING = zmq.Again()
"""Raised by every empty socket: libzmq is asked for its text once."""


class Socket:
    """What a Link needs of a ZMQ DEALER."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.inbox: deque[bytes] = deque()

    def send(self, data: bytes, _flags: int = 0) -> None:
        """Hand a frame to the network."""
        self._send(data)

    def recv_multipart(self, _flags: int = 0) -> list[bytes]:
        """Return the next frame that has arrived."""
        if not self.inbox:
            raise NOTHING.with_traceback(None)
        return [self.inbox.popleft()]

    def close(self, linger: int = 0) -> None:
        """Hear nothing more."""
        self.inbox.clear()


@dataclass(slots=True)
class SimLink(Link):
    """A link that opens sockets of ours."""

    connect: Callable[[SimLink], Socket] = field(kw_only=True)

    def open(self, _context: object, now_ms: int) -> None:
        """Connect to the endpoint."""
        self.opened(cast("zmq.Socket[bytes]", self.connect(self)), now_ms)

    def receive(self, now_ms: int) -> None:
        """Take everything that has arrived; most often that is nothing."""
        if cast(Socket, self.socket).inbox:
            Link.receive(self, now_ms)


class Sockets:
    """All links of one life of an engine."""

    def __init__(self, engine: EngineNode) -> None:
        self._engine = engine
        self._links: list[SimLink] = []
        self._sockets: dict[bytes, Socket] = {}
        """By connection: each socket has one of its own."""
        self._count = 0
        self._beat = Beat(engine=engine.name_alone, incarnation=engine.incarnation)
        self.bye = Bye(engine=engine.name_alone, incarnation=engine.incarnation)
        self.host_tier = self._scheduler_link()
        for worker in engine.workers:
            self._worker_link(worker)
        self.consolidator = self._consolidator_link()
        for link in self._links:
            link.open(cast(Any, None), engine.world.now_ms)

    def receive(self, connection: bytes, data: bytes) -> bool:
        """Take a frame for one of the sockets; False: it is of one that is closed."""
        socket = self._sockets.get(connection)
        if socket is None:
            return False
        socket.inbox.append(data)
        return True

    def tick(self, now_ms: int) -> None:
        """Take what has arrived; greet, beat, send, move."""
        for link in self._links:
            if link.needs_socket(now_ms):
                link.reopen(cast(Any, None), now_ms)
            link.receive(now_ms)
            link.tick(now_ms)

    def flush(self, now_ms: int) -> None:
        """Send what waits, and leave where nothing is under way."""
        for link in self._links:
            link.tick(now_ms)

    # --- links ------------------------------------------------------------------------------

    def _scheduler_link(self) -> SimLink:
        engine, hello = self._engine, self._hello(None)

        def moved(moved: Moved) -> None:
            engine.world.marks["engine moves"] += 1
            engine.core.moved(engine.world.now_ms, moved.within_ms)

        return self._enter(
            SimLink(
                name="scheduler",
                endpoint=engine.host.front.name,
                encode=to_host_tier,
                decode=from_host_tier,
                hello=lambda: hello,
                beat=self._beat,
                on_message=engine.take,
                on_down=engine.host_down,
                on_moved=moved,
                may_leave=lambda: engine.core.view.may_leave,
                bye=self.bye,
                connect=self._to_host_tier,
            )
        )

    def _worker_link(self, worker: Worker) -> None:
        hello = self._hello(worker.rank)

        def take(message: FromHostTier) -> None:
            if isinstance(message, Welcome):
                worker.welcomed(message)

        self._enter(
            SimLink(
                name=f"worker{worker.rank}",
                endpoint=self._engine.host.front.name,
                encode=to_host_tier,
                decode=from_host_tier,
                hello=lambda: hello,
                beat=self._beat,
                on_message=take,
                on_moved=lambda _: worker.leaving(),
                may_leave=lambda: not worker.loading,
                connect=self._to_host_tier,
            )
        )

    def _hello(self, rank: int | None) -> Hello:
        """Return what the scheduler half (None) or the worker half of a rank says first."""
        engine, plan = self._engine, self._engine.world.plan
        share = engine.shape[rank or 0]
        piece_bytes = engine.units * UNIT_BYTES // share.grid.count * len(share.parts)
        region = Region(
            address=4096, stride=piece_bytes, piece_bytes=piece_bytes, blocks=plan.device_blocks
        )
        return Hello(
            engine=engine.name_alone,
            incarnation=engine.incarnation,
            namespace=engine.namespace,
            group_namespaces=engine.namespaces[1:],
            role="scheduler" if rank is None else "worker",
            rank=rank or 0,
            world_size=len(engine.shape),
            agent=b"" if rank is None else b"agent",
            regions=[] if rank is None else [region],
            share=share if rank is not None and plan.cut.is_said else None,
        )

    def _consolidator_link(self) -> SimLink:
        engine = self._engine
        attach = Attach(
            engine=engine.name_alone,
            incarnation=engine.incarnation,
            endpoint="pub",
            replay_endpoint="router",
            namespace=engine.namespace,
            group_namespaces=engine.namespaces[1:],
        )
        return self._enter(
            SimLink(
                name="events",
                endpoint=engine.host.consolidator.name,
                encode=to_consolidator,
                decode=from_consolidator,
                hello=lambda: attach,
                beat=self._beat,
                on_message=engine.take,
                connect=self._to_consolidator,
            )
        )

    def _enter(self, link: SimLink) -> SimLink:
        self._links.append(link)
        return link

    # --- sockets ----------------------------------------------------------------------------

    def _to_host_tier(self, link: SimLink) -> Socket:
        engine = self._engine
        connection = self._connection(link)
        endpoint = engine.cluster.endpoint(engine.world, link.endpoint)
        return self._open(connection, partial(endpoint.send, engine.name, connection))

    def _to_consolidator(self, link: SimLink) -> Socket:
        engine = self._engine
        connection, target = self._connection(link), engine.host.consolidator

        def send(data: bytes) -> None:
            arrive = partial(target.from_engine, connection, data)
            engine.world.send(engine.name, target, arrive, parked=True)

        return self._open(connection, send)

    def _connection(self, link: SimLink) -> bytes:
        self._count += 1
        engine = self._engine
        return f"{engine.name_alone}:{engine.incarnation}:{link.name}:{self._count}".encode()

    def _open(self, connection: bytes, send: Send) -> Socket:
        """Forget the socket before it, and open one."""
        stem = connection.rpartition(b":")[0]
        for former in [one for one in self._sockets if one.rpartition(b":")[0] == stem]:
            del self._sockets[former]
        socket = self._sockets[connection] = Socket(send)
        return socket
