"""Gathered events: taken out whole, and kept where that fails."""

from __future__ import annotations

from kvbm_common.nats.event_packer import EventPacker
from kvbm_common.wire.events import Removed


def removed(source: str, seq: int) -> Removed:
    """An event with one block."""
    return Removed(
        host="h", source=source, tier="host", epoch=1, seq=seq, ts_ms=0, namespace="0" * 64,
        hashes=["1" * 32],
    )  # fmt: skip


def test_what_was_taken_is_complete_before_its_first_message_is_used() -> None:
    """An error over the first message takes nothing from the other sources."""
    packer = EventPacker()
    for source, seq in (("a", 1), ("b", 1), ("a", 2), ("b", 4)):
        packer.add(removed(source, seq))
    assert packer.event_count == 4
    messages = packer.take(7)
    assert packer.event_count == 0
    assert [[(one.source, one.seq, one.ts_ms) for one in message] for message in messages] == [
        [("a", 1, 7), ("a", 2, 7)], [("b", 1, 7)], [("b", 4, 7)],
    ]  # fmt: skip
    assert packer.take(8) == []
