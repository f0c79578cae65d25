"""Memory and files: slots full of content, and copies that tear what they overlap with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvbm_common.checksum import block_checksum

from tests.sim.world import Node, World

ROT = b"rot "
"""Content that begins so was changed by the world; no code of ours is to blame."""


class Memory:
    """Slots full of content. Content that is right for a block is the block's own name."""

    def __init__(self, world: World, slot_count: int) -> None:
        self._world = world
        self.slots = [self.garbage() for _ in range(slot_count)]

    def garbage(self) -> bytes:
        """Bytes that are like no others."""
        self._world.marks["garbage"] += 1
        return b"garbage %d" % self._world.marks["garbage"]

    def rot(self, slot: int) -> None:
        """The medium has lost what was there."""
        self.slots[slot] = ROT + self.garbage()

    def checksum(self, slot: int) -> int:
        """As the mover sums up what has arrived."""
        return block_checksum(self.slots[slot])


def copy(
    mover: Node,
    source: tuple[Memory, Sequence[int]],
    target: tuple[Memory, Sequence[int]],
    duration_ms: float,
) -> None:
    """Move slots. Each is torn for a random part of the time, and right at the end of that only if
    its source has not changed meanwhile. The death of the mover leaves it torn."""
    (read, sources), (write, targets) = source, target
    for one, other in zip(sources, targets, strict=True):
        begin_ms = mover.world.rng.uniform(0, duration_ms)
        left_ms = duration_ms - begin_ms
        mover.later(begin_ms, partial(_copy_slot, mover, (read, one), (write, other), left_ms))


def _copy_slot(
    mover: Node, source: tuple[Memory, int], target: tuple[Memory, int], left_ms: float
) -> None:
    (read, one), (write, other) = source, target
    seen = read.slots[one]
    write.slots[other] = write.garbage()

    def end() -> None:
        found = read.slots[one]
        whole = found == seen or found.startswith(ROT)
        write.slots[other] = found if whole else write.garbage()

    mover.later(mover.world.rng.uniform(0, left_ms), end)
