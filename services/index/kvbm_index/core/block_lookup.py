"""A listing: which segment has a block, without the pauses of a large dict.

Python's dict moves all of its entries when it grows, 0.2 s for a million, and no question is
answered meanwhile. So a listing that has become large is 256 dicts, by the last byte of a block's
name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

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

    def set(self, blocks: Sequence[bytes], value: T) -> None:
        """Set one value for some blocks."""
        if not self._mask:
            [whole] = self._parts
            whole.update(dict.fromkeys(blocks, value))
            if len(whole) > WHOLE_MAX:
                self._divide()
            return
        parts = self._parts
        for block in blocks:
            parts[block[-1]][block] = value

    def drop(self, blocks: Iterable[bytes]) -> None:
        """Drop the values of these blocks, where they have one."""
        parts, mask = self._parts, self._mask
        for block in blocks:
            parts[block[-1] & mask].pop(block, None)

    def shed(self) -> int:
        """Forget a part of it, for good; returns how many blocks that were."""
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
