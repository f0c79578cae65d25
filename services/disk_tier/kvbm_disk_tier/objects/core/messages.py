"""What the object tier's core takes in beside the disk tier's inputs."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.tier.slots import Block


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """An object of a listing whose name and size are those of a block."""

    block: Block
    age_ms: int


@dataclass(frozen=True, slots=True)
class ListingBegun:
    """A listing has begun: from now on ObjectsListed tell what the bucket holds."""


@dataclass(frozen=True, slots=True)
class ObjectsListed:
    """One page of a listing."""

    objects: tuple[ListedBlock, ...]


@dataclass(frozen=True, slots=True)
class ListingEnded:
    """The listing is over; `complete`: what it did not name is not there."""

    complete: bool


ObjectInput = ListingBegun | ObjectsListed | ListingEnded
