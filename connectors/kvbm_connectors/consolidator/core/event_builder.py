"""Drafts: stores and removals of blocks, gathered into as few events as their order allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbm_common.identity import SequenceHash, hashes_to_hex
from kvbm_common.tier.announcer import EVENT_BLOCKS_MAX
from kvbm_common.wire.events import EventHead, Removed, Stored, Tier, run_of


@dataclass(slots=True)
class EventDraft:
    """One event without its number. Either `runs` or `hashes` is used."""

    tier: Tier
    runs: list[tuple[SequenceHash, list[SequenceHash]]] = field(default_factory=list)
    hashes: list[SequenceHash] = field(default_factory=list)
    count: int = 0

    def event(self, head: EventHead, group: int, namespace: str, reason: str) -> Stored | Removed:
        """Return the draft as an event that begins like `head`; `reason` is that of a removal."""
        assert bool(self.runs) != bool(self.hashes), (
            f"{len(self.runs)} runs, {len(self.hashes)} gone"
        )
        if self.runs:
            return head.stored(namespace, [run_of(*run) for run in self.runs], group=group)
        return head.removed(namespace, hashes_to_hex(self.hashes), reason, group=group)


class EventBuilder:
    """Gathers changes in the order in which they happened; an event is of one kind and tier."""

    def __init__(self) -> None:
        self._drafts: list[EventDraft] = []

    def stored(self, tier: Tier, parent: SequenceHash, block: SequenceHash) -> None:
        """Add a block that is new in a tier to the last draft, or begin another one."""
        last = self._drafts[-1] if self._drafts else None
        if last is None or last.tier != tier or last.hashes or last.count >= EVENT_BLOCKS_MAX:
            last = EventDraft(tier)
            self._drafts.append(last)
        if last.runs and last.runs[-1][1][-1] == parent:
            last.runs[-1][1].append(block)
        else:
            last.runs.append((parent, [block]))
        last.count += 1

    def removed(self, tier: Tier, block: SequenceHash) -> None:
        """Add a block that is gone from a tier to the last draft, or begin another one."""
        last = self._drafts[-1] if self._drafts else None
        if last is None or last.tier != tier or last.runs or last.count >= EVENT_BLOCKS_MAX:
            last = EventDraft(tier)
            self._drafts.append(last)
        last.hashes.append(block)
        last.count += 1

    def take(self) -> Iterator[EventDraft]:
        """Return all drafts, in order, and forget them."""
        drafts, self._drafts = self._drafts, []
        return iter(drafts)
