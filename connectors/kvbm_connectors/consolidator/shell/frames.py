"""Frames: what comes out of engines' sockets, taken apart. Each becomes a batch, or is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvbm_common.copying.naming import NAMING
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.compact_batches import decode_compact
from kvbm_common.wire.engine_events import (
    EngineBatch,
    EngineFrame,
    split_published,
    split_replayed,
)

Message = list[bytes]
"""The frames of one ZMQ message."""
Drop = Callable[[str, str], None]
"""Counts a message that is not used: the reason, and what to say of it in the log."""


class Replayed(NamedTuple):
    """A part of a replay."""

    batches: tuple[tuple[int, EngineBatch], ...]
    ended: bool


class FrameReader:
    """Reads the messages of one stream."""

    def __init__(self, name: str, topic: bytes, drop: Drop) -> None:
        self._name = name
        self._topic = topic
        self._drop = drop

    def published(self, messages: Sequence[Message]) -> tuple[tuple[int, EngineBatch], ...]:
        """Decode messages of the engine's PUB; a subscription is to a prefix, so longer topics are
        dropped."""
        batches: list[tuple[int, EngineBatch]] = []
        for message in messages:
            frame = self._split(split_published, message)
            if frame is None:
                continue
            if self._topic and frame.topic != self._topic:
                self._drop("other_topic", f"{self._name}: {frame.topic[:64]!r}")
            elif frame.is_end:
                self._drop("malformed", f"{self._name}: the end of a replay outside of one")
            else:
                self._decode(frame, batches)
        return tuple(batches)

    def replayed(self, messages: Sequence[Message]) -> Replayed:
        """Decode messages of the engine's replay ROUTER. What comes after the end is ignored."""
        batches: list[tuple[int, EngineBatch]] = []
        ended = False
        for message in messages:
            frame = self._split(split_replayed, message)
            if frame is None:
                continue
            if ended:
                self._drop("behind_the_end", f"{self._name}: seq {frame.seq}")
            elif frame.is_end:
                ended = True
            else:
                self._decode(frame, batches)
        return Replayed(tuple(batches), ended)

    def _split(
        self, split: Callable[[Sequence[bytes]], EngineFrame], message: Message
    ) -> EngineFrame | None:
        try:
            return split(message)
        except WireError as error:
            self._drop(error.kind, f"{self._name}: {error}")
            return None

    def _decode(self, frame: EngineFrame, batches: list[tuple[int, EngineBatch]]) -> None:
        """Decode a frame into `batches`. What cannot be decoded leaves a gap, which the core
        repairs."""
        try:
            batches.append((frame.seq, decode_compact(frame.payload, NAMING.read_tokens)))
        except WireError as error:
            self._drop(error.kind, f"{self._name} seq {frame.seq}: {error}")
