"""Pieces of a snapshot: bounded, and together the whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.wire.events import Run
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply
from kvbm_disk_tier.core.snapshot_pieces import pieces_of

Pair = tuple[str, str, str, int]
"""Namespace, parent, block, bytes."""


def pairs(reply: SnapshotReply) -> list[Pair]:
    """Return every block with its parent."""
    return [
        (part.namespace, parent, name, part.block_bytes)
        for part in reply.parts
        for run in part.runs
        for parent, name in zip([run.parent, *run.hashes], run.hashes, strict=False)
    ]


def snapshot(lengths: list[list[int]]) -> SnapshotReply:
    """Return parts with runs of these lengths; names count up."""
    names = iter(f"{number:032x}" for number in range(10_000))
    parts = [
        SnapshotPart(
            namespace=f"{number:064x}",
            block_bytes=64 + number,
            runs=[Run(parent=next(names), hashes=[next(names) for _ in range(n)]) for n in part],
        )
        for number, part in enumerate(lengths)
    ]
    return SnapshotReply(host="h", source="host-tier-0", tier="host", epoch=1, seq=2, parts=parts)


@given(st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=4), st.integers(1, 7))
def test_pieces_are_bounded_and_together_the_whole(lengths: list[list[int]], most: int) -> None:
    whole = snapshot(lengths)
    pieces = [pairs(piece) for piece in pieces_of(whole, most)]
    assert all(1 <= len(piece) <= most for piece in pieces)
    assert [pair for piece in pieces for pair in piece] == pairs(whole)


def test_only_the_last_piece_of_a_part_is_not_full() -> None:
    assert [len(pairs(piece)) for piece in pieces_of(snapshot([[5, 2], [1]]), 3)] == [3, 3, 1, 1]
