"""How many transfers one batch of writes has: the faster the disk, the more.

Lease, release, record and announcement cost the same for any batch, together more than a fast disk
takes to write 16 MiB. On a slow disk a large batch would only wait, and so would its lease.
"""

from __future__ import annotations

from kvbm_common.wire.verbs import ArenaReply

FAST_MS = 100
"""A batch that took no longer, the wait for those before it included, may be followed by one of
twice the size."""
SLOW_MS = 250
"""One that took longer is followed by one of half the size."""


BATCH_BYTES_MAX = 64 * 1024 * 1024
ARENA_SHARE = 32
"""No batch pins more than one part of so many of a host tier's memory, if that is a transfer."""


class BatchSize:
    """The size in transfers, which follows the disk between one and `most`."""

    def __init__(self, most: int) -> None:
        assert most > 0
        self.transfers = 1
        self._most = most

    def ended(self, took_ms: int) -> None:
        """Follow a batch that is on disk, so long after it was handed over."""
        assert took_ms >= 0
        if took_ms <= FAST_MS:
            self.transfers = min(2 * self.transfers, self._most)
        elif took_ms > SLOW_MS:
            self.transfers = max(1, self.transfers // 2)

    def blocks(self, arena: ArenaReply, *, transfer_blocks: int, slot_bytes: int) -> int:
        """Return how many blocks are leased, written, recorded and announced together at most."""
        assert transfer_blocks > 0
        assert slot_bytes > 0, "a store without slots takes no batch"
        size = min(
            self.transfers * transfer_blocks,
            BATCH_BYTES_MAX // slot_bytes,
            arena.slot_count // ARENA_SHARE,
        )
        return max(size, transfer_blocks)
