"""Runs of blocks for policies that have no shorter way with many than with one."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_common.identity import SequenceHash


class OneByOne:
    """A base that does for each block of a run what its policy does for one."""

    def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
        """Add a block that is free; see `EvictionPolicy`."""
        raise NotImplementedError

    def touch(self, block: SequenceHash) -> None:
        """Count a use; see `EvictionPolicy`."""
        raise NotImplementedError

    def hold(self, block: SequenceHash) -> None:
        """Mark a free block as in use; see `EvictionPolicy`."""
        raise NotImplementedError

    def free(self, block: SequenceHash) -> None:
        """Mark a held block as no longer in use; see `EvictionPolicy`."""
        raise NotImplementedError

    def admit_all(self, blocks: Sequence[SequenceHash], parents: Sequence[SequenceHash]) -> None:
        assert len(parents) == len(blocks), f"{len(blocks)} blocks, {len(parents)} parents"
        for block, parent in zip(blocks, parents, strict=True):
            self.admit(block, parent)
            self.hold(block)
        for block in reversed(blocks):
            self.free(block)

    def touch_all(self, blocks: Sequence[SequenceHash]) -> None:
        for block in blocks:
            self.touch(block)

    def hold_all(self, blocks: Sequence[SequenceHash]) -> None:
        for block in blocks:
            self.hold(block)

    def free_all(self, blocks: Sequence[SequenceHash]) -> None:
        for block in blocks:
            self.free(block)

    def renew_all(self, blocks: Sequence[SequenceHash]) -> None:
        """Do nothing: age is not what such a policy goes by."""
