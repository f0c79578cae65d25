"""The engines' socket: every message arrives, however reads and sends follow each other."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import zmq
from kvbm_common.runtime.loop import BURST_MS, CoreLoop
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.local import Alive, Beat, Refused, ToHostTier, from_host_tier, to_host_tier
from kvbm_host_tier.shell.engine_socket import TURN_MAX, TURN_NS, EngineSocket, is_deserted

from tests.waiting import wait_until

BEAT = to_host_tier.encode(Beat(engine="ada", incarnation=f"{1:016x}"))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    """An engine's socket, connected to the one that `listening` opens."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"ipc://{tmp_path}/engines.sock")
    yield socket
    socket.close(linger=0)
    context.term()


@asynccontextmanager
async def listening(
    tmp_path: Path, on_message: Callable[[EngineSocket, bytes, ToHostTier], bool]
) -> AsyncIterator[asyncio.Task[None]]:
    """A host tier's end of the sockets."""
    async with EngineSocket(f"ipc://{tmp_path}/engines.sock", Metrics()) as engines:

        def heard(connection: bytes, message: ToHostTier) -> bool:
            return on_message(engines, connection, message)

        task = asyncio.create_task(engines.run(heard))
        yield task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_all_messages_of_a_flood_arrive(tmp_path: Path, engine: zmq.Socket[bytes]) -> None:
    """More than one turn takes, each answered while others arrive: none is left in the socket."""
    count, heard = 20 * TURN_MAX, list[ToHostTier]()

    def answer(engines: EngineSocket, connection: bytes, message: ToHostTier) -> bool:
        heard.append(message)
        engines.send(connection, Alive(epoch=7))
        return True

    async with listening(tmp_path, answer):
        for _ in range(count):
            engine.send(BEAT)
        await wait_until(lambda: len(heard) == count)


async def test_message_that_arrives_during_a_send_is_read(
    tmp_path: Path, engine: zmq.Socket[bytes]
) -> None:
    """ZMQ tells of a message once. A send outside of a read may be what it tells."""
    connections, heard = list[bytes](), list[ToHostTier]()

    def hear(_: EngineSocket, connection: bytes, message: ToHostTier) -> bool:
        connections.append(connection)
        heard.append(message)
        return True

    async with EngineSocket(f"ipc://{tmp_path}/engines.sock", Metrics()) as engines:
        running = asyncio.create_task(
            engines.run(lambda connection, message: hear(engines, connection, message))
        )
        engine.send(BEAT)
        await wait_until(lambda: bool(heard))
        for number in range(200):
            engine.send(BEAT)
            await asyncio.to_thread(engine.poll, 0)  # A turn in which ZMQ moves the message.
            engines.send(connections[0], Alive(epoch=number))
            await wait_until(lambda wanted=number + 2: len(heard) == wanted)  # type: ignore[misc]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_malformed_message_is_refused(tmp_path: Path, engine: zmq.Socket[bytes]) -> None:
    """What follows it is read as before."""
    heard = list[ToHostTier]()

    def hear(_: EngineSocket, _connection: bytes, message: ToHostTier) -> bool:
        heard.append(message)
        return True

    async with listening(tmp_path, hear):
        engine.send(b"nonsense")
        engine.send_multipart([BEAT, BEAT])
        engine.send(BEAT)
        await wait_until(lambda: len(heard) == 1)
        for _ in range(2):
            refused = from_host_tier.decode(await asyncio.to_thread(engine.recv))
            assert isinstance(refused, Refused)


# --- turns of the event loop --------------------------------------------------------------------


class Turns:
    """A count of the event loop's turns, and of what happened in each."""

    def __init__(self) -> None:
        self.reads, self.steps = Counter[int](), Counter[int]()
        self._number = 0

    async def count(self) -> None:
        """Begin a turn again and again, until cancelled."""
        while True:
            self._number += 1
            await asyncio.sleep(0)

    def read(self) -> None:
        """Count a read, after its messages."""
        self.reads[self._number] += 1

    def step(self) -> None:
        """Count a message, or a step of the core."""
        self.steps[self._number] += 1


