"""The router book: the blocks that readers of a router stream hold, and its last batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Tier


class StreamId(NamedTuple):
    """The rank and the engine of a stream."""

    rank: int
    engine: str


class Frame(NamedTuple):
    """One message of a stream, ready for a socket."""

    stream: StreamId
    seq: int
    payload: bytes


class HeldBlock(NamedTuple):
    """A block that a stream holds: its tier, its parent, its group."""

    block: SequenceHash
    tier: Tier
    parent: SequenceHash | None
    group: int


TIERS: tuple[Tier, ...] = ("device", "host", "disk", "object")
Key = tuple[SequenceHash, Tier]
Held = tuple[SequenceHash, SequenceHash | None]
"""A block and its parent."""


@dataclass(slots=True)
class RouterStream:
    """One stream: what its readers hold, and its last batches."""

    blocks: dict[Tier, dict[SequenceHash, SequenceHash | None]] = field(default_factory=dict)
    """Tier → the blocks that readers hold, each with its parent."""
    groups: dict[SequenceHash, int] = field(default_factory=dict)
    """Block → its group, if that is not 0; it stays the same as long as the block is held."""
    unnamed: dict[SequenceHash, list[HeldBlock]] = field(default_factory=dict)
    """Block → where it is held; not sent, because its tokens are not known."""
    next_seq: int = 0
    buffer: deque[Frame] = field(default_factory=deque)
    buffer_bytes: int = 0

    def holds(self, block: SequenceHash) -> bool:
        """Tell whether readers hold a block in some tier."""
        return any(block in held for held in self.blocks.values())

    def hold(self, tier: Tier, blocks: Iterable[Held], group: int) -> None:
        """Note that readers hold these blocks of a tier, with their parents."""
        assert group >= 0, f"a block of group {group}"
        held = self.blocks.setdefault(tier, {})
        if not group:
            held.update(blocks)
            return
        for block, parent in blocks:
            held[block] = parent
            self.groups[block] = group

    def let_go(self, tier: Tier, block: SequenceHash) -> bool:
        """Forget that readers hold a block of a tier; returns whether they did."""
        held = self.blocks.get(tier, {})
        if block not in held:
            return False
        del held[block]
        if self.groups and not self.holds(block):
            self.groups.pop(block, None)
        return True

    def take_waiting(
        self, blocks: Iterable[SequenceHash], is_named: Callable[[SequenceHash], bool]
    ) -> list[HeldBlock]:
        """Take out those of these blocks that waited for their names and have them now, each after
        its ancestors."""
        taken: list[HeldBlock] = []
        for block in blocks:
            chain: list[list[HeldBlock]] = []
            at: SequenceHash | None = block
            while at is not None and at in self.unnamed and is_named(at):
                chain.append(self.unnamed.pop(at))
                at = chain[-1][0].parent
            taken += (one for waiting in reversed(chain) for one in waiting)
        assert not any(one.block in self.unnamed for one in taken), "a block waits, and is taken"
        return taken

    def places(self) -> dict[Key, SequenceHash | None]:
        """Return everything that readers hold: blocks and tiers, with the parents."""
        return {
            (block, tier): parent
            for tier, held in self.blocks.items()
            for block, parent in held.items()
        }


def parent_in(held: dict[Key, SequenceHash | None], key: Key) -> Key | None:
    """Return what a block's parent is held as: in the same tier if it can be."""
    assert key in held, f"{key} is not held"
    parent, tier = held[key], key[1]
    above = () if parent is None else ((parent, one) for one in (tier, *TIERS))
    return next((one for one in above if one in held), None)
