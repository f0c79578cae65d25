"""Snapshot of a lower tier: hashes back to back take a fifth of the memory of their JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvbm_common.identity import HASH_BYTES, SequenceHash, packed_from_hex, unpack_hashes
from kvbm_common.wire.verbs import SnapshotReply


@dataclass(frozen=True, slots=True)
class AlikeBlocks:
    """Blocks of one namespace and size."""

    namespace: bytes
    block_bytes: int
    """0: that was not said."""
    packed: bytes

    def pieces(self, blocks_max: int) -> Iterator[list[SequenceHash]]:
        """Yield the blocks, at most so many at a time."""
        assert blocks_max > 0, f"pieces of {blocks_max} blocks"
        size = blocks_max * HASH_BYTES
        for start in range(0, len(self.packed), size):
            yield unpack_hashes(self.packed[start : start + size])


@dataclass(frozen=True, slots=True)
class LowerSnapshot:
    """All blocks of an instance, as of one of its events."""

    epoch: int
    seq: int
    parts: tuple[AlikeBlocks, ...]

    @classmethod
    def of(cls, page: SnapshotReply, before: LowerSnapshot | None = None) -> LowerSnapshot:
        """Add a page to the pages `before` it; raises IdentityError where a hash is bad."""
        parts = () if before is None else before.parts
        assert before is None or (page.epoch, page.seq) == (before.epoch, before.seq), page.seq
        return cls(page.epoch, page.seq, (*parts, *_alike_of(page)))


def _alike_of(page: SnapshotReply) -> Iterator[AlikeBlocks]:
    for part in page.parts:
        # All at once: a run may have one block, and a page tens of thousands of runs.
        packed = packed_from_hex([text for run in part.runs for text in run.hashes])
        assert len(packed) % HASH_BYTES == 0, f"{len(packed)} bytes of names"
        yield AlikeBlocks(bytes.fromhex(part.namespace), part.block_bytes, packed)