@asynccontextmanager
async def counting(
    engines: EngineSocket, on_message: Callable[[bytes, ToHostTier], bool],
    on_turn: Callable[[], None], turns: Turns,
) -> AsyncIterator[None]:  # fmt: skip
    """Read while the turns are counted."""

    def count_turn() -> None:
        turns.read()
        on_turn()

    tasks = [
        asyncio.create_task(turns.count()),
        asyncio.create_task(engines.run(on_message, on_turn=count_turn)),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def ask_again(endpoint: str, engines: int, ended: threading.Event) -> None:
    """Be engines that each send the next message as soon as the last one is answered."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = zmq.Poller()
    sockets = [context.socket(zmq.DEALER) for _ in range(engines)]
    for asking in sockets:
        asking.connect(endpoint)
        asking.send(BEAT)
        poller.register(asking, zmq.POLLIN)
    while not ended.is_set():
        for answered, _ in poller.poll(10):
            answered.recv()
            answered.send(BEAT)
    context.destroy(linger=0)


class Burning:
    """A core whose steps take processor time, and answer."""

    STEP_NS = 200_000

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def step(self, event: bytes, _now_ms: int, /) -> list[bytes]:
        """Take a message of a connection, and answer it."""
        until_ns = time.thread_time_ns() + self.STEP_NS
        while time.thread_time_ns() < until_ns:
            pass
        self._turns.step()
        return [event]


@pytest.mark.parametrize("count", [4, 16])
async def test_engines_that_ask_again_at_once_leave_turns_to_others(
    tmp_path: Path, count: int
) -> None:
    """Goal: the work in one turn of the event loop is bounded, and so the wait of everything else.

    1. Engines in a closed loop, in another thread. 2. Each answer finds the next message there. The
    bound: a burst of `run` and of two reads, each with its last step.
    """
    turns, ended, answers = Turns(), threading.Event(), 500
    async with EngineSocket(f"ipc://{tmp_path}/engines.sock", Metrics()) as engines:

        def answer(connection: bytes) -> None:
            if turns.steps.total() < answers:  # Else none asks again: a failure ends, too.
                engines.send(connection, Alive(epoch=7))

        loop = CoreLoop[bytes, bytes](Burning(turns), answer, inbox_size=4_096)
        running = asyncio.create_task(loop.run())
        asking = asyncio.to_thread(ask_again, engines.endpoint, count, ended)
        asked = asyncio.create_task(asking)

        def hear(connection: bytes, _: ToHostTier) -> bool:
            return loop.hand_in(connection, lane=connection)

        async with counting(engines, hear, loop.turn_nowait, turns):
            await wait_until(lambda: turns.steps.total() >= answers, deadline_s=30)
        ended.set()
        running.cancel()
        await asyncio.gather(asked, running, return_exceptions=True)
    in_burst = BURST_MS * 1_000_000 // Burning.STEP_NS + 1
    assert max(turns.reads.values()) <= 2
    assert max(turns.steps.values()) <= 3 * in_burst


async def test_malformed_messages_leave_turns_to_others(tmp_path: Path) -> None:
    """Goal: refusals are answers, too: many of them are no more reads of the socket."""
    turns, (senders, each) = Turns(), (64, 32)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    counters = Metrics()
    async with EngineSocket(f"ipc://{tmp_path}/engines.sock", counters) as engines:
        sockets = [context.socket(zmq.DEALER) for _ in range(senders)]
        for sender in sockets:
            sender.connect(engines.endpoint)
            for _ in range(each):
                sender.send(b"nonsense")

        def refused() -> float:
            return counters.value("kvbm_local_messages_dropped_total", reason="malformed")

        async with counting(engines, lambda *_: True, lambda: None, turns):
            await wait_until(lambda: refused() == senders * each, deadline_s=30)
    context.destroy(linger=0)
    assert max(turns.reads.values()) <= 2


async def test_messages_that_take_long_leave_turns_to_others(
    tmp_path: Path, engine: zmq.Socket[bytes]
) -> None:
    """Goal: a read ends by time, too: a message may be as large as an offer of many blocks."""
    turns, count = Turns(), 20

    def hear(_connection: bytes, _: ToHostTier) -> bool:
        until_ns = time.monotonic_ns() + TURN_NS
        while time.monotonic_ns() < until_ns:
            pass
        turns.step()
        return True

    async with EngineSocket(f"ipc://{tmp_path}/engines.sock", Metrics()) as engines:
        for _ in range(count):
            engine.send(BEAT)
        async with counting(engines, hear, lambda: None, turns):
            await wait_until(lambda: turns.steps.total() == count)
    assert max(turns.steps.values()) <= 2


async def test_fault_after_a_message_ends_the_run(
    tmp_path: Path, engine: zmq.Socket[bytes]
) -> None:
    """A broken invariant of the core ends the service: it must not be lost in the event loop."""

    def fail(_: EngineSocket, _connection: bytes, _message: ToHostTier) -> bool:
        raise AssertionError("the core is at fault")

    async with listening(tmp_path, fail) as task:
        engine.send(BEAT)
        await wait_until(task.done)
        assert isinstance(task.exception(), AssertionError)


async def test_a_bind_that_fails_leaves_the_front_to_be_taken_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left for a moment. The lock is given back, for us or another one."""
    endpoint = f"ipc://{tmp_path}/engines.sock"
    async with AsyncExitStack() as stack:
        async with EngineSocket(endpoint, Metrics()):
            second = EngineSocket(endpoint, Metrics(), instance="1")
            await stack.enter_async_context(second)
            assert not second.take_front()
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Socket, "bind", no_descriptor)
            with pytest.raises(OSError, match="Too many open files"):
                second.take_front()
        assert second.listens_at == second.own
        assert second.take_front()
        assert second.listens_at == endpoint


def test_a_sibling_is_not_deserted_for_want_of_a_descriptor_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"ipc://{tmp_path}/none.sock"
    assert is_deserted(endpoint)
    monkeypatch.setattr(socket, "socket", no_descriptor)
    assert not is_deserted(endpoint)


def no_descriptor(*_: object) -> None:
    """Fail as a process does that has all the files open that it may have."""
    raise OSError(errno.EMFILE, "Too many open files")


async def test_a_stop_leaves_no_file(tmp_path: Path) -> None:
    """Neither a socket nor the lock of the front, which a sibling takes afterwards."""
    endpoint = f"ipc://{tmp_path}/engines.sock"
    async with EngineSocket(endpoint, Metrics(), instance="1") as sibling:
        async with EngineSocket(endpoint, Metrics(), instance="2") as second:
            assert second.listens_at != endpoint
        assert sibling.listens_at == endpoint
        assert (tmp_path / "engines.sock.lock").exists()
    assert os.listdir(tmp_path) == []
