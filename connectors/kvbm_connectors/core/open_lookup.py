"""The states of a lookup, and what is known of one until it is over.

The table is drawn in `docs/state_machines.md`. A lookup that the host tier's miss filter answers is
FOUND at once, with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.kv_groups import GroupRun, needed_names, split
from kvbm_common.tier.machine import Machine
from kvbm_common.wire.local import Found


class LookupState(Enum):
    """The states of a lookup."""

    ASKED = "asked"
    FOUND = "found"
    LOADING = "loading"
    LOST = "lost"


LOOKUP = Machine(
    "connector's lookup",
    {
        (None, "asked"): LookupState.ASKED,
        (None, "filter says no"): LookupState.FOUND,
        (LookupState.ASKED, "found"): LookupState.FOUND,
        (LookupState.ASKED, "no answer"): None,
        (LookupState.ASKED, "forgotten"): None,
        (LookupState.ASKED, "host tier gone"): None,
        (LookupState.FOUND, "taken"): LookupState.LOADING,
        (LookupState.FOUND, "lease ended"): None,
        (LookupState.FOUND, "load ended"): None,
        (LookupState.FOUND, "forgotten"): None,
        (LookupState.FOUND, "host tier gone"): LookupState.LOST,
        (LookupState.LOADING, "load ended"): None,
        (LookupState.LOADING, "asked again"): None,
        (LookupState.LOADING, "host tier gone"): None,
        (LookupState.LOST, "taken"): None,
        (LookupState.LOST, "load ended"): None,
        (LookupState.LOST, "forgotten"): None,
        (LookupState.LOST, "host tier gone"): LookupState.LOST,
    },
)


@dataclass(slots=True)
class OpenLookup:
    """One engine request's lookup, until it is over."""

    number: int
    """The id by which the host tier knows it."""
    hashes: tuple[SequenceHash, ...]
    asked: tuple[SequenceHash, ...]
    """The blocks that were asked for: the largest hit of them needs no avoided block."""
    answer_by_ms: int
    """The time at which the wait for the answer ends."""
    lease_until_ms: int
    """The time at which the lease ends, on our clock."""
    state: LookupState
    found: Found | None = None
    groups: tuple[GroupRun, ...] = ()
    """The cut of `asked` into KV groups, where there are several."""
    is_hoped_for: bool = False
    """The filter says that the first block may be there."""
    only_asks: bool = False
    """Nothing is to be loaded by it."""

    def names_of(self, found: Found) -> tuple[SequenceHash, ...]:
        """Return the names of the blocks of an answer, in the order of their slots."""
        if not self.groups:
            return self.asked[: len(found.slots)]
        return tuple(needed_names(self.groups, split(self.groups, self.asked), found.boundary))
