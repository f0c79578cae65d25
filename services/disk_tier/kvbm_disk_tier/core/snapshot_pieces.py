"""A host tier's snapshot in pieces: a million blocks in one step would hold up every read."""

from __future__ import annotations

from collections.abc import Iterator

from kvbm_common.wire.events import Run
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply
from msgspec.structs import replace

PIECE_BLOCKS = 1_024
"""Blocks of one piece: the core needs 10 ms for them if it has to write each."""


def pieces_of(reply: SnapshotReply, blocks_max: int = PIECE_BLOCKS) -> Iterator[SnapshotReply]:
    """Yield snapshots of at most `blocks_max` blocks that together are this one; cut long runs."""
    assert blocks_max > 0, f"pieces of {blocks_max} blocks"
    for part in reply.parts:
        runs: list[Run] = []
        room = blocks_max
        for run in part.runs:
            for head in _cut(run, room, blocks_max):
                runs.append(head)
                room -= len(head.hashes)
                assert room >= 0, f"a piece has {-room} blocks too many"
                if not room:
                    yield _piece(reply, part, runs)
                    runs, room = [], blocks_max
        if runs:
            yield _piece(reply, part, runs)


def _cut(run: Run, first: int, others: int) -> Iterator[Run]:
    """Yield a run in parts: `first` blocks, then `others` each."""
    start, end, parent = 0, first, run.parent
    while start < len(run.hashes):
        names = run.hashes[start:end]
        yield Run(parent=parent, hashes=names)
        start, end, parent = end, end + others, names[-1]


def _piece(reply: SnapshotReply, part: SnapshotPart, runs: list[Run]) -> SnapshotReply:
    return replace(reply, parts=[replace(part, runs=runs)])
