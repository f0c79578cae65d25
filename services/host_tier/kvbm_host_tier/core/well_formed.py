"""Well-formed lists of blocks: what engines and operators send, checked before any lookup."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_common.identity import IdentityError, SequenceHash
from kvbm_common.wire.index_verbs import MATCH_BLOCKS_MAX
from kvbm_common.wire.local import Lookup

from kvbm_host_tier.core.known_runs import Run


def require_lookup(lookup: Lookup, run: Run) -> None:
    """Raise IdentityError for a lookup that is longer than it may be, or asks for no chain."""
    if len(run.names) > MATCH_BLOCKS_MAX or len(lookup.namespace) != 32:
        raise IdentityError(f"a lookup has at most {MATCH_BLOCKS_MAX} hashes and a namespace")
    # Other names have other slots, whose numbers are compared in half of the time.
    require_chain(run.names if len(run.slots) < len(run.names) else run.slots)


def require_chain(blocks: Sequence[SequenceHash] | Sequence[int]) -> None:
    """Raise IdentityError for a list that has a block, or its slot, twice."""
    if len(set(blocks)) != len(blocks):
        raise IdentityError("a chain cannot hold the same block twice")
