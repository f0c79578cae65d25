"""The router book: the blocks that readers of a router stream hold, and its last batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
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


class Said(NamedTuple):
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

    said: dict[Tier, dict[SequenceHash, SequenceHash | None]] = field(default_factory=dict)
    """Tier → the blocks that were said, each with its parent."""
    groups: dict[SequenceHash, int] = field(default_factory=dict)
    """Block → its group, if that is not 0; it stays the same as long as the block is held."""
    unnamed: dict[SequenceHash, list[Said]] = field(default_factory=dict)
    """Held, and not said for want of a name."""
    next_seq: int = 0
    buffer: deque[Frame] = field(default_factory=deque)
    buffer_bytes: int = 0

    def holds(self, block: SequenceHash) -> bool:
        """Tell whether a block was said, of any tier."""
        return any(block in said for said in self.said.values())

    def hold(self, tier: Tier, blocks: Iterable[Held], group: int) -> None:
        """Note blocks of a tier, with their parents, as said."""
        assert group >= 0, f"a block of group {group}"
        said = self.said.setdefault(tier, {})
        if not group:
            said.update(blocks)
            return
        for block, parent in blocks:
            said[block] = parent
            self.groups[block] = group

    def let_go(self, tier: Tier, block: SequenceHash) -> bool:
        """Forget that a tier has a block; returns whether it was said."""
        said = self.said.get(tier, {})
        if block not in said:
            return False
        del said[block]
        if self.groups and not self.holds(block):
            self.groups.pop(block, None)
        return True

    def places(self) -> dict[Key, SequenceHash | None]:
        """Return everything that was said: blocks and tiers, with the parents."""
        return {
            (block, tier): parent
            for tier, said in self.said.items()
            for block, parent in said.items()
        }


def parent_in(said: dict[Key, SequenceHash | None], key: Key) -> Key | None:
    """Return what a block's parent is held as: in the same tier if it can be."""
    assert key in said, f"{key} is not held"
    parent, tier = said[key], key[1]
    above = () if parent is None else ((parent, one) for one in (tier, *TIERS))
    return next((one for one in above if one in said), None)
