"""Blocks that were not written, and what hangs on them."""

from __future__ import annotations

from collections.abc import Callable

from kvbm_disk_tier.core.broken_chains import BrokenChains

from tests.services.disk_tier.helpers import name


def test_descendants_wait_on_what_waits_or_does_not() -> None:
    """1 ← 2 ← 3 and 1 ← 4 wait; 1 does not. When 2 is taken, 3 still hangs on it."""
    chains = BrokenChains(9)
    for child, parent in ((2, 1), (3, 2), (4, 1)):
        chains.note_waiting(name(child), name(parent))
    assert chains.descendants([name(1)]) == [name(2), name(4), name(3)]
    chains.note_left_queue(name(2))
    assert chains.descendants([name(1)]) == [name(4)]
    assert chains.descendants([name(2)]) == [name(3)]
    chains.check([name(3), name(4)])


def test_a_dropped_block_keeps_its_parent_until_it_waits_again_or_is_found() -> None:
    """A hit names a block without its parent."""
    chains = BrokenChains(9)
    ends: list[Callable[[], None]] = [
        lambda: chains.note_waiting(name(2), None),
        lambda: chains.note_stored(name(2)),
    ]
    for end in ends:
        chains.note_dropped(name(2), name(1))
        assert chains.known_parent(name(2)) == name(1)
        assert chains.is_cut_off(name(2))
        assert not chains.is_cut_off(name(1))
        end()
        assert not chains.is_cut_off(name(2))
        waits = end is ends[0]
        assert chains.descendants([name(1)]) == ([name(2)] if waits else [])
        chains.note_left_queue(name(2))
    assert not chains.is_cut_off(None)


def test_only_so_many_dropped_blocks_are_known() -> None:
    """The oldest is forgotten; one that is dropped once more is the newest."""
    chains = BrokenChains(2)
    for number in (1, 2, 1, 3):
        chains.note_dropped(name(number))
    assert [chains.is_cut_off(name(number)) for number in (1, 2, 3)] == [True, False, True]
    chains.check([])
