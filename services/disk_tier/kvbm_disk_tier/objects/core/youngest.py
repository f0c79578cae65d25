"""The youngest objects of a range: which are kept, and which one of them is too much.

The object that is too much is the oldest of the tenant that is furthest above its share, as in a
tier that is full. Only the store and the setting count, for several hosts delete from one store:
whether a tenant is idle is another matter on each host.
"""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import chain

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.slots import Block
from kvbm_common.tier.tenants import Tenant, Tenants

Order = tuple[bytes, bytes, str, str, int]
"""A value that orders the objects of one hash."""
Entry = tuple[int, SequenceHash, Order, Block]
"""The time when an object was stored, on our clock, its block's name, its order among those of that
name, and the block. Two hosts may have stored one name at the same time; blocks have no order."""


def order_of(block: Block) -> Order:
    """Return what orders objects as their names do.

    Bytes and parts are written in decimal, without leading zeros.
    """
    return (block.namespace, block.parent, str(block.bytes), str(block.code), block.checksum)


class Youngest:
    """The objects of one range that are kept, by tenant."""

    def __init__(self, most: int, tenants: Tenants) -> None:
        """Keep up to `most` objects of these tenants."""
        assert most > 0, f"a range may hold {most} objects"
        self._most, self._tenants = most, tenants
        self._count = 0
        self._of: dict[Tenant, list[Entry]] = {}
        """Tenant → a heap of its entries that are kept, oldest first; none is empty."""
        self._bytes: Counter[Tenant] = Counter()

    def __len__(self) -> int:
        return self._count

    def add(self, block: Block, stored_ms: int) -> Block | None:
        """Keep an object; returns the one that is too much then."""
        tenant = self._tenants.of(block.namespace)
        heap = self._of.setdefault(tenant, [])
        heapq.heappush(heap, (stored_ms, block.hash, order_of(block), block))
        self._bytes[tenant] += block.bytes
        self._count += 1
        return self._oldest_of_worst() if self._count > self._most else None

    def _oldest_of_worst(self) -> Block:
        """Take out the oldest object of the tenant that is furthest above its share."""
        worst = max(self._of, key=self._level) if len(self._of) > 1 else next(iter(self._of))
        block = heapq.heappop(self._of[worst])[-1]
        self._count -= 1
        self._bytes[worst] -= block.bytes
        assert self._bytes[worst] >= 0, f"{worst} has {self._bytes[worst]} bytes after {block}"
        if not self._of[worst]:
            del self._of[worst]
        return block

    def _level(self, tenant: Tenant) -> tuple[float, bytes, str]:
        """Return how much of its share a tenant has here; of equals the names decide."""
        return self._bytes[tenant] / tenant.weight, tenant.tag, tenant.name

    def entries(self) -> list[Entry]:
        """Return what is kept, in no order."""
        return list(chain.from_iterable(self._of.values()))

    def check(self) -> None:
        """Assert every invariant of a range; O(objects)."""
        assert self._count <= self._most, f"{self._count} objects of {self._most}"
        assert sum(map(len, self._of.values())) == self._count, f"{self._count} are counted"
        assert all(self._of.values()), "a tenant without objects is here"
