"""The roster keeper: what is announced is listed, what is gone is not, and no roster is no harm."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvbm_common.arena import ArenaUnavailable
from kvbm_common.counters import Counters
from kvbm_common.identity import SequenceHash
from kvbm_common.roster import RosterReader
from kvbm_common.slots import Block
from kvbm_host_tier.messages import ArenaInfo
from kvbm_host_tier.roster_keeper import RosterKeeper
from kvbm_host_tier.tier import Limits, Tier

EPOCH = 9
SLOT_BYTES = 4096


def block(number: int) -> Block:
    """One of a few."""
    name = SequenceHash(number.to_bytes(8, "little") * 2)
    return Block(name, SequenceHash(bytes(16)), bytes(32), 1, SLOT_BYTES)


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    """Four slots; nobody has stored anything."""
    arena = ArenaInfo(str(tmp_path / "arena"), 4096, 4 * SLOT_BYTES, b"")
    tier = Tier(host="h", source="host-tier-0", epoch=EPOCH, arena=arena, limits=Limits())
    assert tier.format(SLOT_BYTES)
    return tier


def test_it_lists_what_is_announced(tier: Tier) -> None:
    """1. Before the first block there is none. 2. Blocks come, some go, and in the end all do."""
    keeper = RosterKeeper(tier, Counters())
    keeper.follow(tier.announcer.cleared("start"))
    with pytest.raises(ArenaUnavailable):
        RosterReader(tier.arena.path, EPOCH)
    for event in tier.announcer.stored([block(1), block(2)]):
        keeper.follow(event)
    reader = RosterReader(tier.arena.path, EPOCH)
    assert reader.has_all([block(1).hash, block(2).hash])
    [removed] = tier.announcer.removed([block(1)], "evicted")
    keeper.follow(removed)
    assert not reader.has_all([block(1).hash])
    assert reader.has_all([block(2).hash])
    keeper.follow(tier.announcer.cleared("stop"))
    assert not reader.has_all([block(2).hash])
    keeper.close()
    assert not list(Path(tier.arena.path).parent.iterdir())


def test_without_room_for_it_engines_ask(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and not tried again with every block."""
    tier.arena = ArenaInfo("/nowhere/arena", 4096, 4 * SLOT_BYTES, b"")
    keeper = RosterKeeper(tier, Counters())
    for number in range(2):
        for event in tier.announcer.stored([block(number)]):
            keeper.follow(event)
    assert [text for text in caplog.messages if "no roster" in text] == caplog.messages
    assert len(caplog.messages) == 1
    keeper.close()
