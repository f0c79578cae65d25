"""An image of the index: everything it knows as of one position of the stream, as bytes.

A replica that starts takes the newest image and reads the stream from its position on. Positions
and blocks of all sources are in it; events that waited after a gap are not: their source comes
back as one that is behind, and is asked for what it holds.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple

import msgspec
from kvbm_common.errors import KvbmError
from kvbm_common.identity import HASH_BYTES, unpack_hashes
from kvbm_common.tier.follow import FollowState
from kvbm_common.wire.codec import UNREADABLE
from kvbm_common.wire.events import Natural, Tier, Token
from msgspec import Meta

IMAGE_VERSION = 1
SOURCES_MAX = 4_096
"""Sources that an index follows; no image has more."""

HolderTuple = tuple[str, str, Tier, int, int]
"""The fields of a `Holder` as a plain tuple: equal to it, and a third of the time to make."""


class ImageError(KvbmError):
    """Bytes that are no image, or one of another version."""

    code = "bad_image"


class SourceImage(msgspec.Struct, frozen=True, kw_only=True):
    """A source's position, and whether its blocks are known to match it."""

    host: Token
    source: Token
    epoch: Natural
    seq: Natural
    state: str
    """The name of a `FollowState`."""
    needs_snapshot: bool = msgspec.field(name="hollow")
    """True if less is held than the position says; stored as `hollow`."""


class SegmentImage(NamedTuple):
    """A piece of a chain: names back to back, each one's parent is the one before it."""

    parent: bytes
    """The parent of the first block."""
    blocks: bytes
    rooted: bool
    """The parent is the root of a namespace: not a block."""


class HolderImage(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of one holder."""

    host: str
    source: str
    tier: Tier
    rank: int
    group: int
    segments: Sequence[SegmentImage]

    @property
    def block_count(self) -> int:
        """Blocks of all segments."""
        return sum(len(one.blocks) for one in self.segments) // HASH_BYTES


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """All sources and holders, and which stream was read up to where."""

    stream: str
    position: int
    sources: list[SourceImage]
    holders: list[HolderImage]

    def up_to_epoch(self, most: int) -> Image:
        """Return the image without the sources that are in a later epoch, and without their blocks:
        a forged one would outlive the message that brought it."""
        assert most >= 0, f"no epoch is up to {most}"
        gone = {(one.host, one.source) for one in self.sources if one.epoch > most}
        if not gone:
            return self
        return msgspec.structs.replace(
            self,
            sources=[one for one in self.sources if (one.host, one.source) not in gone],
            holders=[one for one in self.holders if (one.host, one.source) not in gone],
        )


class _PackedHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Most blocks' parent is the block before: only those of segments are written down."""

    host: Token
    source: Token
    tier: Tier
    rank: Natural
    group: Natural
    roots: bytes
    hashes: bytes
    jumps: bytes
    """Beginnings of segments: indices, u32 little-endian."""
    jump_parents: bytes


class _PackedImage(msgspec.Struct, frozen=True, kw_only=True):
    v: int
    stream: str
    position: Natural
    sources: Annotated[list[SourceImage], Meta(max_length=SOURCES_MAX)]
    holders: list[_PackedHolder]


def pack(image: Image) -> bytes:
    """Pack an image into bytes, about 16 a block."""
    holders = [_packed(holder) for holder in image.holders]
    packed = _PackedImage(v=IMAGE_VERSION, stream=image.stream, position=image.position,
                          sources=image.sources, holders=holders)  # fmt: skip
    return msgspec.msgpack.encode(packed)


def unpack(content: bytes) -> Image:
    """Unpack an image from bytes, whatever they are; raises ImageError."""
    try:
        packed = msgspec.msgpack.decode(content, type=_PackedImage)
        if packed.v != IMAGE_VERSION:
            raise ImageError(f"version {packed.v}, this release reads {IMAGE_VERSION}")
        _require_consistent(packed)
        holders = [_unpacked(holder) for holder in packed.holders]
    except (*UNREADABLE, KvbmError, struct.error) as error:
        raise ImageError(str(error)) from error
    return Image(stream=packed.stream, position=packed.position,
                 sources=packed.sources, holders=holders)  # fmt: skip


def _packed(holder: HolderImage) -> _PackedHolder:
    segments = holder.segments
    sizes = [len(one.blocks) // HASH_BYTES for one in segments]
    jumps = [0, *accumulate(sizes)][:-1]
    assert all(sizes), "a segment without blocks has no place in an image"
    roots = {one.parent for one in segments if one.rooted}
    return _PackedHolder(
        host=holder.host, source=holder.source, tier=holder.tier, rank=holder.rank,
        group=holder.group, roots=b"".join(sorted(roots)),
        hashes=b"".join(one.blocks for one in segments),
        jumps=struct.pack(f"<{len(jumps)}I", *jumps),
        jump_parents=b"".join(one.parent for one in segments),
    )  # fmt: skip


def _require_consistent(packed: _PackedImage) -> None:
    """Raise ImageError for an image that no index has made."""
    if packed.position and not packed.stream:
        raise ImageError(f"position {packed.position} of no stream")
    states = {(one.host, one.source): one.state for one in packed.sources}
    if len(states) < len(packed.sources):
        raise ImageError("a source twice")
    for source in packed.sources:
        if source.state not in FollowState.__members__:
            raise ImageError(f"{source.source} has an unknown state")
        if source.needs_snapshot and source.state == "CURRENT":
            raise ImageError(f"{source.source} is current, and holds less than it says")
    names = {(one.host, one.source, one.tier, one.rank, one.group) for one in packed.holders}
    if len(names) < len(packed.holders):
        raise ImageError("a holder twice")
    for holder in packed.holders:
        if states.get((holder.host, holder.source), "GONE") == "GONE":
            raise ImageError(f"{holder.source} is not there, and holds blocks")


def _unpacked(packed: _PackedHolder) -> HolderImage:
    jumps = [jump for (jump,) in struct.iter_unpack("<I", packed.jumps)]
    parents, roots = unpack_hashes(packed.jump_parents), {*unpack_hashes(packed.roots)}
    count, rest = divmod(len(packed.hashes), HASH_BYTES)
    ends = [*jumps[1:], count]
    if rest or len(jumps) != len(parents) or jumps[:1] != [0]:
        raise ImageError("a holder without a first parent")
    if any(start >= end for start, end in zip(jumps, ends, strict=True)):
        raise ImageError("segments out of order")
    segments = [
        SegmentImage(parent, packed.hashes[start * HASH_BYTES : end * HASH_BYTES], parent in roots)
        for parent, start, end in zip(parents, jumps, ends, strict=True)
    ]
    assert sum(len(one.blocks) for one in segments) == len(packed.hashes), "a block is left over"
    return HolderImage(
        host=packed.host, source=packed.source, tier=packed.tier, rank=packed.rank,
        group=packed.group, segments=segments,
    )  # fmt: skip
