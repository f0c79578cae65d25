"""An image of the index: everything it knows as of one position of the stream, as bytes.

A replica that starts takes the newest image and reads the stream from its position on. Positions
and blocks of all sources are in it; events that waited behind a hole are not: their source comes
back as one that is behind, and is asked for what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from kvbm_common.errors import KvbmError
from kvbm_common.identity import HASH_BYTES, SequenceHash, pack_hashes, unpack_hashes
from kvbm_common.wire.events import Tier

IMAGE_VERSION = 1


class ImageError(KvbmError):
    """Bytes that are no image, or one of another version."""

    code = "bad_image"


class SourceImage(msgspec.Struct, frozen=True, kw_only=True):
    """A source's position, and whether what is held is what it says."""

    host: str
    source: str
    epoch: int
    seq: int
    state: str
    hollow: bool


class HolderImage(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of one holder, in the order in which they came, and the parent of each."""

    host: str
    source: str
    tier: Tier
    rank: int
    group: int
    roots: Sequence[SequenceHash]
    hashes: Sequence[SequenceHash]
    parents: Sequence[SequenceHash]


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """All sources and holders, and which stream was read up to where."""

    stream: str
    position: int
    sources: list[SourceImage]
    holders: list[HolderImage]


class _PackedHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Most blocks' parent is the block before: only the others are written down."""

    host: str
    source: str
    tier: Tier
    rank: int
    group: int
    roots: bytes
    hashes: bytes
    jumps: bytes
    """Indices of blocks with another parent, u32 little-endian."""
    jump_parents: bytes


class _PackedImage(msgspec.Struct, frozen=True, kw_only=True):
    v: int
    stream: str
    position: int
    sources: list[SourceImage]
    holders: list[_PackedHolder]


def pack(image: Image) -> bytes:
    """The bytes of an image, about 16 a block. Takes about 0.2 s for a million: use a thread."""
    holders = [_packed(holder) for holder in image.holders]
    packed = _PackedImage(v=IMAGE_VERSION, stream=image.stream, position=image.position,
                          sources=image.sources, holders=holders)  # fmt: skip
    return msgspec.msgpack.encode(packed)


def unpack(content: bytes) -> Image:
    """The image of some bytes; raises ImageError."""
    try:
        packed = msgspec.msgpack.decode(content, type=_PackedImage)
        if packed.v != IMAGE_VERSION:
            raise ImageError(f"version {packed.v}, this release reads {IMAGE_VERSION}")
        holders = [_unpacked(holder) for holder in packed.holders]
    except (msgspec.MsgspecError, KvbmError, ValueError, IndexError) as error:
        raise ImageError(str(error)) from error
    return Image(stream=packed.stream, position=packed.position,
                 sources=packed.sources, holders=holders)  # fmt: skip


def _packed(holder: HolderImage) -> _PackedHolder:
    hashes, parents = pack_hashes(holder.hashes), pack_hashes(holder.parents)
    names = np.frombuffer(hashes, dtype="V16")
    above = np.frombuffer(parents, dtype="V16")
    follows = np.zeros(len(names), dtype=bool)
    follows[1:] = names[:-1] == above[1:]
    jumps = np.flatnonzero(~follows)
    return _PackedHolder(
        host=holder.host, source=holder.source, tier=holder.tier, rank=holder.rank,
        group=holder.group, roots=pack_hashes(sorted(holder.roots)), hashes=hashes,
        jumps=jumps.astype("<u4").tobytes(), jump_parents=above[jumps].tobytes(),
    )  # fmt: skip


def _unpacked(packed: _PackedHolder) -> HolderImage:
    hashes = unpack_hashes(packed.hashes)
    jumps = np.frombuffer(packed.jumps, dtype="<u4").tolist()
    heads = unpack_hashes(packed.jump_parents)
    if not hashes or not jumps or jumps[0] != 0 or len(jumps) != len(heads):
        raise ImageError("a holder without a first parent")
    parents = [SequenceHash(bytes(HASH_BYTES)), *hashes[:-1]]
    for at, parent in zip(jumps, heads, strict=True):
        parents[at] = parent
    return HolderImage(
        host=packed.host, source=packed.source, tier=packed.tier, rank=packed.rank,
        group=packed.group, roots=unpack_hashes(packed.roots), hashes=hashes, parents=parents,
    )  # fmt: skip
