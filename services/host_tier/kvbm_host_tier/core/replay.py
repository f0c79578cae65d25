"""A replay: changes of one instance that are applied again on top of an older base, newest first.

An event that follows a gap is applied at once. When a snapshot or the missing event arrives later,
it is older: the newer changes are replayed above it, a piece per step. For each block the newest
change wins, whether it arrives before or during the replay. So no block that has left comes back
for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from heapq import heappop, heappush
from typing import assert_never

from kvbm_common.identity import IdentityError, SequenceHash, hashes_from_hex
from kvbm_common.tier.block_lookup import BlockLookup
from kvbm_common.wire.events import Cleared, Event, Removed, Stored

from kvbm_host_tier.core.blocks_below import Life
from kvbm_host_tier.core.lower_snapshot import LowerSnapshot


@dataclass(frozen=True, slots=True)
class BlockChange:
    """The blocks that an event, or a piece of a snapshot, stores or removes."""

    epoch: int
    seq: int
    names: list[SequenceHash]
    _: KW_ONLY
    stores: bool
    """True if the change stores the blocks; False: it removes them."""
    block_bytes: int = 0
    namespace: bytes = b""
    malformed: bool = False
    """Valid JSON, and no hashes in it: a snapshot has the blocks that it should have named."""


def change_of(event: Event) -> BlockChange:
    """Return what an event stores or removes; a clear and a malformed event list no block."""
    epoch, seq = event.epoch, event.seq
    try:
        match event:
            case Stored(runs=runs):
                names = hashes_from_hex([text for run in runs for text in run.hashes])
                namespace = bytes.fromhex(event.namespace)
                return BlockChange(
                    epoch, seq, names,
                    stores=True, block_bytes=event.block_bytes, namespace=namespace,
                )  # fmt: skip
            case Removed(hashes=hashes):
                return BlockChange(epoch, seq, hashes_from_hex(hashes), stores=False)
            case Cleared():
                return BlockChange(epoch, seq, [], stores=False)
            case _:
                assert_never(event)
    except IdentityError:
        return BlockChange(epoch, seq, [], stores=False, malformed=True)


class Replay:
    """The changes of one instance that are still to be applied again, and those made meanwhile."""

    def __init__(
        self,
        seq: int = 0,
        snapshot: Iterator[BlockChange] | None = None,
        former: Life | None = None,
    ) -> None:
        """Begin with the pieces of a snapshot as of `seq`, or with events alone; `former` is the
        life before it, whose blocks count until the end."""
        assert seq >= 0, f"a snapshot of event {seq}"
        self.former = former
        self._changes: list[tuple[int, BlockChange]] = []
        """A heap, the newest first."""
        self._added: set[int] = set()
        self._snapshot = snapshot or iter(())
        self._begun = self._latest = seq
        self._newest: BlockLookup[int] = BlockLookup()
        """Block → the newest event of it that was applied since this began."""

    def add(self, changes: Iterable[BlockChange]) -> None:
        """Apply these again, unless they were added before."""
        for change in changes:
            if change.seq not in self._added:
                self._added.add(change.seq)
                self._latest = max(self._latest, change.seq)
                heappush(self._changes, (-change.seq, change))

    def next_piece(self) -> BlockChange | None:
        """Return what to apply next; None: that was all."""
        return heappop(self._changes)[1] if self._changes else next(self._snapshot, None)

    def not_superseded(self, change: BlockChange) -> list[SequenceHash]:
        """Return the blocks of a change that have no newer one, and note that this is it."""
        newest = self._newest.get
        names = change.names
        if self._newest:
            names = [name for name in names if (at := newest(name)) is None or at < change.seq]
        assert len(names) <= len(change.names), f"event {change.seq}: {len(change.names)} blocks"
        if change.seq > self._begun:  # A snapshot lists each block once.
            self._newest.set(names, change.seq)
            self._latest = max(self._latest, change.seq)
        return names

    def supersede(self, names: list[SequenceHash]) -> None:
        """Note that these blocks have changed since the latest event that was added or applied."""
        self._newest.set(names, self._latest)


def pieces_of(snapshot: LowerSnapshot, blocks_max: int) -> Iterator[BlockChange]:
    """Yield the blocks of a snapshot, at most so many at a time."""
    epoch, seq = snapshot.epoch, snapshot.seq
    for part in snapshot.parts:
        for names in part.pieces(blocks_max):
            assert names, f"an empty piece of the snapshot of event {seq}"
            yield BlockChange(
                epoch, seq, names,
                stores=True, block_bytes=part.block_bytes, namespace=part.namespace,
            )  # fmt: skip
