"""The lists of who has a first block: what is in them in vain is removed in parts."""

from __future__ import annotations

import pytest
from kvbm_index.core.chains import Chains
from kvbm_index.core.holdings import BLOCKS_PER_START, STARTS_MIN, Holdings
from kvbm_index.core.image import HolderTuple

from tests.libs.helpers import name

ROOM = 4 * BLOCKS_PER_START
ROOT = bytes(16)


def test_no_step_looks_through_all_first_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder has more chains than the table keeps in vain, and loses most of them."""
    looks, original = 0, Chains.begins_with

    def counted(self: Chains, block: bytes) -> bool:
        nonlocal looks
        looks += 1
        return original(self, block)

    monkeypatch.setattr(Chains, "begins_with", counted)
    holder: HolderTuple = ("h", "host-tier-0", "host", 0, 0)
    holdings = Holdings()
    chains = [name(number) for number in range(1, 2 * STARTS_MIN + 1)]
    for first in chains:
        holdings.add(holder, ROOT, first, rooted=True)
    assert looks == 0
    for first in chains[10:]:
        holdings.discard(holder, first)
    steps, is_tidy = 0, False
    while not is_tidy:
        looks, steps = 0, steps + 1
        is_tidy = holdings.tidy(ROOM)
        assert looks <= ROOM // BLOCKS_PER_START
    assert steps > STARTS_MIN // 4
    assert holdings.start_count == 10
    holdings.check()
