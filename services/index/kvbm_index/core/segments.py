"""Segments: stretches of a chain, names back to back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvbm_common.identity import HASH_BYTES


class Segment:
    """A stretch of consecutive blocks: `blocks` has their names back to back."""

    __slots__ = ("blocks", "indexed", "parent", "rooted")

    def __init__(self, parent: bytes, blocks: bytes | bytearray, *, rooted: bool) -> None:
        assert blocks, f"a segment without blocks after {parent.hex()}"
        assert not len(blocks) % HASH_BYTES, f"{len(blocks)} bytes of names"
        self.parent = parent
        self.blocks = bytearray(blocks)
        self.rooted = rooted
        """The parent is the root of a namespace, which is no block."""
        self.indexed = 0
        """Bytes of `blocks`, from the front, that the table of segments knows."""

    @property
    def head(self) -> bytes:
        """Return the first block's name."""
        return bytes(self.blocks[:HASH_BYTES])

    @property
    def tail(self) -> bytes:
        """Return the last block's name."""
        return bytes(self.blocks[-HASH_BYTES:])

    def find(self, block: bytes) -> int:
        """Return the offset of a block in bytes, -1 if it is not here."""
        assert len(block) == HASH_BYTES, f"a name of {len(block)} bytes"
        at = self.blocks.find(block)
        while at >= 0 and at % HASH_BYTES:  # The end of one name and the beginning of the next.
            at = self.blocks.find(block, at + 1)
        return at

    def common(self, asked: Sequence[bytes], start: int) -> int:
        """Return how many of `asked` from `start` on are here. `asked[start]` is `head`."""
        blocks = self.blocks
        assert 0 <= start < len(asked), f"block {start} of {len(asked)} is asked for"
        length = min(len(blocks) // HASH_BYTES, len(asked) - start)
        if blocks.startswith(asked[start + length - 1], (length - 1) * HASH_BYTES):
            return length

        # A name covers all before it in its chain: where two are equal, all before them are.
        def differs(at: int) -> bool:
            return not blocks.startswith(asked[start + at], at * HASH_BYTES)

        return bisect_left(range(length), True, key=differs)


def take_from_end(blocks: bytearray, gone: set[bytes]) -> int:
    """Return how many bytes at the end are blocks of `gone`, and remove these from `gone`."""
    end = len(blocks)
    assert not end % HASH_BYTES, f"{end} bytes of names"
    while end and (block := bytes(blocks[end - HASH_BYTES : end])) in gone:
        gone.remove(block)
        end -= HASH_BYTES
    return len(blocks) - end


def take_from_front(blocks: bytearray, gone: set[bytes]) -> int:
    """Return how many bytes at the front are blocks of `gone`, and remove these from `gone`."""
    start = 0
    assert not len(blocks) % HASH_BYTES, f"{len(blocks)} bytes of names"
    while start < len(blocks) and (block := bytes(blocks[start : start + HASH_BYTES])) in gone:
        gone.remove(block)
        start += HASH_BYTES
    return start
