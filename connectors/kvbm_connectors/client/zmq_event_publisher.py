"""A publisher of engine events: a ZMQ PUB and a replay ROUTER, byte for byte as vLLM's."""

from __future__ import annotations

from collections import deque

import zmq
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.engine_events import (
    published_frames,
    replay_end_frames,
    replayed_frames,
    split_replay_request,
)

BUFFER_BATCHES = 10_000
"""vLLM's `buffer_steps`."""
HWM = 100_000
"""vLLM's `hwm`."""
MORE = int(zmq.SNDMORE)
"""A plain number: pyzmq's own flags are enums, which are slow to combine."""


class EventPublisher:
    """Publishes batches, and keeps the last ones for those who ask again. One thread only."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], *, endpoint: str, replay_endpoint: str
    ) -> None:
        """Bind both endpoints; raises zmq.ZMQError if one cannot be bound."""
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint
        self._publisher = context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, HWM)
        self._publisher.setsockopt(zmq.LINGER, 200)
        self.replay = context.socket(zmq.ROUTER)
        self.replay.setsockopt(zmq.LINGER, 0)
        try:
            self._publisher.bind(endpoint)
            self.replay.bind(replay_endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self._seq = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_BATCHES)

    def publish(self, payload: bytes) -> None:
        """Publish a batch that is encoded already."""
        topic, seq, payload = published_frames(b"", self._seq, payload)
        self._publisher.send(topic, MORE)
        self._publisher.send(seq, MORE)
        self._publisher.send(payload)
        self._buffer.append((self._seq, payload))
        self._seq += 1

    def answer_replays(self) -> None:
        """Answer every replay request that has arrived."""
        while True:
            try:
                client, *frames = self.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                first = split_replay_request(frames)
            except WireError:
                continue
            for seq, payload in self._buffer:
                if seq >= first:
                    self.replay.send_multipart([client, *replayed_frames(b"", seq, payload)])
            self.replay.send_multipart([client, *replay_end_frames()])

    def close(self) -> None:
        """Close both of the sockets."""
        self._publisher.close()
        self.replay.close()
