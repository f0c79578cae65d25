"""Blocks named by small integers, and a policy that minds its contract."""

from __future__ import annotations

import gc
from collections.abc import Sequence, Sized
from types import FunctionType, ModuleType

from kvbm_common.eviction import EvictionPolicy, Lru
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slab_pool import MakePolicy
from kvbm_common.tier.slots import Block, SlotTable

NAMESPACE = b"n" * 32


def name(number: int) -> SequenceHash:
    """Block 7 is called 0…07."""
    return SequenceHash(number.to_bytes(16, "big"))


def names(*numbers: int) -> list[SequenceHash]:
    """Several of them."""
    return [name(number) for number in numbers]


def block(number: int, *, parent: int | None = None, namespace: bytes = NAMESPACE) -> Block:
    """A committed block; its parent is the number before it unless told."""
    before = number - 1 if parent is None else parent
    return Block(name(number), name(before), namespace, checksum=number * 11, bytes=64)


def make_room(
    table: SlotTable, count: int, block_bytes: int = 0, namespace: bytes = b""
) -> list[Block]:
    """Evict for so many blocks of this size, as tiers do; returns the evicted."""
    victims = table.victims(count, block_bytes, namespace=namespace)
    return [table.evict(name) for name in victims.names]


class StrictLru(Lru):
    """Asserts what `EvictionPolicy` promises its implementations.

    Every block is admitted once and forgotten once, and `hold` and `free` alternate in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: set[SequenceHash] = set()

    def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
        assert block not in self.held, "admitted while held"
        super().admit(block, parent)

    def admit_all(self, blocks: Sequence[SequenceHash], parents: Sequence[SequenceHash]) -> None:
        assert self.held.isdisjoint(blocks), "admitted while held"
        super().admit_all(blocks, parents)

    def hold(self, block: SequenceHash) -> None:
        super().hold(block)
        self.held.add(block)

    def free(self, block: SequenceHash) -> None:
        self.held.remove(block)
        super().free(block)

    def hold_all(self, blocks: Sequence[SequenceHash]) -> None:
        for block in blocks:
            self.hold(block)

    def free_all(self, blocks: Sequence[SequenceHash]) -> None:
        for block in blocks:
            self.free(block)

    def forget(self, block: SequenceHash) -> None:
        assert block not in self.held, "forgotten while held"
        super().forget(block)


def plain_table(
    slot_count: int, make: MakePolicy = lambda _: StrictLru(), *, packs: bool = False
) -> SlotTable:
    """A table whose slots take blocks of any size."""
    return SlotTable(Layout.unsized(slot_count), make, packs=packs)


def policy_of(table: SlotTable) -> EvictionPolicy:
    """The policy of such a table."""
    size = table.pool.size_of(0)
    assert size is not None
    return size.policy


def largest_table(root: object, kinds: tuple[type[Sized], ...] = (dict, set)) -> int:
    """How many entries the largest table of these kinds has that belongs to an object."""
    seen, left, most = {id(root)}, [root], 0
    while left:
        one = left.pop()
        if isinstance(one, kinds):
            most = max(most, len(one))
        for part in gc.get_referents(one):
            if id(part) not in seen and not isinstance(part, (type, ModuleType, FunctionType)):
                seen.add(id(part))
                left.append(part)
    return most
