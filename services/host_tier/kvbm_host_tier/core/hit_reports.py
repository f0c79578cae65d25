"""Hits: the message that tells the disk tier which blocks were asked for again.

The disk tier writes those that it lacks. When a staging arena has no room, its oldest unwritten
blocks are sent as hits, too. Otherwise a block whose write has failed, or which the disk tier has
evicted, would hold its slot without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import filterfalse, islice

from kvbm_common.identity import SequenceHash, hashes_to_hex
from kvbm_common.tier.slots import SlotTable
from kvbm_common.wire.verbs import Hits

from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.lower_tiers import LowerTiers
from kvbm_host_tier.core.messages import TellHits

HITS_MAX = 1024
"""Hits that one lookup sends at most; the next lookup of these blocks sends the rest."""
UNWRITTEN_TOLD_MAX = 256
"""Blocks that a full staging arena sends as hits at a time, the oldest unwritten ones first."""


class HitReports:
    """Gathers the hits of one step; `settle` sends them to the disk tier."""

    def __init__(self, table: SlotTable, below: LowerTiers, means: Means) -> None:
        self._table, self._below, self._emit = table, below, means.emit
        self._hit: list[tuple[bytes, Sequence[SequenceHash], int]] = []
        """Runs that were asked for again in this step: namespace, blocks, bytes of a block."""

    def note(self, namespace: bytes, names: Sequence[SequenceHash], block_bytes: int) -> None:
        """Note blocks that were asked for again."""
        assert len(namespace) == 32, f"a namespace of {len(namespace)} bytes"
        if names:
            self._hit.append((namespace, names, block_bytes))

    def settle(self) -> None:
        """Send the hits of this step, without the blocks that every lower tier has."""
        assert len(self._hit) <= 1, f"hits of {len(self._hit)} steps wait"
        if self._hit and not self._below.instances():
            self._hit.clear()
        for namespace, names, block_bytes in self._hit:
            if news := self._below.missing(names)[:HITS_MAX]:
                self._tell(namespace, hashes_to_hex(news), block_bytes)
        self._hit.clear()

    def ask_to_write(self, block_bytes: int) -> None:
        """Ask the disk tier to write the oldest blocks that it lacks, those of this size first."""
        table, is_below = self._table, self._below.tester()
        size = table.pool.size_of(block_bytes)
        unwritten: list[SequenceHash] = []
        if size is not None:
            unwritten = table.worst_of(size, UNWRITTEN_TOLD_MAX, lambda name: not is_below(name))
        if len(unwritten) < UNWRITTEN_TOLD_MAX and len(table.pool.sizes) > 1:
            idle = table.longest_idle(table.idle_count)
            unwritten += islice(filterfalse(is_below, idle), UNWRITTEN_TOLD_MAX)
        self.tell_unwritten(list(dict.fromkeys(unwritten)))

    def tell_unwritten(self, names: Sequence[SequenceHash]) -> None:
        """Send the first of these blocks as hits: the disk tier then writes those that it lacks."""
        alike: dict[tuple[bytes, int], list[str]] = {}
        for name in names[:UNWRITTEN_TOLD_MAX]:
            slot = self._table.find(name)
            assert slot is not None, f"{name.hex()} is not here"
            block = self._table.block(slot)
            alike.setdefault((block.namespace, block.bytes), []).append(name.hex())
        for (namespace, size), hashes in alike.items():
            self._tell(namespace, hashes, size)

    def _tell(self, namespace: bytes, hashes: list[str], block_bytes: int) -> None:
        hits = Hits(namespace=namespace.hex(), hashes=hashes, block_bytes=block_bytes)
        self._emit(TellHits(hits))
