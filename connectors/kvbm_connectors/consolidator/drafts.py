"""Drafts: stores and removals of blocks, gathered into as few events as their order allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbm_common.announcer import EVENT_BLOCKS_MAX
from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Removed, Run, Stored, Tier


@dataclass(slots=True)
class Draft:
    """One event without its number. Either `runs` or `hashes` is used."""

    tier: Tier
    runs: list[tuple[SequenceHash, list[SequenceHash]]] = field(default_factory=list)
    hashes: list[SequenceHash] = field(default_factory=list)
    count: int = 0

    def event(
        self, *, host: str, source: str, epoch: int, seq: int, ts_ms: int, rank: int, group: int,
        namespace: str, reason: str,
    ) -> Stored | Removed:  # fmt: skip
        """The event that has this number."""
        if self.runs:
            runs = [
                Run(parent=parent.hex(), hashes=[block.hex() for block in hashes])
                for parent, hashes in self.runs
            ]
            return Stored(
                host=host, source=source, tier=self.tier, epoch=epoch, seq=seq, ts_ms=ts_ms,
                rank=rank, group=group, namespace=namespace, runs=runs,
            )  # fmt: skip
        return Removed(
            host=host, source=source, tier=self.tier, epoch=epoch, seq=seq, ts_ms=ts_ms,
            rank=rank, group=group, namespace=namespace, reason=reason,
            hashes=[block.hex() for block in self.hashes],
        )  # fmt: skip


class Drafts:
    """Gathers changes in the order in which they happened; an event is of one kind and tier."""

    def __init__(self) -> None:
        self._drafts: list[Draft] = []

    def stored(self, tier: Tier, parent: SequenceHash, block: SequenceHash) -> None:
        """A block is new in a tier."""
        last = self._drafts[-1] if self._drafts else None
        if last is None or last.tier != tier or last.hashes or last.count >= EVENT_BLOCKS_MAX:
            last = Draft(tier)
            self._drafts.append(last)
        if last.runs and last.runs[-1][1][-1] == parent:
            last.runs[-1][1].append(block)
        else:
            last.runs.append((parent, [block]))
        last.count += 1

    def removed(self, tier: Tier, block: SequenceHash) -> None:
        """A block is gone from a tier."""
        last = self._drafts[-1] if self._drafts else None
        if last is None or last.tier != tier or last.runs or last.count >= EVENT_BLOCKS_MAX:
            last = Draft(tier)
            self._drafts.append(last)
        last.hashes.append(block)
        last.count += 1

    def take(self) -> Iterator[Draft]:
        """All drafts, in order."""
        drafts, self._drafts = self._drafts, []
        return iter(drafts)
