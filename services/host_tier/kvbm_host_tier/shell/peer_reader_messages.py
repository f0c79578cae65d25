"""Messages between the host tier and its peer reader: msgpack frames over two pipes."""

from __future__ import annotations

import asyncio
import struct
from typing import BinaryIO

import msgspec

FRAME_BYTES_MAX = 4 * 1024 * 1024
"""Metadata of an agent has a few hundred bytes, a read some thousand."""
_LENGTH = struct.Struct("<I")


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower, array_like=True):
    pass


class AddPeer(_Message, frozen=True):
    """Learn where a peer's memory is; ends in Added or Failed."""

    id: int
    agent: bytes


class RemovePeer(_Message, frozen=True):
    """Forget a peer; there is no answer."""

    name: str


class ExpectPeer(_Message, frozen=True):
    """Stand ready: a peer adds this agent now. There is no answer."""


class Read(_Message, frozen=True):
    """Read blocks of a peer into the arena and sum them up; ends in Arrived or Failed.

    `sources` are addresses at the peer, `offsets` places in the arena, all of `block_bytes` bytes
    cut into parts by the grid of the code `parts`.
    """

    id: int
    peer: str
    sources: list[int]
    offsets: list[int]
    block_bytes: int
    deadline_ms: int
    parts: int


class Opened(_Message, frozen=True):
    """The arena is mapped at `address`, and a holder of `agent` may read it."""

    agent: bytes
    address: int


class Added(_Message, frozen=True):
    """The peer is known by this name."""

    id: int
    name: str


class Arrived(_Message, frozen=True):
    """The blocks are in the arena; the packed checksums of each one's parts, and how long it
    took."""

    id: int
    sums: list[bytes]
    seconds: float


class Failed(_Message, frozen=True):
    """Unless `settled`, late bytes may still land; Settled says when none can any more."""

    id: int
    code: str
    settled: bool


class Settled(_Message, frozen=True):
    """A failed read has come to its end."""

    id: int


ToReader = AddPeer | RemovePeer | ExpectPeer | Read
FromReader = Opened | Added | Arrived | Failed | Settled
_to_reader: msgspec.msgpack.Decoder[ToReader] = msgspec.msgpack.Decoder(ToReader)
_from_reader: msgspec.msgpack.Decoder[FromReader] = msgspec.msgpack.Decoder(FromReader)


def frame(message: ToReader | FromReader) -> bytes:
    """Encode a message as it goes into a pipe."""
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def read_frame(pipe: BinaryIO) -> ToReader | None:
    """Read the next message of the host tier; None: it has closed the pipe."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(head)[0]
    assert size <= FRAME_BYTES_MAX, size
    payload = pipe.read(size)
    return _to_reader.decode(payload) if len(payload) == size else None


async def receive_frame(pipe: asyncio.StreamReader) -> FromReader | None:
    """Receive the next message of the peer reader; None: it has ended."""
    try:
        size = _LENGTH.unpack(await pipe.readexactly(_LENGTH.size))[0]
        assert size <= FRAME_BYTES_MAX, size
        return _from_reader.decode(await pipe.readexactly(size))
    except asyncio.IncompleteReadError:
        return None
