"""A retelling: changes of one instance, applied again on top of an older base, newest first.

An event behind a gap is applied at once. When a snapshot or the missing event arrives later, it is
older: the newer changes are applied again above it, a piece per step. For each block the newest
change wins, whether it arrives before or during the retelling. So no block that has left comes back
for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import assert_never

from kvbm_common.identity import IdentityError, SequenceHash, hashes_from_hex
from kvbm_common.tier.block_lookup import BlockLookup
from kvbm_common.wire.events import Cleared, Event, Removed, Stored

from kvbm_host_tier.core.blocks_below import Life
from kvbm_host_tier.core.lower_snapshot import LowerSnapshot


@dataclass(frozen=True, slots=True)
class Said:
    """The blocks that an event, or a piece of a snapshot, stores or removes."""

    epoch: int
    seq: int
    names: list[SequenceHash]
    stores: bool = True
    """Whether the blocks are there; False: they have left."""
    block_bytes: int = 0
    namespace: bytes = b""
    malformed: bool = False
    """Valid JSON, and no hashes in it: whatever it said, a snapshot says it as well."""


def said_by(event: Event) -> Said:
    """Return what an event says; a clear speaks of no block, and a malformed event neither."""
    epoch, seq = event.epoch, event.seq
    try:
        match event:
            case Stored(runs=runs):
                names = hashes_from_hex([text for run in runs for text in run.hashes])
                namespace = bytes.fromhex(event.namespace)
                return Said(epoch, seq, names, True, event.block_bytes, namespace)
            case Removed(hashes=hashes):
                return Said(epoch, seq, hashes_from_hex(hashes), stores=False)
            case Cleared():
                return Said(epoch, seq, [])
            case _:
                assert_never(event)
    except IdentityError:
        return Said(epoch, seq, [], malformed=True)


class Retelling:
    """The changes of one instance that are still to be applied again, and those made meanwhile."""

    def __init__(
        self, seq: int = 0, snapshot: Iterator[Said] | None = None, former: Life | None = None
    ) -> None:
        """Begin with the pieces of a snapshot as of `seq`, or with events alone; `former` is the
        life before it, whose blocks are believed until the end."""
        assert seq >= 0, f"a snapshot of event {seq}"
        self.former = former
        self._events: list[tuple[int, Said]] = []
        """A heap, the newest first."""
        self._added: set[int] = set()
        self._snapshot = snapshot or iter(())
        self._begun = self._latest = seq
        self._spoken: BlockLookup[int] = BlockLookup()
        """The newest event that has spoken of a block since this began."""

    def add(self, events: Iterable[Said]) -> None:
        """Have these be said again, unless they were."""
        for said in events:
            if said.seq not in self._added:
                self._added.add(said.seq)
                self._latest = max(self._latest, said.seq)
                heappush(self._events, (-said.seq, said))

    def next_piece(self) -> Said | None:
        """Return what comes next; None: that was all."""
        return heappop(self._events)[1] if self._events else next(self._snapshot, None)

    def unspoken(self, said: Said) -> list[SequenceHash]:
        """Return the names that nothing newer has spoken of, and note that this does."""
        newest = self._spoken.get
        names = said.names
        if self._spoken:
            names = [name for name in names if (at := newest(name)) is None or at < said.seq]
        assert len(names) <= len(said.names), f"event {said.seq} has {len(said.names)} blocks"
        if said.seq > self._begun:  # A snapshot speaks of each block once.
            self._spoken.set(names, said.seq)
            self._latest = max(self._latest, said.seq)
        return names

    def overtake(self, names: list[SequenceHash]) -> None:
        """Note what others know of these names: nothing that was said until now is newer."""
        self._spoken.set(names, self._latest)


def pieces_of(snapshot: LowerSnapshot, blocks_max: int) -> Iterator[Said]:
    """Yield what a snapshot says, at most so many blocks at a time."""
    epoch, seq = snapshot.epoch, snapshot.seq
    for part in snapshot.parts:
        for names in part.pieces(blocks_max):
            assert names, f"an empty piece of the snapshot of event {seq}"
            yield Said(epoch, seq, names, True, part.block_bytes, part.namespace)
