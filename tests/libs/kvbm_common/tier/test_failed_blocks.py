"""Failed blocks: avoided for a while, as many as there is room for."""

from __future__ import annotations

from kvbm_common.tier.failed_blocks import FailedBlocks

from tests.libs.helpers import name


def test_avoided_blocks_are_bounded_and_the_oldest_make_room() -> None:
    """Room for two. 1 fails again, and is the newest then: 2 has to go for 3."""
    avoided = FailedBlocks(2)
    for now_ms, number in enumerate((1, 2, 1, 3)):
        avoided.add(name(number), now_ms + 100)
    assert len(avoided) == 2
    assert [avoided.is_failed(name(number), 99) for number in (1, 2, 3)] == [True, False, True]
    assert [avoided.run_before([name(number)], 99) for number in (1, 2, 3)] == [0, 1, 0]
    avoided.tick(102)
    assert avoided.run_before([name(1), name(3)], 102) == 1
    assert len(avoided) == 1


def test_a_block_that_is_there_again_is_not_avoided() -> None:
    avoided = FailedBlocks(2)
    avoided.add(name(1), 100)
    avoided.discard(name(1))
    avoided.discard(name(2))
    assert not avoided.is_failed(name(1), 0)
    assert name(1) not in avoided
