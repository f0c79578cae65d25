"""Planted bugs of KV groups: a hit with too few blocks, with another group's, or with a part."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.kv_groups import GroupRun, needed_names
from kvbm_connectors.core.messages import LoadResult

from tests.sim.kv_groups import GROUPINGS
from tests.sim.plant import ONE_HOST, WRONG_BYTES, Plant


def shorten_windows(patch: pytest.MonkeyPatch) -> None:
    """A hit has one block less than a window needs."""
    first_needed = GroupRun.first_needed

    def planted(run: GroupRun, tokens: int) -> int:
        return first_needed(run, tokens) + (run.window > 0)

    patch.setattr(GroupRun, "first_needed", planted)


def let_chunks_begin_late(patch: pytest.MonkeyPatch) -> None:
    """A chunk is counted from the first block that is asked for."""
    first_needed = GroupRun.first_needed

    def planted(run: GroupRun, tokens: int) -> int:
        if not run.chunk:
            return first_needed(run, tokens)
        return tokens // run.chunk * run.chunk // run.block_tokens

    patch.setattr(GroupRun, "first_needed", planted)


def answer_groups_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """The host tier leases the right blocks, the last group's first."""

    def planted(
        groups: Sequence[GroupRun], names: Sequence[Sequence[SequenceHash]], tokens: int
    ) -> list[SequenceHash]:
        return needed_names(groups[::-1], names[::-1], tokens)

    patch.setattr("kvbm_host_tier.core.group_plan.needed_names", planted)


def use_a_part_of_a_hit(patch: pytest.MonkeyPatch) -> None:
    """A load of several groups of which a block has failed counts as loaded."""

    def planted(result: LoadResult) -> int:
        return len(result.intact) if any(result.intact) else 0

    patch.setattr(LoadResult, "usable", property(planted))


WINDOW, _, STATE, CHUNK = GROUPINGS[:4]
SHORT = r"is for \d+ blocks up to"
CORRUPT = {"faults": ("rot arena",), "fault_every_ms": 300.0, "verified": True}
PLANTS = (
    Plant("a window is a block short", shorten_windows, SHORT, {**ONE_HOST, "groups": WINDOW}),
    Plant("a chunk begins late", let_chunks_begin_late, SHORT, {**ONE_HOST, "groups": CHUNK}),
    Plant("groups change their places", answer_groups_in_another_order, WRONG_BYTES,
          {**ONE_HOST, "groups": STATE}),
    Plant("a state is used without its KV", use_a_part_of_a_hit, WRONG_BYTES,
          {**ONE_HOST, **CORRUPT, "groups": STATE}),
)  # fmt: skip
