"""Leases: pins that cannot leak. Each has an owner, a deadline and a reason, and ends by itself.

A lease ends by release, by deadline, or by its owner's death; whatever comes first. The table only
remembers; the tier that grants a lease pins the slots, and unpins them when the lease ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class Lease:
    """Some slots, pinned for an owner until `deadline_ms` on the granting tier's own clock."""

    id: int
    owner: str
    reason: str
    slots: tuple[int, ...]
    deadline_ms: int


class LeaseTable:
    """The leases of one tier. Ids count up from `first_id`; 0 is no lease."""

    def __init__(self, *, first_id: int = 1) -> None:
        assert first_id > 0
        self._leases: dict[int, Lease] = {}
        self._by_deadline: list[tuple[int, int]] = []
        self._next_id = first_id
        self.expired_count = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, owner: str, reason: str, slots: tuple[int, ...], *, deadline_ms: int) -> Lease:
        """A new lease over slots that the caller has just pinned."""
        lease = Lease(self._next_id, owner, reason, slots, deadline_ms)
        self._next_id += 1
        self._leases[lease.id] = lease
        heappush(self._by_deadline, (deadline_ms, lease.id))
        return lease

    def find(self, lease_id: int) -> Lease | None:
        """A running lease."""
        return self._leases.get(lease_id)

    def release(self, lease_id: int) -> Lease | None:
        """End a lease; None when it has ended before (its copy is worthless then)."""
        return self._leases.pop(lease_id, None)

    def expire(self, now_ms: int) -> list[Lease]:
        """End and return the leases whose deadline has passed."""
        ended: list[Lease] = []
        while self._by_deadline and self._by_deadline[0][0] <= now_ms:
            lease = self._leases.pop(heappop(self._by_deadline)[1], None)
            if lease is not None:
                ended.append(lease)
        self.expired_count += len(ended)
        return ended

    def end_owner(self, owner: str) -> list[Lease]:
        """End and return everything that a dead owner held."""
        ended = [lease for lease in self._leases.values() if lease.owner == owner]
        for lease in ended:
            del self._leases[lease.id]
        return ended

    def all(self) -> list[Lease]:
        """The running leases, oldest first."""
        return list(self._leases.values())

    def check(self) -> None:
        """Assert every invariant."""
        assert self._leases.keys() <= {lease_id for _, lease_id in self._by_deadline}
        assert all(lease.id == lease_id for lease_id, lease in self._leases.items())
