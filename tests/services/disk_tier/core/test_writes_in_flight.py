"""Writes in flight: one phase each, and no move that the table does not have."""

from __future__ import annotations

import pytest
from kvbm_common.tier.diary import Diary
from kvbm_common.tier.machine import InvalidTransition
from kvbm_disk_tier.core.write_batch import Phase, Write, WritesInFlight

from tests.services.disk_tier.helpers import HOST_EPOCH, name


def flying(diary: Diary | None = None) -> WritesInFlight:
    """Writes 1 and 2, both waiting for their lease."""
    writes = WritesInFlight(diary or Diary())
    for number in (1, 2):
        writes.begin(Write(number, "0", HOST_EPOCH, [name(number)]))
    return writes


def test_a_write_is_in_one_phase_and_leaves_with_its_blocks() -> None:
    writes = flying()
    second = writes.find(2)
    writes.move(second, "leased")
    writes.check()
    assert [write.id for write in writes.in_phase(Phase.LEASING)] == [1]
    assert [write.id for write in writes.in_phase(Phase.LEASED)] == [2]
    writes.move(writes.find(1), "refused")
    writes.check()
    assert (list(writes.by_id), writes.names) == ([2], {name(2)})


def test_the_oldest_write_goes_first_whichever_was_leased_first() -> None:
    writes = flying()
    for number in (2, 1):
        writes.move(writes.find(number), "leased")
    assert [write.id for write in writes.in_phase(Phase.LEASED)] == [1, 2]


def test_a_move_beyond_the_table_raises_with_the_story_of_the_blocks() -> None:
    diary = Diary()
    diary.note(7, "was seen", name(1))
    writes = flying(diary)
    with pytest.raises(InvalidTransition, match=r"no 'written' in LEASING.*7 ms was seen"):
        writes.move(writes.find(1), "written")


def test_what_comes_back_twice_is_a_mistake() -> None:
    writes = flying()
    write = writes.find(1)
    writes.move(write, "unanswered")
    with pytest.raises(AssertionError, match="no write has id 1"):
        writes.find(1)
    with pytest.raises(AssertionError, match="a write that has ended"):
        writes.move(write, "unanswered")


def test_a_block_is_in_one_write() -> None:
    with pytest.raises(AssertionError, match="a block is in two writes"):
        flying().begin(Write(3, "0", HOST_EPOCH, [name(2)]))
