"""The events published lately: which are about a block, and what is forgotten."""

from __future__ import annotations

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import EventHead, run_of
from kvbm_connectors.consolidator.core.published_events import PublishedEvents

BLOCK, OTHER, PARENT = (SequenceHash(bytes([byte]) * 16) for byte in (1, 2, 3))


def head(seq: int) -> EventHead:
    return EventHead(host="h", source="sim-0", tier="device", epoch=1, seq=seq)


def test_a_story_has_the_events_of_the_block_and_those_of_all_blocks() -> None:
    """A clear is about every block; a parent is not stored with its child."""
    published = PublishedEvents()
    published.add(head(1).cleared("attached"), 10)
    published.add(head(2).stored("", [run_of(PARENT, [OTHER]), run_of(OTHER, [BLOCK])]), 11)
    published.add(head(3).removed("", [OTHER.hex()], "evicted"), 12)
    published.add(head(4).removed("", [BLOCK.hex()], "evicted"), 13)
    assert published.story(BLOCK) == [
        "10 ms cleared sim-0 rank 0 epoch 1 seq 1",
        "11 ms stored sim-0 rank 0 epoch 1 seq 2",
        "13 ms removed sim-0 rank 0 epoch 1 seq 4",
    ]
    assert published.story(PARENT) == ["10 ms cleared sim-0 rank 0 epoch 1 seq 1"]


def test_the_oldest_events_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm_connectors.consolidator.core.published_events.STORY_EVENTS_MAX", 2)
    published = PublishedEvents()
    for seq in (1, 2, 3):
        published.add(head(seq).cleared("lost"), seq)
    assert [line.rsplit(" ", 1)[1] for line in published.story(BLOCK)] == ["2", "3"]
