"""Streams: the ZMQ sockets on which engines publish their events, and are asked for them again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio
from kvbm_common.errors import KvbmError
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.codec import MESSAGE_BYTES_MAX
from kvbm_common.wire.engine_events import replay_request

from kvbm_connectors.consolidator.core.messages import (
    EngineBatchesReceived,
    Input,
    ReplayDone,
    ReplayFailed,
    RequestReplay,
    StreamKey,
    Subscribe,
)
from kvbm_connectors.consolidator.shell.frames import FrameReader

STREAM_HWM = 100_000
"""Messages that wait in a socket, as in vLLM: a slow reader loses the rest and sees a gap. In a
replay it must hold the engine's whole buffer, because a ROUTER drops what does not fit."""
REPLAY_DEADLINE_S = 60.0
"""A buffer of 10,000 batches takes a second."""
BURST_MAX = 256
"""Messages taken at one wake-up and announced together: under load, batches grow by themselves."""
REPLAY_SILENCE_S = 2.0
"""vLLM answers a replay within 0.1 s; one that says nothing for so long has failed."""
ENDPOINT = re.compile(r"ipc://\S+|tcp://[^\s*]+:\d+")

Take = Callable[[Input], Awaitable[None]]
"""Hands an input to the core, waiting for room."""


class BadEndpoint(KvbmError):
    """An endpoint that cannot be connected to."""

    code = "bad_endpoint"

    def __init__(self, endpoint: str, field: str) -> None:
        super().__init__(f"{endpoint!r} is no ipc://PATH or tcp://ADDRESS:PORT to connect to")
        self.field = field


def check_endpoint(endpoint: str, field: str) -> None:
    """Raise BadEndpoint unless ZMQ can connect to this endpoint."""
    if not ENDPOINT.fullmatch(endpoint):
        raise BadEndpoint(endpoint, field)


class Streams:
    """One reader per followed stream. Tasks run in the group that is given."""

    def __init__(self, tasks: asyncio.TaskGroup, counters: Metrics, take: Take) -> None:
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._tasks = tasks
        self._take = take
        self._readers: dict[StreamKey, asyncio.Task[None]] = {}
        self._log = OncePerKind(logging.getLogger(__name__))
        self._dropped = counters.counter(
            "kvbm_consolidator_frames_dropped_total",
            "Frames of engines that could not be read.",
            labels=("reason",),
        )

    def follow(self, effect: Subscribe) -> None:
        """Begin to read an engine's PUB. It need not be there yet."""
        assert effect.key not in self._readers, f"{effect.key} is followed already"
        reader = self._read(effect.key, effect.endpoint, effect.topic.encode())
        self._readers[effect.key] = self._tasks.create_task(reader, name=f"stream {effect.key}")

    def unfollow(self, key: StreamKey) -> None:
        """Stop reading a stream."""
        self._readers.pop(key).cancel()

    def close(self) -> None:
        """Stop reading all. The sockets close with their tasks; then `term` may be called."""
        for reader in self._readers.values():
            reader.cancel()
        self._readers.clear()

    def term(self) -> None:
        """End the ZMQ context, once all tasks are over."""
        self._context.term()

    async def replay(self, effect: RequestReplay) -> None:
        """Ask an engine for its buffer and hand it over in order, the outcome last."""
        key, number = effect.key, effect.replay
        socket = self._socket(zmq.DEALER)
        try:
            async with asyncio.timeout(REPLAY_DEADLINE_S):
                socket.connect(effect.endpoint)
                await socket.send_multipart(replay_request(effect.from_seq))
                reader = FrameReader(str(key), b"", self._drop)
                while not await self._take_replayed(socket, reader, key, number):
                    pass
            await self._take(ReplayDone(key, number))
        except (TimeoutError, zmq.ZMQError):
            await self._take(ReplayFailed(key, number))
        finally:
            socket.close()

    async def _take_replayed(
        self, socket: zmq.asyncio.Socket, reader: FrameReader, key: StreamKey, number: int
    ) -> bool:
        """Hand over what has come of a replay; returns whether that was the end of it."""
        async with asyncio.timeout(REPLAY_SILENCE_S):
            first = await socket.recv_multipart()
        batches, ended = reader.replayed(_burst(socket, first))
        if batches:
            await self._take(EngineBatchesReceived(key, batches, number))
        return ended

    async def _read(self, key: StreamKey, endpoint: str, topic: bytes) -> None:
        socket = self._socket(zmq.SUB)
        reader = FrameReader(str(key), topic, self._drop)
        try:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
            socket.connect(endpoint)
            while True:
                first = await socket.recv_multipart()
                batches = reader.published(_burst(socket, first))
                if batches:
                    await self._take(EngineBatchesReceived(key, batches))
                await asyncio.sleep(0)
        except zmq.ZMQError as error:
            self._drop("socket", f"{key}: {endpoint}: {error}")
        finally:
            socket.close()

    def _drop(self, kind: str, text: str) -> None:
        self._dropped.labels(reason=kind).inc()
        self._log.warning(kind, text)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, STREAM_HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        return socket


def _burst(socket: zmq.asyncio.Socket, first: list[bytes]) -> list[list[bytes]]:
    """Return the message that has come, and those that are there already after it."""
    messages = [first]
    # Without asyncio: its future per message costs more than all that follows.
    there: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
    with contextlib.suppress(zmq.Again):
        while len(messages) < BURST_MAX:
            messages.append(_message(there))
    return messages


def _message(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Receive as `recv_multipart` does without waiting, in half its time: a frame knows whether
    more follow."""
    frames: list[bytes] = []
    more = True
    while more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        frames.append(frame.bytes)
        more = frame.more
    return frames
