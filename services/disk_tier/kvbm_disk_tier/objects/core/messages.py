"""Messages: the inputs of the object tier's core beside those of the disk tier."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.tier.slots import Block

from kvbm_disk_tier.objects.core.ranges import WHOLE, Ranges


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """An object of a listing whose name and size are those of a block."""

    block: Block
    age_ms: int


@dataclass(frozen=True, slots=True)
class ListingBegun:
    """A listing has begun: from now on ObjectsListed tell what the store holds.

    `namespaces`: blocks of no others are looked for, since the list of folders was incomplete.
    None: all are. A block whose namespace has no folder is missing then.
    """

    ranges: Ranges = WHOLE
    namespaces: frozenset[bytes] | None = None


@dataclass(frozen=True, slots=True)
class ObjectsListed:
    """One page of a range. A page may come twice."""

    objects: tuple[ListedBlock, ...]
    number: int = 0


@dataclass(frozen=True, slots=True)
class RangeListed:
    """A range is listed to its end: what it has not named of the table is not there."""

    number: int = 0
    is_whole: bool = True
    """False: something was left out that could not be read, so nothing of the range is missing."""


@dataclass(frozen=True, slots=True)
class ListingStalled:
    """A page could not be had; the listing goes on from there."""


@dataclass(frozen=True, slots=True)
class SlotsCompared:
    """Every range is listed: look at `count` slots of the table from `first` on."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class ListingEnded:
    """All slots were looked at: what is missing is believed, or waits for the next listing."""


@dataclass(frozen=True, slots=True)
class GoneLost:
    """Lose what is gone of `count` slots of the table from `first` on."""

    first: int
    count: int


ObjectInput = (
    ListingBegun
    | ObjectsListed
    | RangeListed
    | ListingStalled
    | SlotsCompared
    | ListingEnded
    | GoneLost
)
