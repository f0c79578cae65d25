"""`lfu`: the least frequently used block leaves first, with aging.

LFU with dynamic aging (Arlitt et al. 2000): a block's key is its uses while it was here, plus the
key of the last victim at its last use. Old fame is outlived that way. Among equal keys it is LRU.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, islice
from operator import itemgetter

import msgspec

from kvbm_common.eviction.former_names import FormerNames
from kvbm_common.eviction.lru import FreeOrder
from kvbm_common.eviction.one_by_one import OneByOne
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_columns import BlockColumns
from kvbm_common.tier.block_lookup import BlockLookup


class _Use(msgspec.Struct, gc=False, eq=False):
    """The uses of a block while it was here, and its key; no garbage collector looks at it."""

    uses: int
    key: int


class Lfu(OneByOne):
    """Least frequently used, with aging. A parent is used as often as its child, and freed later,
    so that a leaf goes before its parent.
    """

    def __init__(self) -> None:
        self._uses: BlockLookup[_Use] = BlockLookup()
        self._former: FormerNames | None = None
        """Blocks of a former life without an entry in `_uses`: used once, with the key 1."""
        self._queues: dict[int, FreeOrder] = {}
        self._keys: list[int] = []
        """The keys of the queues, sorted."""
        self._age = 0
        self._free_count = 0

    def fill(self, former: BlockColumns) -> None:
        assert not self._queues, f"{self._free_count} blocks are here already"
        if not len(former):
            return
        self._former = FormerNames(former.leaves_first()[::-1])  # As they leave.
        self._queue(1).fill(former)
        self._free_count = len(former)

    def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
        assert block not in self._uses, f"{block.hex()} is here already"
        former = self._former
        assert former is None or block not in former, f"{block.hex()} is here since a former life"
        use = _Use(1, 1 + self._age)
        self._uses.set((block,), use)
        self._queue(use.key).free(block)
        self._free_count += 1

    def admit_all(self, blocks: Sequence[SequenceHash], parents: Sequence[SequenceHash]) -> None:
        assert len(parents) == len(blocks), f"{len(blocks)} blocks, {len(parents)} parents"
        assert self._uses.has_none_of(blocks), f"of {len(blocks)} blocks some are here"
        former = self._former
        assert former is None or not blocks or blocks[0] not in former, (
            f"{blocks[0].hex()} is here since a former life"
        )
        key = 1 + self._age
        self._uses.set_each(blocks, [_Use(1, key) for _ in blocks])
        if blocks:
            self._queue(key).free_some(blocks[::-1])
        self._free_count += len(blocks)

    def touch(self, block: SequenceHash) -> None:
        use = self._uses.get(block) or self._unfold(block)
        old = use.key
        use.uses += 1
        new = use.key = use.uses + self._age
        assert new > old, f"{block.hex()} was used: its key {old} became {new}"
        if block in self._queues.get(old, ()):
            self._queues[old].hold(block)
            self._drop_if_empty(old)
            self._queue(new).free(block)

    def hold(self, block: SequenceHash) -> None:
        self._take_out(block, (self._uses.get(block) or self._unfold(block)).key)

    def free(self, block: SequenceHash) -> None:
        self._queue((self._uses.get(block) or self._unfold(block)).key).free(block)
        self._free_count += 1

    def hold_all(self, blocks: Sequence[SequenceHash]) -> None:
        for key, run in self._by_key(blocks):
            self._queues[key].hold_all(run)
            self._drop_if_empty(key)
        self._free_count -= len(blocks)
        assert self._free_count >= 0, f"{len(blocks)} blocks were held, and not all were free"

    def free_all(self, blocks: Sequence[SequenceHash]) -> None:
        for key, run in self._by_key(blocks):
            self._queue(key).free_some(run)
        self._free_count += len(blocks)

    def _by_key(
        self, blocks: Sequence[SequenceHash]
    ) -> Iterator[tuple[int, Sequence[SequenceHash]]]:
        """Yield these blocks in their order, those together that follow each other with one key."""
        uses = zip(self._uses.get_all(blocks), blocks, strict=True)
        keys = [(use or self._unfold(block)).key for use, block in uses]
        for key, run in groupby(zip(keys, blocks, strict=True), key=itemgetter(0)):
            assert key > 0, f"a block was used, and its key is {key}"
            yield key, [block for _, block in run]

    def forget(self, block: SequenceHash) -> None:
        use = self._uses.pop(block)
        if use is None:
            self._leave_former(block)
        key = 1 if use is None else use.key
        self._take_out(block, key)
        self._age = max(self._age, key)

    def _take_out(self, block: SequenceHash, key: int) -> None:
        """Remove a free block from the queue of its key."""
        self._queues[key].hold(block)
        self._drop_if_empty(key)
        self._free_count -= 1
        assert self._free_count >= 0, f"{block.hex()} was free, and counted as held"

    def _unfold(self, block: SequenceHash) -> _Use:
        """Make the entry of a block of a former life; raises KeyError if it is not here."""
        self._leave_former(block)
        use = _Use(1, 1)
        self._uses.set((block,), use)
        return use

    def _leave_former(self, block: SequenceHash) -> None:
        """Let a block be of a former life no more; raises KeyError if it was not."""
        if self._former is None:
            raise KeyError(block)
        self._former.remove(block)
        if not self._former:
            self._former = None

    def victims(self, count: int) -> list[SequenceHash]:
        return list(islice(chain.from_iterable(self._queues[key] for key in self._keys), count))

    def __len__(self) -> int:
        return self._free_count

    def _queue(self, key: int) -> FreeOrder:
        if key not in self._queues:
            self._queues[key] = FreeOrder()
            insort(self._keys, key)
        return self._queues[key]

    def _drop_if_empty(self, key: int) -> None:
        if not len(self._queues[key]):
            del self._queues[key]
            self._keys.remove(key)
            queues = len(self._queues)
            assert len(self._keys) == queues, f"{queues} queues have {len(self._keys)} keys"
