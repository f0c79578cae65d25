"""The plan of a lookup over several KV groups: which blocks an answer would lease.

The plan is made for the largest boundary for which every block is here, below, or on its way. Its
blocks are then a run like that of any lookup, which is brought as a whole. Where a block does not
come, the plan falls back on the largest boundary for which all blocks are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from operator import add

from kvbm_common.identity import BLOCK_TOKENS_MAX, IdentityError, SequenceHash
from kvbm_common.tier.kv_groups import (
    CHUNK_TOKENS_MAX,
    GROUPS_MAX,
    WINDOW_BLOCKS_MAX,
    GroupRun,
    Has,
    Reach,
    boundary_tokens,
    largest_boundary,
    needed_names,
    reach,
    split,
)

from kvbm_host_tier.core.presence import Available

FLIPPED = b"\1" + bytes(255)
"""Turns what a `Has` tells into its opposite, in C."""
TRIES_MAX = 16
"""Boundaries that are tried where there is no room for a plan: at one that fits, blocks of a window
may be missing."""


@dataclass(slots=True)
class GroupPlan:
    """The blocks that a lookup asks for, group by group, and how far it reaches."""

    groups: Sequence[GroupRun]
    names: Sequence[Sequence[SequenceHash]]
    largest: int
    """The tokens of the largest boundary that is asked for."""
    reach: Reach

    @classmethod
    def of(cls, groups: Sequence[GroupRun], hashes: Sequence[SequenceHash]) -> GroupPlan:
        """Return a plan that reaches nothing yet. Raises IdentityError for groups that do not fit
        the hashes."""
        _require_groups(groups, len(hashes))
        return cls(groups, split(groups, hashes), largest_boundary(groups), Reach(0, 0))

    def choose(self, available: Available) -> list[SequenceHash]:
        """Set the reach to the largest hit whose blocks are here or may come.

        Return the blocks of the largest hit that is here, if it is shorter: they stay pinned while
        the lookup waits.
        """
        groups, names = self.groups, self.names
        any_comes = False

        def look(asked: Sequence[SequenceHash]) -> bytes:
            nonlocal any_comes
            found = available.here(asked)
            assert len(found) == len(asked), f"{len(found)} of {len(asked)} blocks were looked at"
            if not any_comes and 0 in found:
                missing = [*compress(asked, found.translate(FLIPPED))] if 1 in found else asked
                any_comes = 1 in available.may_come(missing)
            return found

        self.reach = here = reach(groups, names, look)
        if any_comes:  # Each larger hit needs a block that was looked for in vain.
            self.reach = reach(groups, names, available.may_come, shared=here.shared)
        assert here.tokens <= self.reach.tokens <= self.largest, f"{self.reach} of {self.largest}"
        is_longer = here.tokens < self.reach.tokens
        return needed_names(groups, names, here.tokens) if is_longer else []

    def shorten(self, room: int, available: Available) -> None:
        """Choose a lower reach, at which `room` slots are enough for the blocks to be brought."""
        assert room >= 0, f"{room} slots"
        step, shared, tokens = boundary_tokens(self.groups), self.reach.shared, self.reach.tokens
        wanted = self._slots_wanted(available.takes_slot, step)
        for _ in range(TRIES_MAX):
            fitting = range(tokens // step, -1, -1)
            most = step * next(at for at in fitting if wanted[at] <= room)
            tokens = reach(
                self.groups, self.names, available.may_come, most=most, shared=shared
            ).tokens
            if tokens == most:
                break
        else:
            tokens = reach(self.groups, self.names, available.here, most=tokens).tokens
        assert tokens <= self.reach.tokens, f"{tokens} tokens are more than {self.reach}"
        self.reach = Reach(tokens, shared)

    def _slots_wanted(self, takes_slot: Has, step: int) -> list[int]:
        """Return how many slots a hit takes at each boundary: 0, `step`, … up to the plan's."""
        assert self.reach.tokens % step == 0, f"{self.reach} is no boundary"
        boundaries = range(0, self.reach.tokens + 1, step)
        wanted = [0] * len(boundaries)
        for group, names in zip(self.groups, self.names, strict=True):
            size, window = group.block_tokens, group.window_blocks
            end = self.reach.tokens // size
            counts = [0, *accumulate(takes_slot(names[:end]))]
            if group.chunk_tokens:
                before = [counts[group.first_needed(tokens)] for tokens in boundaries]
            elif window:
                before = [counts[max(0, at - window)] for at in range(0, end + 1, step // size)]
            else:
                before = [0] * len(boundaries)
            pairs = zip(counts[:: step // size], before, strict=True)
            taken = [upto - earlier for upto, earlier in pairs]
            wanted = list(map(add, wanted, taken))
        return wanted

    def fall_back(self, here: Has, blocks_max: int | None = None) -> None:
        """Reach as far as blocks go that are here, with a hit of at most `blocks_max`; what was
        shared stays known."""
        most, shared = self.reach.tokens, self.reach.shared
        while True:
            tokens = reach(self.groups, self.names, here, most=most).tokens
            assert tokens <= most, f"{tokens} tokens are more than {most}"
            self.reach = Reach(tokens, shared)
            count = len(self.needed())
            if blocks_max is None or count <= blocks_max:
                return
            most = tokens * blocks_max // count

    @property
    def is_short(self) -> bool:
        """Return whether the plan reaches less far than the engine asks."""
        return self.reach.tokens < self.largest

    @property
    def asked(self) -> int:
        """Return how many blocks were asked for: those of the plan and those that it misses.

        At the end of a chunk a hit of all tokens needs fewer blocks than a shorter one.
        """
        return len(self.needed()) + len(self.missed())

    def needed(self) -> list[SequenceHash]:
        """Return the blocks that the planned hit needs, group after group."""
        return needed_names(self.groups, self.names, self.reach.tokens)

    def missed(self) -> list[SequenceHash]:
        """Return the blocks that a hit of all tokens would need beside those of the plan."""
        if not self.is_short:
            return []
        planned = set(self.needed())
        wanted = needed_names(self.groups, self.names, self.largest)
        return [name for name in wanted if name not in planned]


def _require_groups(groups: Sequence[GroupRun], hash_count: int) -> None:
    if len(groups) > GROUPS_MAX:
        raise IdentityError(f"a lookup has at most {GROUPS_MAX} groups, got {len(groups)}")
    for group in groups:
        if not 1 <= group.block_tokens <= BLOCK_TOKENS_MAX:
            raise IdentityError(
                f"groups.block_tokens is {group.block_tokens}, must be 1..{BLOCK_TOKENS_MAX}"
            )
        if group.blocks < 0 or not 0 <= group.window_blocks <= WINDOW_BLOCKS_MAX:
            raise IdentityError(
                f"groups has {group.blocks} blocks and a window of {group.window_blocks}, "
                f"must be ≥ 0 and 0..{WINDOW_BLOCKS_MAX}"
            )
        if not 0 <= group.chunk_tokens <= CHUNK_TOKENS_MAX or (
            group.window_blocks and group.chunk_tokens
        ):
            raise IdentityError(
                f"groups.chunk_tokens is {group.chunk_tokens} beside a window of "
                f"{group.window_blocks}, must be 0..{CHUNK_TOKENS_MAX}, and 0 beside a window"
            )
        if group.offset < 0:
            raise IdentityError(f"groups.offset is {group.offset}, must be ≥ 0")
    if sum(group.blocks for group in groups) != hash_count:
        raise IdentityError(f"groups must have {hash_count} blocks in all, as many as hashes")
