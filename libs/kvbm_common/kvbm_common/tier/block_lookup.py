"""A value for each of many blocks, in a table that never moves all of its entries at once.

Python's dict moves all of its entries when it grows, 0.2 s for a million, and nothing is answered
meanwhile. So a table that has become large is 256 dicts, by the last byte of a name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from itertools import chain
from operator import contains, itemgetter
from typing import Generic, TypeVar

WHOLE_MAX = 16_384
"""Blocks in one dict; it grows in a millisecond or two."""
PARTS = 256
_last = itemgetter(-1)

T = TypeVar("T")


class BlockLookup(Generic[T]):
    """A value for each of many blocks."""

    __slots__ = ("_mask", "_parts", "_whole_max")

    def __init__(self, whole_max: int = WHOLE_MAX) -> None:
        """Start empty; with more than `whole_max` blocks it is divided, with 0 from the start."""
        assert whole_max >= 0, f"divided with {whole_max} blocks"
        self._parts: list[dict[bytes, T]] = [{}]
        self._mask = 0
        self._whole_max = whole_max
        if not whole_max:
            self._divide()

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __contains__(self, block: object) -> bool:
        return block in self._parts[block[-1] & self._mask]  # type: ignore[index]

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._parts)

    def get(self, block: bytes) -> T | None:
        """Return the value of a block, or None if it has none."""
        return self._parts[block[-1] & self._mask].get(block)

    def get_all(self, blocks: Iterable[bytes]) -> list[T | None]:
        """Return what `get` returns of each block."""
        parts, mask = self._parts, self._mask
        assert len(parts) <= mask + 1, f"{len(parts)} parts, mask {mask}"
        if not mask:
            return [*map(parts[0].get, blocks)]
        return [parts[block[-1]].get(block) for block in blocks]

    def leading(self, blocks: Sequence[bytes]) -> list[T]:
        """Return the values of the blocks before the first one that has none."""
        parts, mask = self._parts, self._mask
        try:
            if not mask:
                return [*map(parts[0].__getitem__, blocks)]  # All of them, in the common case.
            return [parts[block[-1]][block] for block in blocks]
        except KeyError:
            found: list[T] = []
            for block in blocks:
                value = parts[block[-1] & mask].get(block)
                if value is None:
                    break
                found.append(value)
            assert len(found) < len(blocks), f"all of {len(blocks)} have a value, and one has none"
            return found

    def among(self, blocks: Set[bytes]) -> Set[bytes]:
        """Return those of some blocks that have a value: of many at once it is cheaper."""
        parts, mask = self._parts, self._mask
        assert len(parts) <= mask + 1, f"{len(parts)} parts, mask {mask}"
        if not mask:
            return parts[0].keys() & blocks
        return {block for block in blocks if block in parts[block[-1]]}

    def has_none_of(self, blocks: Collection[bytes]) -> bool:
        """Return whether none of these blocks has a value; all of it runs in C."""
        parts = self._parts
        if not self._mask:
            return not parts[0] or parts[0].keys().isdisjoint(blocks)
        assert len(parts) == PARTS, f"divided in {len(parts)} parts"
        return not any(map(contains, map(parts.__getitem__, map(_last, blocks)), blocks))

    def set(self, blocks: Sequence[bytes], value: T) -> None:
        """Set one value for some blocks."""
        if not self._mask:
            [whole] = self._parts
            whole.update(dict.fromkeys(blocks, value))
            if len(whole) > self._whole_max:
                self._divide()
            return
        parts = self._parts
        assert len(parts) == PARTS, f"divided in {len(parts)} parts"
        for block in blocks:
            parts[block[-1]][block] = value

    def set_each(self, blocks: Iterable[bytes], values: Iterable[T]) -> None:
        """Set the value of each of these blocks."""
        if not self._mask:
            [whole] = self._parts
            whole.update(zip(blocks, values, strict=True))
            if len(whole) > self._whole_max:
                self._divide()
            return
        parts = self._parts
        assert len(parts) == PARTS, f"divided in {len(parts)} parts"
        for block, value in zip(blocks, values, strict=True):
            parts[block[-1]][block] = value

    def set_new(self, blocks: Sequence[bytes], value: T) -> bool:
        """Set one value for some blocks that have none; return whether none of them had one."""
        parts, mask = self._parts, self._mask
        assert len(parts) <= mask + 1, f"{len(parts)} parts, mask {mask}"
        if not mask:
            is_new = parts[0].keys().isdisjoint(blocks)
            self.set(blocks, value)
            return is_new
        found = [parts[block[-1]].setdefault(block, value) for block in blocks]
        return found.count(value) == len(blocks)

    def drop(self, blocks: Iterable[bytes]) -> None:
        """Drop the values of these blocks, where they have one."""
        parts, mask = self._parts, self._mask
        for block in blocks:
            parts[block[-1] & mask].pop(block, None)

    def pop(self, block: bytes) -> T | None:
        """Drop the value of a block; return it, or None if there was none."""
        return self._parts[block[-1] & self._mask].pop(block, None)

    def pop_all(self, blocks: Sequence[bytes]) -> list[T | None]:
        """Drop the values of these blocks; return them, None where there was none."""
        parts, mask = self._parts, self._mask
        if not mask:
            whole = parts[0]
            return [whole.pop(block, None) for block in blocks]
        assert len(parts) == PARTS, f"divided in {len(parts)} parts"
        return [parts[block[-1]].pop(block, None) for block in blocks]

    @property
    def part_count(self) -> int:
        """The number of parts: one until the table is divided."""
        return len(self._parts)

    def part(self, number: int) -> Set[bytes]:
        """Return the blocks of a part: all of a table that is not divided."""
        assert 0 <= number < len(self._parts), f"part {number} of {len(self._parts)}"
        return self._parts[number].keys()

    def sift(self, number: int, is_kept: Callable[[T], bool]) -> tuple[dict[bytes, T], int]:
        """Drop the blocks of a part whose value is not kept; return them, and how many were looked
        at."""
        assert 0 <= number < len(self._parts), f"part {number} of {len(self._parts)}"
        part = self._parts[number]
        gone = {block: value for block, value in part.items() if not is_kept(value)}
        if gone:  # A dict that blocks are taken out of keeps its size.
            self._parts[number] = {
                block: value for block, value in part.items() if block not in gone
            }
        return gone, len(part)

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
