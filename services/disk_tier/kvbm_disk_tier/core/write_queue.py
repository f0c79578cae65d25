"""Write queue: blocks that wait to be written, oldest first for each tenant, and tenants in turn.

The next batch is of the tenant that has written the fewest bytes for its weight. So tenants share
the disk and its write budget, and none waits for the whole queue of another. A tenant that comes
back does not catch up on bytes that it left to others: it begins at the queue's clock, the value at
which the last batch began (start-time fair queueing). When the queue is empty all begin at zero.

    gold 300 bytes, weight 3; silver 100, weight 1     both at 100: the next batch is of either
    gold has written 900 alone, with blocks waiting    at 300; silver comes and begins there
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.tenants import TENANTS_MAX, Tenant, Tenants


class Origin(NamedTuple):
    """The owner, size and namespace of waiting blocks: one object for all that came together."""

    instance: str
    """The host tier that had it."""
    block_bytes: int = 0
    """The size of the block; 0: not known."""
    namespace: bytes = b""


class WriteQueue(dict[SequenceHash, Origin]):
    """Block → its owner and size, oldest first; it changes by the methods below only."""

    def __init__(self, tenants: Tenants) -> None:
        super().__init__()
        self._tenants = tenants
        self._owner: dict[SequenceHash, Tenant] = {}
        """Block → its tenant when it came: a tenant may get a share of its own later."""
        self._queues: dict[Tenant, OrderedDict[SequenceHash, Origin]] = {}
        """Tenant → its waiting blocks; tenants without any are not listed."""
        self._had: dict[Tenant, float] = {}
        """Tenant → bytes written for its weight since the queue was last empty."""
        self._clock = 0.0
        """The value in `_had` of the last batch's tenant when the batch began."""

    def add(self, name: SequenceHash, origin: Origin) -> None:
        """Append a block to the queue of its tenant."""
        assert name not in self, f"{name.hex()} waits already"
        tenant = self._tenants.of(origin.namespace)
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._begin(tenant)
        self[name] = queue[name] = origin
        self._owner[name] = tenant
        tenant.block_count += 1

    def _begin(self, tenant: Tenant) -> OrderedDict[SequenceHash, Origin]:
        """Return a new queue for a tenant without waiting blocks."""
        assert tenant not in self._queues, f"{tenant} has a queue"
        if len(self._had) > 2 * TENANTS_MAX:
            known = set(self._tenants)
            self._had = {one: had for one, had in self._had.items() if one in known}
        self._had[tenant] = max(self._had.get(tenant, 0.0), self._clock)
        queue = self._queues[tenant] = OrderedDict()
        return queue

    def remove(self, name: SequenceHash) -> Origin:
        """Take a block out."""
        origin, tenant = self.pop(name), self._owner.pop(name)
        tenant.block_count -= 1
        assert tenant.block_count >= 0, f"{tenant} has fewer blocks than it waits for"
        del self._queues[tenant][name]
        if not self._queues[tenant]:
            del self._queues[tenant]
        return origin

    def take(self, names: Sequence[SequenceHash], size: int) -> None:
        """Take out blocks of one tenant, of so many bytes: they are written now."""
        assert names, "a batch has blocks"
        tenant = self._owner[names[0]]
        for name in names:
            assert self._owner[name] is tenant, f"{name.hex()} is of another tenant"
            self.remove(name)
        # A tenant whose blocks cannot be written yet may have less than the one that is served.
        self._clock = max(self._clock, self._had[tenant])
        self._had[tenant] += size / tenant.weight
        if not self._queues:
            self._had.clear()
            self._clock = 0.0

    def put_back(self, name: SequenceHash, origin: Origin, size: int) -> None:
        """Put a block that was taken, and not written, at the head of its tenant's queue."""
        self.add(name, origin)
        tenant = self._owner[name]
        self._queues[tenant].move_to_end(name, last=False)
        self._had[tenant] = max(0.0, self._had[tenant] - size / tenant.weight)

    def move_to_end(self, name: SequenceHash) -> None:
        """Move a block to the end of its tenant's queue."""
        self.add(name, self.remove(name))

    def clear(self) -> None:
        """Forget all waiting blocks."""
        for tenant in self._queues:
            tenant.block_count = 0
        super().clear()
        self._owner.clear()
        self._queues.clear()

    # --- tenants ----------------------------------------------------------------------------

    def turns(self) -> list[Mapping[SequenceHash, Origin]]:
        """Return the queues of all tenants, the next one first."""
        if len(self._queues) == 1:
            return list(self._queues.values())
        return [self._queues[one] for one in sorted(self._queues, key=self._had.__getitem__)]

    def newest_of_fullest(self, origin: Origin) -> SequenceHash | None:
        """Return the newest block of the tenant whose queue is longest for its weight.

        None: with one block more, the tenant of `origin` has the longest queue itself.
        """
        assert self._queues, "no tenant waits in a full queue"
        asking = self._tenants.of(origin.namespace)
        if asking in self._queues and len(self._queues) == 1:
            return None
        lengths = {one: len(queue) / one.weight for one, queue in self._queues.items()}
        own = (len(self._queues.get(asking, ())) + 1) / asking.weight
        fullest = max(lengths, key=lengths.__getitem__)
        if fullest is asking or lengths[fullest] <= own:
            return None
        return next(reversed(self._queues[fullest]))

    def newest(self) -> SequenceHash:
        """Return the newest block of the tenant whose queue is longest for its weight."""
        assert self._queues, "no tenant waits in a full queue"
        fullest = max(self._queues, key=lambda one: len(self._queues[one]) / one.weight)
        return next(reversed(self._queues[fullest]))

    def count_of(self, name: str) -> int:
        """Return how many blocks of a tenant wait."""
        return sum(len(queue) for one, queue in self._queues.items() if one.name == name)

    def check(self) -> None:
        """Assert that every block waits in the queue of its tenant, and in no other."""
        assert all(self._queues.values()), "a queue without blocks is kept"
        queued = {name: origin for queue in self._queues.values() for name, origin in queue.items()}
        assert queued == self, f"{len(queued)} of {len(self)} blocks are queued"
        assert self._owner.keys() == self.keys(), "a block waits for no tenant"
        known = set(self._tenants)
        for tenant, queue in self._queues.items():
            assert tenant in known, f"{tenant} was forgotten, and {len(queue)} of its blocks wait"
            assert tenant.block_count == len(queue), f"{len(queue)} wait for {tenant}"
            assert all(self._owner[name] is tenant for name in queue), f"others wait for {tenant}"
            assert self._had[tenant] >= 0, f"{tenant} has had {self._had[tenant]} bytes"
        assert len(self._had) <= 3 * TENANTS_MAX, f"{len(self._had)} tenants are remembered"
