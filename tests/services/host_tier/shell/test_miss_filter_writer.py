"""The writer of the miss filter: a reader sees each change, and the next filter when one ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.memory.arena import ArenaUnavailable
from kvbm_common.memory.miss_filter import FilterState, MissFilterReader, map_file, owner_of
from kvbm_host_tier.core.core import HostTierCore
from kvbm_host_tier.core.filter_messages import (
    FilterFailed,
    MakeFilter,
    NamesChanged,
    SwitchFilter,
    UseFilter,
)
from kvbm_host_tier.core.messages import ArenaInfo
from kvbm_host_tier.shell.miss_filter_writer import MissFilterWriter

from tests.services.host_tier.helpers import name

EPOCH = 9
OWNER = owner_of("h", "host-tier-0")


def writer_beside(arena: Path) -> MissFilterWriter:
    """Return the writer of a core with this arena."""
    if arena.parent.exists():
        arena.touch()
    info = ArenaInfo(str(arena), 4096, 4096, b"")
    core = HostTierCore(host="h", instance="0", epoch=EPOCH, arena=info)
    return MissFilterWriter(core.view, "h", "host-tier-0")


def make(writer: MissFilterWriter, generation: int, capacity: int, *names: SequenceHash) -> None:
    """Make a filter with these names, and use it."""
    writer.carry_out(MakeFilter(generation, capacity))
    writer.carry_out(NamesChanged(names, (), is_new=True))
    writer.carry_out(UseFilter())


def read(arena: Path, generation: int) -> MissFilterReader:
    """Return a reader of one generation. Raises ArenaUnavailable."""
    return MissFilterReader(map_file(str(arena), generation), owner=OWNER, epoch=EPOCH)


def found(reader: MissFilterReader, *wanted: SequenceHash) -> list[bool]:
    """Return what the filter does not deny."""
    return [not reader.denies_any([one]) for one in wanted]


def test_a_reader_sees_each_change(tmp_path: Path) -> None:
    """1. Before the first filter there is no file. 2. Names come and leave. 3. The end."""
    arena = tmp_path / "arena"
    writer = writer_beside(arena)
    writer.carry_out(NamesChanged((name(1),), ()))
    with pytest.raises(ArenaUnavailable):
        read(arena, 1)
    make(writer, 1, 64, name(1))
    reader = read(arena, 1)
    assert found(reader, name(1), name(2)) == [True, True]
    writer.carry_out(SwitchFilter(is_complete=True))
    assert found(reader, name(1), name(2)) == [True, False]
    writer.carry_out(NamesChanged((name(2),), (name(1),)))
    assert found(reader, name(1), name(2)) == [False, True]
    writer.carry_out(SwitchFilter(is_complete=False))
    assert reader.state is FilterState.PARTIAL
    writer.close()
    assert (reader.state, reader.next_generation) == (FilterState.ENDED, 0)
    assert [*tmp_path.iterdir()] == [arena]


def test_a_larger_filter_ends_the_one_before(tmp_path: Path) -> None:
    arena = tmp_path / "arena"
    writer = writer_beside(arena)
    make(writer, 1, 1, name(1))
    writer.carry_out(SwitchFilter(is_complete=True))
    first = read(arena, 1)
    writer.carry_out(MakeFilter(2, 64))
    writer.carry_out(NamesChanged((name(1), name(2)), (), is_new=True))
    assert (first.state, first.next_generation) == (FilterState.COMPLETE, 0), "it is still in use"
    assert read(arena, 2).state is FilterState.PARTIAL
    writer.carry_out(UseFilter())
    writer.carry_out(SwitchFilter(is_complete=True))
    assert (first.state, first.next_generation) == (FilterState.ENDED, 2)
    assert found(read(arena, 2), name(1), name(2), name(3)) == [True, True, False]
    assert {one.name for one in tmp_path.iterdir()} == {"arena", "arena-names-2"}
    writer.close()


def test_without_room_for_it_engines_ask_until_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1. Its directory is away: said once. 2. It is there: the same generation is made."""
    caplog.set_level("INFO")
    arena = tmp_path / "away" / "arena"
    writer = writer_beside(arena)
    for _ in range(3):
        assert writer.carry_out(MakeFilter(1, 64)) == FilterFailed(1)
        writer.carry_out(NamesChanged((name(1),), (), is_new=True))
        writer.carry_out(UseFilter())
        writer.carry_out(SwitchFilter(is_complete=True))
    [text] = caplog.messages
    assert "no miss filter for 64 names: it is tried again" in text
    arena.parent.mkdir()
    arena.touch()
    make(writer, 1, 64, name(1))
    writer.carry_out(SwitchFilter(is_complete=True))
    assert found(read(arena, 1), name(1), name(2)) == [True, False]
    assert caplog.messages[1:] == ["the miss filter has room for 64 names now"]
    writer.close()
