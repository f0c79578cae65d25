"""Leases: pins with an owner, a deadline and a reason.

A lease ends by release, by its deadline, or with its owner, whichever comes first. The tier that
grants a lease pins the slots. It calls `expire` and `end_owner`, and unpins what they return, so
that no pin outlives its lease.

A block may leave while it is leased. Its readers end soon, and keep its slot until then. A pin of
an operator has no reader, and may run for days: `leave` takes the slot out of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

EPOCH_BITS, COUNT_BITS = 29, 24
COUNT_MAX = (1 << COUNT_BITS) - 1
"""Leases until the count begins again: hours of 1,000 a second, and a late release is late by
seconds."""
PIN = "pin"
"""The reason of the leases that pins of operators are."""
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
    token: str = ""
    """The word with which the owner gives the lease back; empty: none is needed."""


class LeaseTable:
    """The leases of one life of a tier. 0 stands for "no lease" elsewhere.

        bits of an id    52 … 24                   23 … 0
                         epoch, its low 29 bits    counts up from 1, begins again at its end

    The ids of two lives do not meet: a release that comes late from the life before must not end a
    lease of this one. Nor do those of one life: the count passes over leases that still run. An id
    has 53 bits, so every reader of JSON has it exactly.
    """

    def __init__(self, epoch: int = 0) -> None:
        assert epoch >= 0, f"a tier lives in epoch {epoch}"
        self._leases: dict[int, Lease] = {}
        self._by_deadline: list[tuple[int, int]] = []
        """A heap of (deadline, id). The entry of a released lease stays until it is passed over."""
        self._base = epoch % (1 << EPOCH_BITS) << COUNT_BITS
        self._count = 0
        """The number in the last id; after the largest one it counts from 1 again."""
        self.expired_count = 0
        """Leases that ended by their deadline, since the start."""
        self._pinning: dict[int, set[int]] = {}
        """Slot → the ids of the pins that have it; the slots of other leases are not here."""

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self,
        owner: str,
        reason: str,
        slots: tuple[int, ...],
        *,
        deadline_ms: int,
        token: str = "",
    ) -> Lease:
        """Return a new lease over slots that the caller has just pinned."""
        assert owner, f"a lease over {slots} has an owner"
        assert deadline_ms >= 0, (owner, reason, deadline_ms)
        lease = Lease(self._free_id(), owner, reason, slots, deadline_ms, token)
        assert lease.id not in self._leases, f"{lease} has the id of another"
        self._leases[lease.id] = lease
        if reason == PIN:
            for slot in slots:
                self._pinning.setdefault(slot, set()).add(lease.id)
        if len(self._by_deadline) > 2 * len(self._leases) + STALE_MAX:
            self._by_deadline = [(one.deadline_ms, one.id) for one in self._leases.values()]
            heapify(self._by_deadline)
        else:
            heappush(self._by_deadline, (deadline_ms, lease.id))
        return lease

    def _free_id(self) -> int:
        """Return an id that no running lease has, and none had for as long as possible."""
        assert len(self._leases) < COUNT_MAX, f"{len(self._leases)} leases run"
        while True:
            self._count = self._count % COUNT_MAX + 1
            if self._base + self._count not in self._leases:
                return self._base + self._count

    def find(self, lease_id: int) -> Lease | None:
        """Return a running lease, or None."""
        return self._leases.get(lease_id)

    def release(self, lease_id: int) -> Lease | None:
        """End a lease. None: it had ended before, and its slots may hold other blocks by now."""
        lease = self._leases.pop(lease_id, None)
        return None if lease is None else self._ended(lease)

    def _ended(self, lease: Lease) -> Lease:
        """Forget which slots an ended lease has pinned."""
        for slot in lease.slots if lease.reason == PIN else ():
            pins = self._pinning[slot]
            pins.remove(lease.id)
            if not pins:
                del self._pinning[slot]
        return lease

    def expire(self, now_ms: int) -> list[Lease]:
        """End and return the leases whose deadline has passed."""
        ended: list[Lease] = []
        while self._by_deadline and self._by_deadline[0][0] <= now_ms:
            deadline_ms, lease_id = heappop(self._by_deadline)
            lease = self._leases.get(lease_id)
            # An entry of a released lease may meet a later one of the same id.
            if lease is not None and lease.deadline_ms == deadline_ms:
                ended.append(self._ended(self._leases.pop(lease_id)))
        assert all(lease.deadline_ms <= now_ms for lease in ended), f"{ended} at {now_ms} ms"
        self.expired_count += len(ended)
        return ended

    def end_owner(self, owner: str) -> list[Lease]:
        """End and return the leases of an owner that has left."""
        assert owner, "leases have an owner"
        ended = [lease for lease in self._leases.values() if lease.owner == owner]
        for lease in ended:
            del self._leases[lease.id]
            self._ended(lease)
        return ended

    @property
    def pinned_slots(self) -> Set[int]:
        """Return the slots that operators have pinned."""
        return self._pinning.keys()

    def leave(self, slots: Iterable[int]) -> list[int]:
        """Take slots whose blocks leave out of every pin; a pin ends with its last block.

        Returns what is to be unpinned: each slot once for every pin that it was in.
        """
        gone = {slot for slot in slots if slot in self._pinning} if self._pinning else set()
        unpinned: list[int] = []
        for lease_id in {one for slot in gone for one in self._pinning[slot]}:
            lease = self._leases[lease_id]
            kept = tuple(slot for slot in lease.slots if slot not in gone)
            assert len(kept) < len(lease.slots), f"{lease} pins none of the slots {gone}"
            unpinned += [slot for slot in lease.slots if slot in gone]
            if kept:
                self._leases[lease_id] = replace(lease, slots=kept)
            else:
                del self._leases[lease_id]
        for slot in gone:
            del self._pinning[slot]
        return unpinned

    def all(self) -> list[Lease]:
        """Return the running leases, oldest first."""
        return list(self._leases.values())

    def check(self) -> None:
        """Assert every invariant of the table."""
        assert self._leases.keys() <= {lease_id for _, lease_id in self._by_deadline}
        assert all(lease.id == lease_id for lease_id, lease in self._leases.items())
        pins = [lease for lease in self._leases.values() if lease.reason == PIN]
        assert self._pinning == {
            slot: {lease.id for lease in pins if slot in lease.slots}
            for slot in {slot for lease in pins for slot in lease.slots}
        }
        assert len(self._by_deadline) <= 2 * len(self._leases) + STALE_MAX + 1 or not self._leases
