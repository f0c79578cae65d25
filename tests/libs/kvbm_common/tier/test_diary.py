"""The diary: a block's story, bounded."""

from __future__ import annotations

from kvbm_common.tier.diary import Diary
from kvbm_common.wire.bounds import Usage

from tests.libs.helpers import name


def test_a_story_is_one_blocks_oldest_first() -> None:
    """What happened to block 2 is not block 1's story."""
    diary = Diary()
    diary.note(5, "staged in slot 0", name(1))
    diary.note(6, "staged in slot 1", name(2))
    diary.note(9, "committed in slot 0", name(1))
    assert diary.story(name(1)) == ["5 ms staged in slot 0", "9 ms committed in slot 0"]
    assert diary.story(name(3)) == []


def test_the_oldest_entries_are_forgotten() -> None:
    """A bound of 2 keeps the last two of three."""
    diary = Diary(entries_max=2)
    for now_ms in (1, 2, 3):
        diary.note(now_ms, "was seen", name(1))
    assert diary.story(name(1)) == ["2 ms was seen", "3 ms was seen"]
    assert diary.usage() == Usage(used=2, size=2, dropped=1)


def test_blocks_that_go_together_are_noted_together() -> None:
    diary = Diary(entries_max=4)
    diary.note(1, "was seen", name(3))
    diary.note_all(2, "staged in slot {slot} for {a} fill", [name(1), name(2)], [7, 8])
    assert diary.story(name(2)) == ["2 ms staged in slot 8 for {a} fill"]
    diary.note_all(3, "removed: evicted", [name(1), name(2)])
    assert diary.story(name(1)) == [
        "2 ms staged in slot 7 for {a} fill", "3 ms removed: evicted",
    ]  # fmt: skip
    assert diary.story(name(3)) == [], "five blocks are one too many"


def test_what_happened_to_no_block_is_not_kept() -> None:
    """It would never be one too many: a disk that only fails would fill the memory with it."""
    diary = Diary(entries_max=1)
    for now_ms in range(5):
        diary.note_all(now_ms, "came from disk", [])
    assert len(diary) == 0
    diary.note(5, "was seen", name(1))
    assert len(diary) == 1
