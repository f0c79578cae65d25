"""Committed table: what was added and not removed is listed, on both sides of a shared file."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.memory.arena import ArenaUnavailable
from kvbm_common.memory.committed_table import ROW_TAGS, CommittedTable, CommittedTableReader


def block(row: int, tag: int) -> SequenceHash:
    """A name by its halves."""
    return SequenceHash(np.array([row, tag], np.uint64).tobytes())


def listed(reader: CommittedTableReader, *names: SequenceHash) -> list[bool]:
    """What the reader sees."""
    found = [reader.has_all([name]) for name in names]
    assert reader.has_all(names) is all(found)
    return found


def test_what_is_added_is_listed_until_it_is_removed(tmp_path: Path) -> None:
    """Also twice."""
    table = CommittedTable.create(str(tmp_path / "a"), slot_count=8, epoch=3)
    reader = CommittedTableReader(str(tmp_path / "a"), 3)
    one, two, three = block(1, 10), block(1, 11), block(2, 12)
    assert listed(reader, one, two, three) == [False] * 3
    assert table.add([one, three, one]) == 0
    assert listed(reader, one, two, three) == [True, False, True]
    table.remove([one, two])
    assert listed(reader, one, two, three) == [False, False, True]
    table.clear()
    assert listed(reader, three) == [False]
    assert CommittedTableReader(str(tmp_path / "a"), 3).epoch == 3
    table.close()


def test_a_full_row_lists_no_more(tmp_path: Path) -> None:
    """What has no room is counted, and removing it removes nobody else."""
    table = CommittedTable.create(str(tmp_path / "a"), slot_count=64, epoch=1)
    reader = CommittedTableReader(str(tmp_path / "a"), 1)
    names = [block(5, tag) for tag in range(1, ROW_TAGS + 3)]
    assert table.add(names) == 2
    assert listed(reader, *names) == [True] * ROW_TAGS + [False] * 2
    table.remove(names[-1:])
    assert listed(reader, *names[:ROW_TAGS]) == [True] * ROW_TAGS
    table.close()


@pytest.mark.parametrize("slot_count", [1, 2, 3, 100, 4096])
def test_a_full_arena_fits(tmp_path: Path, slot_count: int) -> None:
    """As many random names as there are slots, a few of which may find their row full; then half
    of them go and others come. It agrees with a set."""
    rng = random.Random(slot_count)
    table = CommittedTable.create(str(tmp_path / "a"), slot_count=slot_count, epoch=1)
    reader = CommittedTableReader(str(tmp_path / "a"), 1)
    names = [SequenceHash(rng.randbytes(16)) for _ in range(2 * slot_count)]
    unlisted = table.add(names[:slot_count])
    table.remove(names[: slot_count // 2])
    unlisted += table.add(names[slot_count : slot_count + slot_count // 2])
    here = set(names[slot_count // 2 : slot_count + slot_count // 2])
    found = {name for name, there in zip(names, listed(reader, *names), strict=True) if there}
    assert found <= here
    assert len(here) - len(found) <= unlisted <= slot_count // 1000 + 1
    table.close()


def test_another_life_is_not_read(tmp_path: Path) -> None:
    """Nor what is no table at all."""
    table = CommittedTable.create(str(tmp_path / "a"), slot_count=8, epoch=3)
    with pytest.raises(ArenaUnavailable, match="epoch 4"):
        CommittedTableReader(str(tmp_path / "a"), 4)
    table.close()
    with pytest.raises(ArenaUnavailable, match="cannot map"):
        CommittedTableReader(str(tmp_path / "a"), 3)
    for size in (0, 1, 64, 128 + 64, 4096):
        (tmp_path / "b-roster").write_bytes(bytes(size))
        with pytest.raises(ArenaUnavailable):
            CommittedTableReader(str(tmp_path / "b"), 0)
