"""Snapshot loader: makes chains of a snapshot, piece by piece, beside the core.

A million blocks take half a second, and no question may wait so long. The core takes the finished
chains in one step.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbm_common.identity import HASH_BYTES, IdentityError
from kvbm_common.wire.verbs import SnapshotReply

from kvbm_index.core.chains import Chains
from kvbm_index.core.event_decoder import named_runs
from kvbm_index.core.image import HolderTuple

PIECE_BLOCKS = 2_048
"""Blocks that are taken in at a time, in some 1.5 ms."""


class SnapshotLoader:
    """Chains by holder, made of a snapshot."""

    def __init__(self, snapshot: SnapshotReply) -> None:
        self.snapshot = snapshot
        self.chains: dict[HolderTuple, Chains] = {}
        self.malformed = False
        """The snapshot contains an invalid hash."""
        self._pieces = self._make()

    def __repr__(self) -> str:
        return f"SnapshotLoader({self.snapshot!r})"

    def go_on(self, blocks: int = PIECE_BLOCKS) -> bool:
        """Continue with about so many blocks; return whether the snapshot is loaded.

        A malformed snapshot ends it, too.
        """
        assert blocks > 0, f"a piece of {blocks} blocks"
        try:
            for done in self._pieces:
                blocks -= done
                if blocks <= 0:
                    return False
        except IdentityError:
            self.malformed = True
        return True

    def _make(self) -> Iterator[int]:
        """Yield after each piece how many blocks it was worth; raises IdentityError."""
        snapshot = self.snapshot
        for part in snapshot.parts:
            holder = (snapshot.host, snapshot.source, snapshot.tier, part.rank, part.group)
            chains = self.chains.setdefault(holder, Chains())
            for run in part.runs:
                for parent, blocks, rooted in named_runs([run], part.namespace):
                    chains.add(parent, blocks, rooted=rooted)
                    yield 1 + len(blocks) // HASH_BYTES
        for chains in self.chains.values():
            left = 0
            while not left:
                left = chains.index_some(PIECE_BLOCKS)
                assert left <= PIECE_BLOCKS, f"{left} of {PIECE_BLOCKS} blocks are left"
                yield PIECE_BLOCKS - left
