"""The view of a rank: the blocks that it can use, and the tiers they were published for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_lookup import BlockLookup
from kvbm_common.wire.events import Tier

from kvbm_connectors.consolidator.core.held_blocks import Held

TIER_BITS: dict[Tier, int] = {"device": 1, "host": 2, "disk": 4, "object": 8}
DEVICE = TIER_BITS["device"]
TIERS: dict[int, Tier] = {bit: tier for tier, bit in TIER_BITS.items()}
BITS: dict[int, tuple[int, ...]] = {
    mask: tuple(bit for bit in TIERS if mask & bit) for mask in range(16)
}


@dataclass(slots=True)
class RankView:
    """The blocks of one namespace that a rank can use, and the tiers they were published for.

    Nearly every block in device memory was published for the device alone: `otherwise` has the
    others. `device` is the table of the engines' half, not a copy. That table has all changes of
    a step before its drafts are taken here, so that the draft says whether a block is inside.
    """

    namespace: str
    rank: int
    group: int = 0
    device: Held = field(default_factory=dict)
    otherwise: dict[SequenceHash, int] = field(default_factory=dict)
    """Blocks of the device that were not published for it alone → their published tiers."""
    beyond: BlockLookup[int] = field(default_factory=BlockLookup)
    """Blocks that were published and are not in the device → their published tiers."""

    def __len__(self) -> int:
        return len(self.device) + len(self.beyond)

    def said(self, block: SequenceHash, *, inside: bool) -> int:
        """Return the tiers that a block was published for, as bits. `inside`: the device holds the
        block."""
        return self.otherwise.get(block, DEVICE) if inside else self.beyond.get(block) or 0

    def say(self, block: SequenceHash, mask: int, *, inside: bool) -> None:
        """Note that a block is published for these tiers from now on."""
        assert mask or not inside, "what a device holds was announced"
        if not inside and mask:
            self.beyond.set((block,), mask)
        elif not inside:
            self.beyond.pop(block)
        elif mask == DEVICE:
            self.otherwise.pop(block, None)
        else:
            self.otherwise[block] = mask

    def store(self, blocks: Iterable[SequenceHash]) -> None:
        """Note that the device has these blocks now; what was published of them stays as it was:
        perhaps nothing."""
        for block in blocks:
            said = self.beyond.pop(block) or 0
            if said != DEVICE:
                self.otherwise[block] = said

    def remove(self, blocks: Iterable[SequenceHash]) -> None:
        """Note that the device has these blocks no more; what was published of them stays as it
        was."""
        for block in blocks:
            self.beyond.set((block,), self.otherwise.pop(block, DEVICE))

    def all_said(self) -> Iterator[tuple[SequenceHash, int]]:
        """Return every block that was published, with its published tiers."""
        yield from ((block, self.otherwise.get(block, DEVICE)) for block in self.device)
        beyond = [SequenceHash(block) for block in self.beyond]
        yield from zip(beyond, filter(None, self.beyond.get_all(beyond)), strict=True)

    def check(self) -> None:
        """Assert every invariant, in O(n)."""
        assert self.otherwise.keys() <= self.device.keys()
        assert self.beyond.has_none_of(self.device)
        assert DEVICE not in self.otherwise.values(), "that is what goes without saying"
        assert all(self.otherwise.values()), "what a device holds was said"
        assert all(self.beyond.get_all(self.beyond))

    def clear(self) -> None:
        """Forget every block: nothing is there, and nothing was published."""
        self.device = {}
        self.otherwise.clear()
        self.beyond = BlockLookup()
