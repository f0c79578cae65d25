"""How many transfers one batch of writes has: the faster the disk, the more.

Lease, release, record and announcement cost the same for any batch, together more than a fast disk
takes to write 16 MiB. On a slow disk a large batch would only wait, and so would its lease.
"""

from __future__ import annotations

FAST_MS = 100
"""A batch that took no longer, the wait for those before it included, may be followed by one of
twice the size."""
SLOW_MS = 250
"""One that took longer is followed by one of half the size."""


class BatchSize:
    """Follows the disk, between one transfer and `most`."""

    def __init__(self, most: int) -> None:
        assert most > 0
        self.transfers = 1
        self._most = most

    def ended(self, took_ms: int) -> None:
        """A batch is on disk, so long after it was handed over."""
        if took_ms <= FAST_MS:
            self.transfers = min(2 * self.transfers, self._most)
        elif took_ms > SLOW_MS:
            self.transfers = max(1, self.transfers // 2)
