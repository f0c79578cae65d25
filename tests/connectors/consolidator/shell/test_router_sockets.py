"""The ports for routers: what happens where one of a rank's two cannot be opened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from kvbm_common.access.curve import write_keys
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import free_port
from kvbm_connectors.consolidator.core.messages import RouterAsked, RouterJoined
from kvbm_connectors.consolidator.shell import router_sockets as module
from kvbm_connectors.consolidator.shell.router_sockets import (
    RANKS_MAX,
    RouterPortTaken,
    RouterSockets,
    endpoint_of,
)

from tests.waiting import ask_until

DEADLINE_S = 5.0
SOON_S = 1.0


class Ports:
    """Router sockets on free ports, and who has come to them."""

    def __init__(self, tasks: asyncio.TaskGroup, curve_file: Path | None = None) -> None:
        self.events = f"tcp://127.0.0.1:{free_port(also_above=1)}"
        self.replays = f"tcp://127.0.0.1:{free_port(also_above=1)}"
        self.asked: asyncio.Queue[RouterAsked | RouterJoined] = asyncio.Queue()
        self.sockets = RouterSockets(
            self.events, self.replays, tasks=tasks, counters=Metrics(), asked=self.asked.put,
            curve_file=curve_file,
        )  # fmt: skip

    async def is_heard(self, context: zmq.asyncio.Context, rank: int) -> bool:
        """Tell whether a reader of a rank gets as far as to subscribe."""
        reader = context.socket(zmq.SUB)
        reader.connect(endpoint_of(self.events, rank))
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            async with asyncio.timeout(SOON_S):
                return await self.asked.get() == RouterJoined(rank, b"")
        finally:
            reader.close(linger=0)


@asynccontextmanager
async def open_ports(curve_file: Path | None = None) -> AsyncIterator[Ports]:
    """Ports that end with the block, in time."""
    async with asyncio.timeout(4 * DEADLINE_S), asyncio.TaskGroup() as tasks:
        ports = Ports(tasks, curve_file)
        yield ports
        ports.sockets.close()
    ports.sockets.term()


@asynccontextmanager
async def taken(context: zmq.asyncio.Context, endpoint: str) -> AsyncIterator[None]:
    """Another program that listens on an endpoint, as soon as it is free."""
    with context.socket(zmq.ROUTER) as other:

        async def is_bound() -> bool:
            other.bind(endpoint)
            return True

        await ask_until(is_bound, deadline_s=DEADLINE_S, despite=zmq.ZMQError)
        yield


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    """The context of readers and of another program."""
    made: zmq.asyncio.Context = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


async def test_a_rank_whose_replay_port_is_taken_is_shut_whole(
    context: zmq.asyncio.Context,
) -> None:
    """Goal: no port is half open, and the stop ends by itself.

    Method: another program has the replay port of rank 1; it can have the other one, too.
    """
    async with open_ports() as ports, taken(context, endpoint_of(ports.replays, 1)):
        ports.sockets.open(0)
        ports.sockets.serve([0, 1])
        async with taken(context, endpoint_of(ports.events, 1)):
            assert await ports.is_heard(context, 0)


@pytest.mark.slow
async def test_a_port_that_failed_is_tried_again(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a rank is heard once its port is free."""
    monkeypatch.setattr(module, "SHUT_S", 0.0)
    async with open_ports() as ports:
        async with taken(context, endpoint_of(ports.replays, 1)):
            ports.sockets.serve([1])

        async def is_heard() -> bool:
            ports.sockets.serve([1])
            return await ports.is_heard(context, 1)

        await ask_until(is_heard, deadline_s=DEADLINE_S, despite=TimeoutError)


async def test_keys_that_cannot_be_read_shut_a_rank_and_nothing_else(tmp_path: Path) -> None:
    """Goal: a file that is away for a moment ends neither the consolidator nor its stop."""
    server_file, _ = write_keys(tmp_path)
    async with open_ports(server_file) as ports:
        ports.sockets.open(0)
        server_file.unlink()
        ports.sockets.serve([0, 1])


async def test_ranks_that_failed_take_no_places(context: zmq.asyncio.Context) -> None:
    """Goal: ranks beyond the last port number leave the ports to ranks that can be served."""
    async with open_ports() as ports:
        ports.sockets.serve(range(70_000, 70_000 + RANKS_MAX))
        ports.sockets.serve([0])
        assert await ports.is_heard(context, 0)


async def test_a_first_rank_that_cannot_be_served_is_an_error(context: zmq.asyncio.Context) -> None:
    """Goal: a service whose own ports are taken says so at its start, and ends."""
    async with open_ports() as ports, taken(context, endpoint_of(ports.replays, 0)):
        with pytest.raises(RouterPortTaken, match="KVBM_ROUTER_REPLAY_ENDPOINT"):
            ports.sockets.open(0)


@pytest.mark.parametrize("rank", [0, 1])
async def test_no_file_of_a_socket_stays(tmp_path: Path, rank: int) -> None:
    """Goal: the directory can be removed after a stop; what a newer process has bound stays.

    Method: an open fails for a rank, too: its other port's file goes at once.
    """
    events, replays = f"ipc://{tmp_path}/router.sock", f"ipc://{tmp_path}/away/replay.sock"
    (tmp_path / "away").mkdir()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        sockets, newer = (
            RouterSockets(events, replays, tasks=tasks, counters=Metrics(), asked=_hear)
            for _ in range(2)
        )
        sockets.open(rank)
        (tmp_path / "away").rename(tmp_path / "kept")
        with pytest.raises(RouterPortTaken):
            sockets.open(2)
        assert endpoint_of(events, 2) not in files_in(tmp_path)
        (tmp_path / "kept").rename(tmp_path / "away")
        newer.open(rank)
        sockets.close()
        assert len(files_in(tmp_path)) == 2, "they are the newer ones"
        newer.close()
    assert files_in(tmp_path) == []
    sockets.term()
    newer.term()


def files_in(directory: Path) -> list[str]:
    """Return the endpoints of the sockets below a directory."""
    return [f"ipc://{path}" for path in directory.rglob("*.sock*")]


async def _hear(_message: RouterAsked | RouterJoined) -> None:
    """Take what a reader asks."""
