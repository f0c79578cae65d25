"""The leases over slots of the arena: an engine's, a copier's (a disk tier, a peer), a pin's.

A leased slot is pinned. The lease ends by release, by its deadline or with its owner, and the slot
is unpinned with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvbm_common.identity import SequenceHash, hashes_from_hex
from kvbm_common.tier.admin import PIN
from kvbm_common.tier.leases import Lease, LeaseTable
from kvbm_common.tier.slots import SlotTable
from kvbm_common.wire.verbs import (
    ErrorBody,
    LeasedSlot,
    LeaseReply,
    LeaseRequest,
    ReleaseReply,
    ReleaseRequest,
)

LEASE_MS_MAX = 60_000
"""The longest time for which a copier pins a slot without asking again."""
COPY = "copy"
"""The reason of the leases that the verb grants, and the only ones that it takes back."""


class ArenaLeases:
    """The leases of one life of the tier; `leases` is their table, which remembers only."""

    def __init__(self, table: SlotTable, counts: Counter[str], *, epoch: int) -> None:
        assert epoch >= 0
        # The ids of two lives never meet: a release that comes late from the life before must not
        # end a lease of this one.
        self.leases = LeaseTable(first_id=(epoch % 2**31 << 32) + 1)
        self._table = table
        self._counts = counts
        self._epoch = epoch

    def end(self, leases: Iterable[Lease]) -> None:
        """Unpin the slots of leases that have left the table."""
        for lease in leases:
            assert self.leases.find(lease.id) is None, f"lease {lease.id} is still running"
            self._table.unpin(lease.slots)

    def end_owner(self, owner: str) -> None:
        """End every lease of an owner that has left."""
        assert owner
        self.end(self.leases.end_owner(owner))

    def expire(self, now_ms: int) -> None:
        """End the leases whose deadline has passed."""
        assert now_ms >= 0
        self.end(self.leases.expire(now_ms))

    def release(self, lease_id: int, owner: str, corrupt: Iterable[int]) -> list[SequenceHash]:
        """End an engine's lease; returns the blocks at the indices that the engine calls corrupt.

        A lease that has ended before is only counted: what the engine has read is worthless.
        """
        assert owner
        lease = self.leases.find(lease_id)
        if lease is None or lease.owner != owner:
            self._counts["released_late"] += 1
            return []
        found = [
            self._table.block(lease.slots[index]).hash
            for index in corrupt
            if index < len(lease.slots)
        ]
        self.leases.release(lease.id)
        self.end([lease])
        return found

    # --- the verbs --------------------------------------------------------------------------

    def lease_to_copy(self, request: LeaseRequest, now_ms: int) -> LeaseReply | ErrorBody:
        """Lease those of the wanted blocks that are here; raises IdentityError."""
        if request.epoch != self._epoch:
            return ErrorBody(code="stale_epoch", message="the arena is another one", field="epoch")
        slots: list[int] = []
        for name in hashes_from_hex(request.hashes):
            slot = self._table.find(name)
            if slot is not None and slot not in slots:
                self._table.pin(slot)
                slots.append(slot)
        deadline_ms = now_ms + min(request.lease_ms, LEASE_MS_MAX)
        lease = self.leases.grant(request.owner, COPY, tuple(slots), deadline_ms=deadline_ms)
        assert lease.slots == tuple(slots)
        return LeaseReply(lease=lease.id, slots=[self._leased(slot) for slot in slots])

    def _leased(self, slot: int) -> LeasedSlot:
        block = self._table.block(slot)
        assert self._table.pin_count(slot), f"slot {slot} is leased and not pinned"
        return LeasedSlot(
            hash=block.hash.hex(),
            parent=block.parent.hex(),
            namespace=block.namespace.hex(),
            slot=slot,
            checksum=block.checksum,
            bytes=block.bytes,
            part_checksums=list(block.part_checksums) if block.part_count > 1 else [],
        )

    def release_copy(self, request: ReleaseRequest) -> ReleaseReply:
        """End a copier's lease; the reply says whether it was valid until now."""
        lease = self.leases.find(request.lease)
        if lease is None or lease.reason != COPY:
            return ReleaseReply(valid=False)
        self.leases.release(lease.id)
        self.end([lease])
        return ReleaseReply(valid=True)

    # --- questions --------------------------------------------------------------------------

    def is_read(self) -> bool:
        """Tell whether slots may be read now: a pin of an operator reads no bytes."""
        return any(lease.reason != PIN for lease in self.leases.all())

    def pins(self) -> Counter[int]:
        """Return how many leases hold each slot, for `check`."""
        return Counter(slot for lease in self.leases.all() for slot in lease.slots)

    def check(self) -> None:
        """Assert every invariant of the leases."""
        self.leases.check()
