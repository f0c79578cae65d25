"""Planted bugs of the miss filter: names that are forgotten, or leave too early."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import Block
from kvbm_host_tier.core.filter_messages import FilterEffect
from kvbm_host_tier.core.findable import Findable
from kvbm_host_tier.core.held_blocks import HeldBlocks

from tests.sim.plant import ONE_HOST, TWO_HOSTS, Plant

FOUND = "a lookup finds it|were not there|was not there|names can be found"


def forget_commits(patch: pytest.MonkeyPatch) -> None:
    """What is offloaded is not told to the filter."""
    commit, add = HeldBlocks.commit, Findable.add
    forgotten: set[SequenceHash] = set()

    def planted(held: HeldBlocks, arrived: Sequence[tuple[int, Block]], now_ms: int) -> None:
        forgotten.update(block.hash for _, block in arrived)
        commit(held, arrived, now_ms)
        forgotten.clear()

    def told(findable: Findable, names: Iterable[SequenceHash], *, in_tables: bool = False) -> None:
        add(findable, [name for name in names if name not in forgotten], in_tables=in_tables)

    patch.setattr(HeldBlocks, "commit", planted)
    patch.setattr(Findable, "add", told)
    count_nothing(patch)


def tell_a_name_once(patch: pytest.MonkeyPatch) -> None:
    """A name that another tier has already is not counted again."""
    add = Findable.add

    def planted(
        findable: Findable, names: Iterable[SequenceHash], *, in_tables: bool = False
    ) -> None:
        known = {name for held in findable.name_sets() for name in held}
        known.update(SequenceHash(name) for table in findable.tables for name in table)
        add(findable, [name for name in names if name not in known], in_tables=in_tables)

    patch.setattr(Findable, "add", planted)
    count_nothing(patch)


def overlook_peers(patch: pytest.MonkeyPatch) -> None:
    """The filter counts as complete where peers have blocks."""
    settle = Findable.settle

    def planted(findable: Findable, *, is_complete: bool) -> list[FilterEffect]:
        return settle(findable, is_complete=True)

    patch.setattr(Findable, "settle", planted)


def count_nothing(patch: pytest.MonkeyPatch) -> None:
    """Leave the finding to what is read: the count of names shows any of this at once."""
    patch.setattr(Findable, "check", lambda _findable: None)


FILTER = {"filters": True}
PLANTS = (
    Plant("a commit is not in the filter", forget_commits, FOUND, {**ONE_HOST, **FILTER}),
    Plant("a name is in the filter once", tell_a_name_once, FOUND,
          {**ONE_HOST, **FILTER, "host_slots": 12}),
    Plant("the filter overlooks peers", overlook_peers, FOUND, {**TWO_HOSTS, **FILTER}),
)  # fmt: skip
