"""Events: blocks after their parents, and which of the last ones are about a block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Cleared, EventHead
from kvbm_common.wire.raw_events import RawRemoved, RawRun, RawStored
from kvbm_connectors.consolidator.core.events import PublishedEvents, parents_first

FORESTS = st.permutations(range(8)).flatmap(
    lambda order: st.fixed_dictionaries({number: st.integers(-1, number - 1) for number in order})
)
"""Number → its parent, which is smaller; -1 and others that are left out are not held."""


@given(FORESTS, st.sets(st.integers(0, 7)))
def test_every_key_comes_once_behind_its_parent(parents: dict[int, int], gone: set[int]) -> None:
    held = {number: parent for number, parent in parents.items() if number not in gone}
    order = list(parents_first(held, held.__getitem__))
    assert sorted(order) == sorted(held)
    for number, parent in held.items():
        assert parent not in held or order.index(parent) < order.index(number)


def test_what_is_in_order_stays_so() -> None:
    assert list(parents_first({3: None, 1: 3, 2: None}, {1: 3}.get)) == [3, 1, 2]


def test_a_circle_ends() -> None:
    """No block is its own ancestor; hashes that lie are no reason to hang."""
    assert sorted(parents_first({1: 2, 2: 1}, {1: 2, 2: 1}.get)) == [1, 2]


BLOCK, OTHER, PARENT = (SequenceHash(bytes([byte]) * 16) for byte in (1, 2, 3))


def head(seq: int) -> EventHead:
    return EventHead(host="h", source="sim-0", tier="device", epoch=1, seq=seq, ts_ms=0)


def test_a_story_has_the_events_of_the_block_and_those_of_all_blocks() -> None:
    """A clear is about every block; a parent is not stored with its child."""
    published = PublishedEvents()
    published.add(Cleared(**head(1), reason="attached"), 10)
    runs: list[RawRun] = [(PARENT, [OTHER]), (OTHER, [BLOCK])]
    published.add(RawStored(**head(2), namespace="", runs=runs), 11)
    published.add(RawRemoved(**head(3), namespace="", hashes=[OTHER], reason="evicted"), 12)
    published.add(RawRemoved(**head(4), namespace="", hashes=[BLOCK], reason="evicted"), 13)
    assert published.story(BLOCK) == [
        "10 ms cleared sim-0 rank 0 epoch 1 seq 1",
        "11 ms stored sim-0 rank 0 epoch 1 seq 2",
        "13 ms removed sim-0 rank 0 epoch 1 seq 4",
    ]
    assert published.story(PARENT) == ["10 ms cleared sim-0 rank 0 epoch 1 seq 1"]


def test_the_oldest_events_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm_connectors.consolidator.core.events.STORY_EVENTS_MAX", 2)
    published = PublishedEvents()
    for seq in (1, 2, 3):
        published.add(Cleared(**head(seq), reason="lost"), seq)
    assert [line.rsplit(" ", 1)[1] for line in published.story(BLOCK)] == ["2", "3"]
