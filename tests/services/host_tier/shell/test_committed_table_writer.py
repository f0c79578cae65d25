"""Committed table: what is announced is listed, what is gone is not, and no table is no harm."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.memory.arena import ArenaUnavailable
from kvbm_common.memory.committed_table import CommittedTableReader
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slots import Block
from kvbm_host_tier.core.core import HostTierCore
from kvbm_host_tier.core.messages import ArenaInfo, FromEngine
from kvbm_host_tier.core.view import HostTierView
from kvbm_host_tier.shell.committed_table_writer import CommittedTableWriter

from tests.services.host_tier.helpers import hello

EPOCH = 9
SLOT_BYTES = 4096


def block(number: int) -> Block:
    """One of a few."""
    name = SequenceHash(number.to_bytes(8, "little") * 2)
    return Block(name, SequenceHash(bytes(16)), bytes(32), 1, SLOT_BYTES)


def view_of(path: Path) -> HostTierView:
    """The view of a core whose arena has four slots, and no block yet."""
    arena = ArenaInfo(str(path), 4096, 4 * SLOT_BYTES, b"")
    core = HostTierCore(host="h", instance="0", epoch=EPOCH, arena=arena)
    core.step(FromEngine(b"1", hello(piece_bytes=SLOT_BYTES)), 1)
    assert core.view.layout == Layout(SLOT_BYTES, 4, 1)
    return core.view


@pytest.fixture
def announcer() -> Announcer:
    """What numbers the events."""
    return Announcer(host="h", source="host-tier-0", tier="host", epoch=EPOCH)


def test_it_lists_what_is_announced(announcer: Announcer, tmp_path: Path) -> None:
    """1. Before the first block there is none. 2. Blocks come, some go, and in the end all do."""
    arena = tmp_path / "arena"
    keeper = CommittedTableWriter(view_of(arena), Metrics())
    keeper.follow(announcer.cleared("start"))
    with pytest.raises(ArenaUnavailable):
        CommittedTableReader(str(arena), EPOCH)
    for event in announcer.stored([block(1), block(2)]):
        keeper.follow(event)
    reader = CommittedTableReader(str(arena), EPOCH)
    assert reader.has_all([block(1).hash, block(2).hash])
    [removed] = announcer.removed([block(1)], "evicted")
    keeper.follow(removed)
    assert not reader.has_all([block(1).hash])
    assert reader.has_all([block(2).hash])
    keeper.follow(announcer.cleared("stop"))
    assert not reader.has_all([block(2).hash])
    keeper.close()
    assert not list(tmp_path.iterdir())


def test_without_room_for_it_engines_ask(
    announcer: Announcer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and not tried again with every block."""
    keeper = CommittedTableWriter(view_of(Path("/nowhere/arena")), Metrics())
    for number in range(2):
        for event in announcer.stored([block(number)]):
            keeper.follow(event)
    assert [text for text in caplog.messages if "no committed table" in text] == caplog.messages
    assert len(caplog.messages) == 1
    keeper.close()
