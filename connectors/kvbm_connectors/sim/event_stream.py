"""The sim engine's event stream: what it has stored and removed, published as vLLM does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import zmq
from kvbm_common.identity import SequenceHash
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    encode_batch,
)

from kvbm_connectors.client.zmq_event_publisher import EventPublisher

EngineEvent = TypeVar("EngineEvent", BlockStored, BlockRemoved, AllBlocksCleared)


def engine_hash(name: SequenceHash) -> int:
    """Return this engine's own 64-bit hash of a block; it has no meaning outside."""
    return int.from_bytes(name[:8], "big")


class EventStream(EventPublisher):
    """Collects events, and publishes them in batches. One thread only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, directory: str, name: str):
        super().__init__(
            context,
            endpoint=f"ipc://{directory}/{name}-events.sock",
            replay_endpoint=f"ipc://{directory}/{name}-replay.sock",
        )
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
        """Add the event that a run of blocks can be found; with `parent` None, the run begins a
        sequence."""
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
        """Publish that blocks were evicted."""
        if names:
            hashes = tuple(map(engine_hash, names))
            self._events.append(BlockRemoved(block_hashes=hashes, medium="GPU"))

    def cleared(self) -> None:
        """Add the event that the prefix cache was reset."""
        self._events.append(AllBlocksCleared())

    def close(self) -> None:
        """Close both of the sockets and remove their files, which ZMQ leaves."""
        super().close()
        for endpoint in (self.endpoint, self.replay_endpoint):
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def flush(self) -> None:
        """Publish what has been collected, as one batch."""
        if not self._events:
            return
        batch = EngineBatch(ts=time.time(), events=tuple(self._events), dp_rank=0)
        payload = encode_batch(batch)
        self._events.clear()
        self.publish(payload)
