"""What the object tier's core takes in beside the disk tier's inputs."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.slots import Block


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """An object of a listing whose name and size are those of a block."""

    block: Block
    age_ms: int


@dataclass(frozen=True, slots=True)
class ListingBegun:
    """From now on ObjectsListed tell what the bucket holds."""


@dataclass(frozen=True, slots=True)
class ObjectsListed:
    """One page of it."""

    objects: tuple[ListedBlock, ...]


@dataclass(frozen=True, slots=True)
class ListingEnded:
    """The listing is over; `complete`: what it did not name is not there."""

    complete: bool


ObjectInput = ListingBegun | ObjectsListed | ListingEnded
