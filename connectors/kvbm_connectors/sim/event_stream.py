"""The engine's event stream: a ZMQ PUB with a replay ROUTER, byte for byte as vLLM's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import zmq
from kvbm_common.identity import SequenceHash
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    encode_batch,
    published_frames,
    replay_end_frames,
    replayed_frames,
    split_replay_request,
)

BUFFER_BATCHES = 10_000
"""vLLM's `buffer_steps`."""
HWM = 100_000
"""vLLM's `hwm`."""

EngineEvent = TypeVar("EngineEvent", BlockStored, BlockRemoved, AllBlocksCleared)


def engine_hash(name: SequenceHash) -> int:
    """This engine's own 64-bit hash of a block; nobody outside may read a meaning into it."""
    return int.from_bytes(name[:8], "big")


class EventStream:
    """Publishes batches of events. One thread only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, directory: str, name: str):
        self.endpoint = f"ipc://{directory}/{name}-events.sock"
        self.replay_endpoint = f"ipc://{directory}/{name}-replay.sock"
        self._publisher = context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, HWM)
        self._publisher.setsockopt(zmq.LINGER, 200)
        self._publisher.bind(self.endpoint)
        self.replay = context.socket(zmq.ROUTER)
        self.replay.setsockopt(zmq.LINGER, 0)
        self.replay.bind(self.replay_endpoint)
        self._seq = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_BATCHES)
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []

    def stored(
        self,
        names: Sequence[SequenceHash],
        *,
        parent: SequenceHash | None,
        tokens: Sequence[int],
        block_tokens: int,
        salt: str | None,
    ) -> None:
        """A run of blocks can be found; `parent` None: it begins a sequence."""
        is_salted = salt is not None and parent is None
        extra: tuple[tuple[str, ...] | None, ...] | None = None
        if is_salted:
            extra = ((str(salt),), *((None,) * (len(names) - 1)))
        self._events.append(
            BlockStored(
                block_hashes=tuple(map(engine_hash, names)),
                parent=None if parent is None else engine_hash(parent),
                token_ids=tuple(tokens),
                block_size=block_tokens,
                medium="GPU",
                extra_keys=extra,
            )
        )

    def removed(self, names: Sequence[SequenceHash]) -> None:
        """Blocks were evicted."""
        if names:
            hashes = tuple(map(engine_hash, names))
            self._events.append(BlockRemoved(block_hashes=hashes, medium="GPU"))

    def cleared(self) -> None:
        """The prefix cache was reset."""
        self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        """Publish what has been collected, as one batch."""
        if not self._events:
            return
        batch = EngineBatch(ts=time.time(), events=tuple(self._events), dp_rank=0)
        payload = encode_batch(batch)
        self._events.clear()
        self.publish(payload)

    def publish(self, payload: bytes) -> None:
        """Publish a batch that is encoded already."""
        self._publisher.send_multipart(published_frames(b"", self._seq, payload))
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
        """Close both sockets."""
        self._publisher.close()
        self.replay.close()
