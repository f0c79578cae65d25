"""An engine's sockets: the product's links, one for each half of the connector, on the world."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import zmq
from kvbm_common.identity import Namespace
from kvbm_common.wire.local import (
    Attach,
    Beat,
    FromHostTier,
    Hello,
    Region,
    Welcome,
    from_consolidator,
    from_host_tier,
    to_consolidator,
    to_host_tier,
)
from kvbm_connectors.link import Link

if TYPE_CHECKING:
    from tests.sim.consolidator import Consolidator
    from tests.sim.engine import EngineNode
    from tests.sim.host_tier import HostTier

NAMESPACE = Namespace(model="sim", block_tokens=1)
BLOCK_BYTES = 4096
Take = Callable[[Any], None]


class Socket:
    """What a Link needs of a ZMQ DEALER."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self.inbox: deque[bytes] = deque()

    def send(self, data: bytes, _flags: int = 0) -> None:
        """Hand a frame to the network."""
        self._send(data)

    def recv_multipart(self, _flags: int = 0) -> list[bytes]:
        """The next frame that has arrived."""
        if not self.inbox:
            raise zmq.Again
        return [self.inbox.popleft()]


class Sockets:
    """All links of one life of an engine."""

    def __init__(self, engine: EngineNode, take: Take, down: Callable[[], None]) -> None:
        self._engine = engine
        self._links: dict[bytes, tuple[Link, Socket]] = {}
        self._beat = Beat(engine=engine.name, incarnation=engine.incarnation)
        ranks = engine.world.plan.ranks
        self.welcomed = [0] * ranks
        """The epoch of the host tier that has welcomed each worker half."""
        self.host_tier = self._to_host_tier("scheduler", None, take, down)
        for rank in range(ranks):
            take_welcome = partial(self._worker_took, rank)
            self._to_host_tier(f"worker{rank}", rank, take_welcome, lambda: None)
        self.consolidator = self._to_consolidator(take)

    def receive(self, connection: bytes, data: bytes) -> bool:
        """A frame for one of the sockets; False: of a former life, and nobody's."""
        if connection not in self._links:
            return False
        self._links[connection][1].inbox.append(data)
        return True

    def tick(self, now_ms: int) -> None:
        """Take what has arrived; greet, beat, send."""
        for link, socket in self._links.values():
            if socket.inbox:
                link.receive(now_ms)
            link.tick(now_ms)

    def flush(self, now_ms: int) -> None:
        """Send what waits."""
        for link, _ in self._links.values():
            if link.outbox:
                link.tick(now_ms)

    def _to_host_tier(
        self, name: str, rank: int | None, take: Take, down: Callable[[], None]
    ) -> Link:
        hello, target = self._hello(rank), self._engine.peers.host_tier
        link = Link(
            name=name,
            endpoint=target.name,
            encode=to_host_tier,
            decode=from_host_tier,
            hello=lambda: hello,
            beat=self._beat,
            on_message=take,
            on_down=down,
        )
        return self._enter(link, target)

    def _hello(self, rank: int | None) -> Hello:
        """What the scheduler half (None) or the worker half of a rank says first."""
        plan = self._engine.world.plan
        piece_bytes = BLOCK_BYTES // plan.ranks
        region = Region(
            address=4096, stride=piece_bytes, piece_bytes=piece_bytes, blocks=plan.device_blocks
        )
        return Hello(
            engine=self._engine.name,
            incarnation=self._engine.incarnation,
            namespace=NAMESPACE,
            role="scheduler" if rank is None else "worker",
            rank=rank or 0,
            world_size=plan.ranks,
            agent=b"" if rank is None else b"agent",
            regions=[] if rank is None else [region],
        )

    def _worker_took(self, rank: int, message: FromHostTier) -> None:
        if isinstance(message, Welcome):
            self.welcomed[rank] = message.epoch

    def _to_consolidator(self, take: Take) -> Link:
        target = self._engine.peers.consolidator
        attach = Attach(
            engine=self._engine.name,
            incarnation=self._engine.incarnation,
            endpoint="pub",
            replay_endpoint="router",
            namespace=NAMESPACE,
        )
        link = Link(
            name="events",
            endpoint=target.name,
            encode=to_consolidator,
            decode=from_consolidator,
            hello=lambda: attach,
            beat=self._beat,
            on_message=take,
        )
        return self._enter(link, target)

    def _enter(self, link: Link, target: HostTier | Consolidator) -> Link:
        """Connect a link: ZMQ keeps what is sent to a service that is down."""
        engine = self._engine
        connection = f"{engine.name}:{engine.incarnation}:{link.name}".encode()

        def send(data: bytes) -> None:
            arrive = partial(target.from_engine, connection, data)
            engine.world.send(engine.name, target, arrive, parked=True)

        socket = Socket(send)
        link.socket = cast("zmq.Socket[bytes]", socket)
        self._links[connection] = (link, socket)
        return link
