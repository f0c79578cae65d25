"""The announcer: numbers the events of one source, and cuts blocks into runs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import msgspec

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.slots import Block
from kvbm_common.wire.events import Cleared, EventHead, Removed, Run, Stored, Tier
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply

EVENT_BLOCKS_MAX = 2_048
"""At most this many hashes in one event, which a reader applies in 5 ms: 75 KB of JSON in
long runs, 190 KB if none continues another."""
PAGE_BLOCKS = 8_192
"""Blocks in a page of a snapshot, which takes 5 ms to make: 0.3 MB of JSON in long runs, 0.8 MB if
none continues another."""
BlocksNow = Callable[[], Sequence[Block]]
"""Returns the blocks that a part of a tier has when it is called."""
Page = Callable[[], SnapshotReply]
"""Makes a page of a snapshot, at any time."""
Pages = Sequence[Page]
NAMESPACE = attrgetter("namespace")
NAMESPACE_AND_SIZE = attrgetter("namespace", "bytes")


class Announcer:
    """Makes the events of one tier instance."""

    def __init__(self, *, host: str, source: str, tier: Tier, epoch: int) -> None:
        assert source, "events have a source"
        assert epoch >= 0, f"{source} lives in epoch {epoch}"
        self.host, self.source, self.tier, self.epoch = host, source, tier, epoch
        self.seq = 0

    def cleared(self, reason: str) -> Cleared:
        """Return the event that says: this source holds nothing. The first of every epoch."""
        assert reason, f"{self.source} clears for a reason"
        return Cleared(**self._next(), reason=reason)

    def stored(self, blocks: Sequence[Block]) -> list[Stored]:
        """Return the events of committed blocks, one per namespace and EVENT_BLOCKS_MAX blocks.

        All blocks of an event have one size.
        """
        return [
            Stored(
                **self._next(),
                namespace=part[0].namespace.hex(),
                runs=runs_of((block.hash, block.parent) for block in part),
                block_bytes=part[0].bytes,
            )
            for part in _alike(blocks, NAMESPACE_AND_SIZE)
        ]

    def removed(self, blocks: Sequence[Block], reason: str) -> list[Removed]:
        """Return the events of blocks that are gone, cut like `stored`."""
        assert reason, f"{len(blocks)} blocks of {self.source} are gone for a reason"
        return [
            Removed(
                **self._next(),
                namespace=part[0].namespace.hex(),
                hashes=[block.hash.hex() for block in part],
                reason=reason,
            )
            for part in _alike(blocks, NAMESPACE)
        ]

    def _next(self) -> EventHead:
        self.seq += 1
        return {
            "host": self.host, "source": self.source, "tier": self.tier, "epoch": self.epoch,
            "seq": self.seq, "ts_ms": 0,
        }  # fmt: skip

    def moment(self, parts: Sequence[BlocksNow]) -> list[Page]:
        """Return makers of the pages of a snapshot, one for each part, as of the last event.

        A page has what its part has when it is made. What has changed since the moment, later
        events say, too, and they apply on top: each block is in the end as its last event says. A
        million blocks listed at once would hold a tier's event loop for 50 ms.
        """
        seq, made_of = self.seq, [*parts] or [list]
        count = len(made_of)

        def page(number: int) -> SnapshotReply:
            assert 0 <= number < count, f"page {number} of {count}"
            now = self.snapshot(made_of[number]())
            return msgspec.structs.replace(now, seq=seq, page=number, pages=count)

        return [functools.partial(page, number) for number in range(count)]

    def snapshot(self, blocks: Sequence[Block]) -> SnapshotReply:
        """Return everything the source holds, as of the last event it has numbered."""
        parts = [
            SnapshotPart(
                namespace=part[0].namespace.hex(),
                runs=runs_of((block.hash, block.parent) for block in part),
                block_bytes=part[0].bytes,
            )
            for part in _alike(blocks, NAMESPACE_AND_SIZE, part_max=len(blocks) or 1)
        ]
        said = sum(len(run.hashes) for part in parts for run in part.runs)
        assert said == len(blocks), f"{self.source}: a snapshot of {said}, {len(blocks)} blocks"
        return SnapshotReply(
            host=self.host,
            source=self.source,
            tier=self.tier,
            epoch=self.epoch,
            seq=self.seq,
            parts=parts,
        )


def runs_of(blocks: Iterable[tuple[SequenceHash, SequenceHash]]) -> list[Run]:
    """Return blocks as runs: a block whose parent ends a run here continues it.

    >>> [len(run.hashes) for run in runs_of([(b"1" * 16, b"0" * 16), (b"2" * 16, b"1" * 16)])]
    [2]
    """
    runs: list[tuple[SequenceHash, list[str]]] = []
    ending: dict[SequenceHash, list[str]] = {}
    last: SequenceHash | None = None
    hashes: list[str] = []
    for block, parent in blocks:
        if parent != last:  # Seldom: chains come in one piece.
            if last is not None:
                ending[last] = hashes
            known = ending.pop(parent, None)
            hashes = [] if known is None else known
            if known is None:
                runs.append((parent, hashes))
        hashes.append(block.hex())
        last = block
    return [Run(parent=parent.hex(), hashes=hashes) for parent, hashes in runs]


def _alike(
    blocks: Sequence[Block], key: Callable[[Block], object], *, part_max: int = EVENT_BLOCKS_MAX
) -> list[list[Block]]:
    """Return the blocks in parts that have one `key`, up to `part_max` of them in each."""
    grouped: dict[object, list[Block]] = {}
    for alike, group in itertools.groupby(blocks, key):
        grouped.setdefault(alike, []).extend(group)
    parts = [
        part[start : start + part_max]
        for part in grouped.values()
        for start in range(0, len(part), part_max)
    ]
    assert sum(map(len, parts)) == len(blocks), f"{len(blocks)} blocks are cut"
    return parts
