"""Messages of the scrubber's core: reads that it wants (effects), their results (inputs)."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import Block

# --- effects --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScrubSlots:
    """Compare what begins at these places of the arena at `path` with the blocks' checksums.

    Ends in ScrubDone or ScrubFailed. The slots are not pinned: other bytes may come into them.
    """

    path: str
    slots: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class ScrubFound:
    """These blocks did not have their checksums, and are discarded: say so in the log."""

    names: tuple[SequenceHash, ...]


ScrubEffect = ScrubSlots | ScrubFound


# --- inputs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScrubDone:
    """The slots were read; those at `wrong`, indices of them, held other bytes."""

    wrong: tuple[int, ...]
    cpu_us: int
    """Processor time that it took."""


@dataclass(frozen=True, slots=True)
class ScrubFailed:
    """The arena could not be read."""

    reason: str


ScrubInput = ScrubDone | ScrubFailed
