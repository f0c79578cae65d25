"""The view of a rank: the blocks that it can use, and the tiers they were published for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_lookup import BlockLookup
from kvbm_common.wire.events import Tier

from kvbm_connectors.consolidator.core.block_books import Pairs
from kvbm_connectors.consolidator.core.events import EventBuilder
from kvbm_connectors.consolidator.core.held_blocks import Held
from kvbm_connectors.consolidator.core.snapshot_pages import Piece, ViewKey, pieces_of

TIER_BITS: dict[Tier, int] = {"device": 1, "host": 2, "disk": 4, "object": 8}
DEVICE = TIER_BITS["device"]
TIERS: dict[int, Tier] = {bit: tier for tier, bit in TIER_BITS.items()}
BITS: dict[int, tuple[int, ...]] = {
    mask: tuple(bit for bit in TIERS if mask & bit) for mask in range(16)
}


@dataclass(slots=True)
class RankView:
    """The blocks of one namespace that a rank can use, and the tiers they were published for.

    A block that the device has is called `inside`. Sets of tiers are sums of TIER_BITS. Nearly
    every block in device memory was published for the device alone: `otherwise` has the others.
    `device` is the table of the engines' half, not a copy. That table has all changes of
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

    def published(self, block: SequenceHash, *, inside: bool) -> int:
        """Return the tiers that a block was published for, as bits."""
        return self.otherwise.get(block, DEVICE) if inside else self.beyond.get(block) or 0

    def set_published(self, block: SequenceHash, mask: int, *, inside: bool) -> None:
        """Note that a block is published for these tiers from now on."""
        assert mask or not inside, "what a device holds was published"
        if not inside and mask:
            self.beyond.set((block,), mask)
        elif not inside:
            self.beyond.pop(block)
        elif mask == DEVICE:
            self.otherwise.pop(block, None)
        else:
            self.otherwise[block] = mask

    def publish(
        self,
        events: EventBuilder,
        block: SequenceHash,
        parent: SequenceHash | None,
        published: int,
        want: int,
        inside: bool,
    ) -> None:
        """Add the difference of two sets of tiers to events that are built, and note it."""
        assert want != published, f"{block.hex()} is published in {want} already"
        self.set_published(block, want, inside=inside)
        for bit in BITS[published & ~want]:
            events.removed(TIERS[bit], block)
        for bit in BITS[want & ~published]:
            assert parent is not None, f"{block.hex()} is stored without its parent"
            events.stored(TIERS[bit], parent, block)

    def store(self, blocks: Iterable[SequenceHash]) -> None:
        """Note that the device has these blocks now; what was published of them stays as it was:
        perhaps nothing."""
        for block in blocks:
            published = self.beyond.pop(block) or 0
            if published != DEVICE:
                self.otherwise[block] = published

    def remove(self, blocks: Iterable[SequenceHash]) -> None:
        """Note that the device has these blocks no more; what was published of them stays as it
        was."""
        for block in blocks:
            self.beyond.set((block,), self.otherwise.pop(block, DEVICE))

    def pieces(self, known_of: Callable[[Iterable[SequenceHash], str], Pairs]) -> list[Piece]:
        """Return every block that was published, for a snapshot.

        `known_of` returns some blocks of a namespace with their parents, as tiers have or had them.
        A block that has left its tier is published until its removal comes with a later part: it
        may be back, or in the device, before that, and then no event says so.
        """

        def published_of(names: Sequence[SequenceHash]) -> Pairs:
            inside = [(name, self.device[name]) for name in names if name in self.device]
            rest = (name for name in names if name not in self.device and name in self.beyond)
            return inside + known_of(rest, self.namespace)

        # All names at once: one that goes into the device before its page is made is in no event.
        beyond = cast("Iterable[SequenceHash]", self.beyond)
        view = ViewKey(self.namespace, self.rank, self.group)
        return pieces_of(view, [*self.device, *beyond], published_of)

    def all_published(self) -> Iterator[tuple[SequenceHash, int]]:
        """Return every block that was published, with its published tiers."""
        yield from ((block, self.otherwise.get(block, DEVICE)) for block in self.device)
        beyond = [SequenceHash(block) for block in self.beyond]
        yield from zip(beyond, filter(None, self.beyond.get_all(beyond)), strict=True)

    def check(self) -> None:
        """Assert every invariant, in O(n)."""
        assert self.otherwise.keys() <= self.device.keys()
        assert self.beyond.has_none_of(self.device)
        assert DEVICE not in self.otherwise.values(), "the usual case has no entry"
        assert all(self.otherwise.values()), "what a device holds was published"
        assert all(self.beyond.get_all(self.beyond))

    def clear(self) -> BlockLookup[int]:
        """Forget every block: nothing is there, and nothing was published. Returns the blocks that
        were published and not in the device: their memory is given back in parts."""
        self.device = {}
        self.otherwise.clear()
        beyond, self.beyond = self.beyond, BlockLookup()
        return beyond


@dataclass(slots=True)
class MergedEngine:
    """One engine: its position in its own merged stream, and its views."""

    name: str
    epoch: int = 0
    seq: int = 0
    views: dict[tuple[int, str], RankView] = field(default_factory=dict)
    """Rank and namespace → the view of it."""
    cleared: set[int] = field(default_factory=set)
    """Ranks whose tiers' blocks must be published again."""
