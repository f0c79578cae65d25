"""`lfu`: the least frequently used block leaves first, with aging.

LFU with dynamic aging (Arlitt et al. 2000): a block's key is its uses while it was here, plus the
key of the last victim at its last use. Old fame is outlived that way. Among equal keys it is LRU.
"""

from __future__ import annotations

from bisect import insort
from itertools import chain, islice

from kvbm_common.eviction.lru import FreeOrder
from kvbm_common.eviction.one_by_one import OneByOne
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import BlockColumns


class Lfu(OneByOne):
    """Least frequently used, with aging. A parent is used as often as its child, and freed later,
    so that a leaf goes before its parent.
    """

    def __init__(self) -> None:
        self._uses: dict[SequenceHash, int] = {}
        self._key: dict[SequenceHash, int] = {}
        self._queues: dict[int, FreeOrder] = {}
        self._keys: list[int] = []
        """The keys of the queues, sorted."""
        self._age = 0
        self._free_count = 0

    def fill(self, former: BlockColumns) -> None:
        assert not self._uses, f"{len(self._uses)} blocks are here already"
        if not len(former):
            return
        self._uses = dict.fromkeys(former.slot_of, 1)
        self._key = self._uses.copy()
        self._queue(1).fill(former)
        self._free_count = len(former)

    def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
        assert block not in self._uses, f"{block.hex()} is here, used {self._uses[block]} times"
        self._uses[block] = 0
        self.touch(block)
        self.free(block)

    def touch(self, block: SequenceHash) -> None:
        uses = self._uses[block] = self._uses[block] + 1
        old = self._key.get(block)
        new = self._key[block] = uses + self._age
        assert old is None or new > old, f"{block.hex()} was used: its key {old} became {new}"
        if old is not None and block in self._queues.get(old, ()):
            self._queues[old].hold(block)
            self._drop_if_empty(old)
            self._queue(new).free(block)

    def hold(self, block: SequenceHash) -> None:
        key = self._key[block]
        self._queues[key].hold(block)
        self._drop_if_empty(key)
        self._free_count -= 1
        assert self._free_count >= 0, f"{block.hex()} was free, and counted as held"

    def free(self, block: SequenceHash) -> None:
        self._queue(self._key[block]).free(block)
        self._free_count += 1

    def forget(self, block: SequenceHash) -> None:
        self.hold(block)
        del self._uses[block]
        self._age = max(self._age, self._key.pop(block))

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
