"""Slabs: the parts of a medium that are cut into slots of one size each, and their size classes.

    medium  | slab 0 | slab 1 | slab 2 | … |
    slab    | slot | slot | slot | … | a rest that is shorter than a slot |

A slab is FREE, or cut for one *size class*: blocks of so many bytes, rounded up to 4 KiB. A class
that has no free slot takes a FREE slab, or one that another class gives up (see `reclaim`). Slots
are numbered as slabs are cut. Where a slot begins in the medium is its *place*, in units of 4 KiB:
this number is what messages and records call a slot.
"""

from __future__ import annotations

from enum import Enum

from kvbm_common.eviction import EvictionPolicy
from kvbm_common.tier.machine import Machine
from kvbm_common.tier.tenants import Tenant


class SlabState(Enum):
    """The states of a slab."""

    FREE = "free"
    """Not cut into slots, and of no class."""
    CUT = "cut"
    LEAVING = "leaving"
    """Nothing is staged in it any more: it becomes FREE with the end of its last pin."""


SLAB = Machine(
    "slab",
    {
        (SlabState.FREE, "cut"): SlabState.CUT,
        (SlabState.CUT, "given up"): SlabState.FREE,
        (SlabState.CUT, "leave"): SlabState.LEAVING,
        (SlabState.LEAVING, "stay"): SlabState.CUT,
        (SlabState.LEAVING, "given up"): SlabState.FREE,
    },
)


class SizeClass:
    """The slots of one length, and the policies that choose victims among their blocks."""

    __slots__ = (
        "free_count", "open", "own_left", "policies", "policy", "slabs", "slot_bytes", "units",
    )  # fmt: skip

    def __init__(
        self, slot_bytes: int, units: int, policy: EvictionPolicy, unnamed: Tenant
    ) -> None:
        """Start without slabs; `policy` is for the blocks of `unnamed`."""
        assert units > 0, f"slots of {slot_bytes} bytes"
        self.slot_bytes = slot_bytes
        self.units = units
        self.policy = policy
        """The policy of engines that name no tenant: as a rule, of all."""
        self.policies = {unnamed: policy}
        """Tenant → policy; a named tenant gets one with its first block."""
        self.slabs: dict[int, Slab] = {}
        """Number → slab, in the order in which they were cut."""
        self.open: list[Slab] = []
        """The slabs that are CUT and have a RESET slot; the last one is used first."""
        self.free_count = 0
        """RESET slots of slabs that are CUT."""
        self.own_left = 0
        """Blocks of this class that may be evicted before slabs are compared again."""

    def __repr__(self) -> str:
        return f"SizeClass({self.slot_bytes} bytes, {len(self.slabs)} slabs)"

    @property
    def idle_count(self) -> int:
        """The blocks that can be evicted."""
        if len(self.policies) == 1:
            return len(self.policy)
        return sum(map(len, self.policies.values()))


class Slab:
    """A part of the medium, and the slots that it is cut into now."""

    __slots__ = (
        "first", "length", "number", "place", "reset", "retired", "retired_bytes", "size",
        "slot_count", "state", "usable",
    )  # fmt: skip

    def __init__(self, number: int, place: int, length: int) -> None:
        assert length > 0, f"slab {number} of {length} bytes"
        self.number, self.place, self.length = number, place, length
        self.state = SlabState.FREE
        self.size: SizeClass | None = None
        self.first = 0
        """Number of its first slot; the others follow."""
        self.slot_count = 0
        self.usable = 0
        """Slots that are not RETIRED."""
        self.reset: list[int] = []
        """RESET slots, a stack: low slots first."""
        self.retired: list[int] = []
        self.retired_bytes = 0
        """Bytes of the slab that are out of use, whatever its class is."""

    def __repr__(self) -> str:
        return f"Slab({self.number}, {self.state.name}, {self.size}, {len(self.reset)} reset)"

    @property
    def slots(self) -> slice:
        """The numbers of its slots."""
        return slice(self.first, self.first + self.slot_count)

    @property
    def is_empty(self) -> bool:
        """Tell whether no slot of the slab is in use."""
        return len(self.reset) == self.usable

    def room(self, size: SizeClass) -> int:
        """Return how many slots of a class it can have."""
        return (self.length - self.retired_bytes) // size.slot_bytes

    def be_cut(self, size: SizeClass, first: int) -> None:
        """Turn into slots of a class, numbered from `first` on; what is out of use comes last."""
        self.usable = self.room(size)
        assert self.usable > 0, f"{self} is too short for {size}"
        self._turn("cut")
        self.size, self.first, self.slot_count = size, first, self.length // size.slot_bytes
        usable_end = first + self.usable
        self.reset = list(range(usable_end - 1, first - 1, -1))
        self.retired = list(range(usable_end, first + self.slot_count))

    def be_free(self) -> None:
        """Leave the class: no slot is in use."""
        assert self.is_empty, f"{self} is given up, and {self.usable} slots could be in use"
        self._turn("given up")
        self.size, self.slot_count, self.usable = None, 0, 0
        self.reset, self.retired = [], []

    def leave(self) -> None:
        """Stop taking blocks into its slots."""
        self._turn("leave")

    def stay(self) -> None:
        """Take blocks into its slots again."""
        self._turn("stay")

    def _turn(self, event: str) -> None:
        self.state = SLAB.next(self.state, event, f"{self}")
