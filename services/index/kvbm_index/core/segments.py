"""Segments: stretches of a chain, names back to back, and the table that says which has a block.

Python's dict moves all of its entries when it grows, 0.2 s for a million, and no question is
answered meanwhile. So a table that has become large is 256 dicts, by the last byte of a name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Generic, TypeVar

from kvbm_common.identity import HASH_BYTES


class Segment:
    """A stretch of consecutive blocks: `blocks` has their names back to back."""

    __slots__ = ("blocks", "indexed", "parent", "rooted")

    def __init__(self, parent: bytes, blocks: bytes | bytearray, *, rooted: bool) -> None:
        assert blocks, f"a segment without blocks behind {parent.hex()}"
        assert not len(blocks) % HASH_BYTES, f"{len(blocks)} bytes of names"
        self.parent = parent
        self.blocks = bytearray(blocks)
        self.rooted = rooted
        """The parent is the root of a namespace, which is no block."""
        self.indexed = 0
        """How many bytes of `blocks`, from the front, the table of segments knows."""

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
        while at >= 0 and at % HASH_BYTES:
            at = self.blocks.find(block, at + 1)
        return at

    def common(self, asked: Sequence[bytes], start: int) -> int:
        """Return how many of `asked` from `start` on are here. `asked[start]` is this head."""
        blocks = self.blocks
        assert 0 <= start < len(asked), f"block {start} of {len(asked)} is asked for"
        length = min(len(blocks) // HASH_BYTES, len(asked) - start)
        if blocks.startswith(asked[start + length - 1], (length - 1) * HASH_BYTES):
            return length

        def differs(at: int) -> bool:
            return not blocks.startswith(asked[start + at], at * HASH_BYTES)

        return bisect_left(range(length), True, key=differs)


def count_behind(blocks: bytearray, gone: set[bytes]) -> int:
    """Return how many bytes of the end are blocks of `gone`, and take these out of `gone`."""
    end = len(blocks)
    assert not end % HASH_BYTES, f"{end} bytes of names"
    while end and (block := bytes(blocks[end - HASH_BYTES : end])) in gone:
        gone.remove(block)
        end -= HASH_BYTES
    return len(blocks) - end


def count_before(blocks: bytearray, gone: set[bytes]) -> int:
    """Return how many bytes of the front are blocks of `gone`, and take these out of `gone`."""
    start = 0
    assert not len(blocks) % HASH_BYTES, f"{len(blocks)} bytes of names"
    while start < len(blocks) and (block := bytes(blocks[start : start + HASH_BYTES])) in gone:
        gone.remove(block)
        start += HASH_BYTES
    return start


WHOLE_MAX = 16_384
"""Blocks in one dict; it grows in a millisecond or two."""
PARTS = 256

T = TypeVar("T")


class BlockLookup(Generic[T]):
    """A value for each of many blocks."""

    __slots__ = ("_mask", "_parts")

    def __init__(self) -> None:
        self._parts: list[dict[bytes, T]] = [{}]
        self._mask = 0

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __contains__(self, block: bytes) -> bool:
        return block in self._parts[block[-1] & self._mask]

    def __iter__(self) -> Iterator[bytes]:
        return (block for part in self._parts for block in part)

    def get(self, block: bytes) -> T | None:
        """Return the value of a block, or None if it has none."""
        return self._parts[block[-1] & self._mask].get(block)

    def among(self, blocks: Set[bytes]) -> Set[bytes]:
        """Return those of some blocks that have a value: of many at once it is cheaper."""
        parts, mask = self._parts, self._mask
        assert len(parts) <= mask + 1, f"{len(parts)} parts, mask {mask}"
        if not mask:
            return parts[0].keys() & blocks
        return {block for block in blocks if block in parts[block[-1]]}

    def set(self, blocks: Sequence[bytes], value: T) -> None:
        """Set one value for some blocks."""
        if not self._mask:
            [whole] = self._parts
            whole.update(dict.fromkeys(blocks, value))
            if len(whole) > WHOLE_MAX:
                self._divide()
            return
        parts = self._parts
        assert len(parts) == PARTS, f"divided in {len(parts)} parts"
        for block in blocks:
            parts[block[-1]][block] = value

    def drop(self, blocks: Iterable[bytes]) -> None:
        """Drop the values of these blocks, where they have one."""
        parts, mask = self._parts, self._mask
        for block in blocks:
            parts[block[-1] & mask].pop(block, None)

    def shed(self) -> int:
        """Forget a part of it, for good; returns how many blocks that were."""
        assert len(self._parts) <= self._mask + 1, f"{len(self._parts)} parts, mask {self._mask}"
        part = self._parts.pop()
        if not self._parts:
            self._parts, self._mask = [{}], 0
        return len(part)

    def _divide(self) -> None:
        assert not self._mask, f"divided already, in {len(self._parts)} parts"
        [whole] = self._parts
        self._parts, self._mask = [{} for _ in range(PARTS)], PARTS - 1
        for block, value in whole.items():
            self._parts[block[-1]][block] = value
        assert len(self) == len(whole), f"{len(whole)} blocks became {len(self)}"
