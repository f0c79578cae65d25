"""Leases: pins with an owner, a deadline and a reason.

A lease ends by release, by its deadline, or with its owner, whichever comes first. The tier that
grants a lease pins the slots. It calls `expire` and `end_owner`, and unpins what they return, so
that no pin outlives its lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

STALE_MAX = 1024
"""Entries of released leases that are kept before the heap is made again without them."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Some slots, pinned for an owner until `deadline_ms` on the granting tier's own clock."""

    id: int
    owner: str
    reason: str
    slots: tuple[int, ...]
    deadline_ms: int


class LeaseTable:
    """The leases of one life of a tier. 0 stands for "no lease" elsewhere."""

    def __init__(self, epoch: int = 0) -> None:
        assert epoch >= 0, f"a tier lives in epoch {epoch}"
        self._leases: dict[int, Lease] = {}
        self._by_deadline: list[tuple[int, int]] = []
        """A heap of (deadline, id). The entry of a released lease stays until it is passed over."""
        # The ids of two lives never meet: a release that comes late from the life before must not
        # end a lease of this one.
        self._next_id = (epoch % 2**31 << 32) + 1
        self.expired_count = 0
        """Leases that ended by their deadline, since the start."""

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, owner: str, reason: str, slots: tuple[int, ...], *, deadline_ms: int) -> Lease:
        """Return a new lease over slots that the caller has just pinned."""
        assert owner, f"a lease over {slots} has an owner"
        assert deadline_ms >= 0, (owner, reason, deadline_ms)
        lease = Lease(self._next_id, owner, reason, slots, deadline_ms)
        assert lease.id not in self._leases, f"{lease} has the id of another"
        self._next_id += 1
        self._leases[lease.id] = lease
        if len(self._by_deadline) > 2 * len(self._leases) + STALE_MAX:
            self._by_deadline = [(one.deadline_ms, one.id) for one in self._leases.values()]
            heapify(self._by_deadline)
        else:
            heappush(self._by_deadline, (deadline_ms, lease.id))
        return lease

    def find(self, lease_id: int) -> Lease | None:
        """Return a running lease, or None."""
        return self._leases.get(lease_id)

    def release(self, lease_id: int) -> Lease | None:
        """End a lease. None: it had ended before, and its slots may hold other blocks by now."""
        return self._leases.pop(lease_id, None)

    def expire(self, now_ms: int) -> list[Lease]:
        """End and return the leases whose deadline has passed."""
        ended: list[Lease] = []
        while self._by_deadline and self._by_deadline[0][0] <= now_ms:
            lease = self._leases.pop(heappop(self._by_deadline)[1], None)
            if lease is not None:
                ended.append(lease)
        assert all(lease.deadline_ms <= now_ms for lease in ended), f"{ended} at {now_ms} ms"
        self.expired_count += len(ended)
        return ended

    def end_owner(self, owner: str) -> list[Lease]:
        """End and return the leases of an owner that has left."""
        assert owner, "leases have an owner"
        ended = [lease for lease in self._leases.values() if lease.owner == owner]
        for lease in ended:
            del self._leases[lease.id]
        return ended

    def all(self) -> list[Lease]:
        """Return the running leases, oldest first."""
        return list(self._leases.values())

    def check(self) -> None:
        """Assert every invariant of the table."""
        assert self._leases.keys() <= {lease_id for _, lease_id in self._by_deadline}
        assert all(lease.id == lease_id for lease_id, lease in self._leases.items())
        assert len(self._by_deadline) <= 2 * len(self._leases) + STALE_MAX + 1 or not self._leases
