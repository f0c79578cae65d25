"""The arena: the host memory of this tier, how it is cut into slots, and the leases over these.

It is cut for the first engine's blocks, into slabs of whole slots of theirs. Blocks of other sizes
take slabs over. Where the configuration gives a number of blocks and not of bytes, the memory is
made for the first engine, too: for so many of its blocks. A leased slot (by an engine, a copier, an
operator's pin) is pinned. The lease ends by release, by its deadline or with its owner, and the
slot is unpinned with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvbm_common.identity import SequenceHash, hashes_from_hex
from kvbm_common.tier.layout import UNIT_BYTES, Layout, rounded_up
from kvbm_common.tier.leases import PIN, Lease, LeaseTable
from kvbm_common.tier.slots import SlotTable
from kvbm_common.wire.slot_entries import LeasedSlot
from kvbm_common.wire.verbs import ErrorBody, LeaseReply, LeaseRequest, ReleaseReply, ReleaseRequest

from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.messages import ArenaInfo, MakeArena


class Arena:
    """The memory that was made, and the layout by which it was cut."""

    def __init__(
        self,
        info: ArenaInfo,
        table: SlotTable,
        *,
        lay_out: Callable[[Layout], None],
        means: Means,
    ) -> None:
        """Start without slots; `lay_out` gives them to `table`."""
        slots_wanted = means.limits.slot_count
        assert slots_wanted is None or slots_wanted >= 0, means.limits
        self.info = info
        self.layout: Layout | None = None
        """The layout of the memory's slots; None: it is not cut yet."""
        self.failure = ""
        """The reason why the memory could not be made the last time."""
        self._table = table
        self._slots_wanted = slots_wanted
        self._slab_bytes = means.limits.slab_bytes
        self._lay_out = lay_out
        self._emit = means.emit
        self._is_being_made = False

    @property
    def unit_count(self) -> int:
        """The units of memory that slots can begin in; 0: it is not cut yet."""
        return 0 if self.layout is None else self.layout.total_bytes // UNIT_BYTES

    def is_missing(self, block_bytes: int) -> bool:
        """Have the memory made that the configured number of blocks needs; False: it is there."""
        if not self._slots_wanted or self.layout is not None:
            return False
        if self._is_being_made:
            return True  # It takes the place of the one that is there, however large that is.
        size_bytes = self._slots_wanted * rounded_up(block_bytes)
        if size_bytes <= self.info.capacity_bytes:
            return False
        self._is_being_made = True
        self._emit(MakeArena(size_bytes))
        return True

    def made(self, info: ArenaInfo) -> None:
        """Take the memory that was made; engines that were sent away introduce themselves again."""
        assert info.capacity_bytes > 0
        assert self.layout is None, "memory is replaced before an engine has seen it"
        self._is_being_made, self.failure = False, ""
        self.info = info

    def refused(self, reason: str, left: ArenaInfo) -> None:
        """Note why the memory was not made, and what is left; the next hello asks for it again."""
        assert reason, "memory is refused for a reason"
        assert self.layout is None, "memory that is cut is not replaced"
        self._is_being_made, self.failure = False, reason
        self.info = left

    def takes(self, block_bytes: int) -> bool:
        """Tell whether blocks of this size can be kept; the first ones have the memory cut."""
        if self.layout is None and not self._cut(rounded_up(block_bytes)):
            return False
        return self._table.pool.size_of(block_bytes) is not None

    def _cut(self, slot_bytes: int) -> bool:
        """Cut the memory into slabs of slots of this length; False: there is not room for one."""
        assert self.layout is None, "memory is cut once"
        slot_count = self.info.capacity_bytes // slot_bytes
        if self._slots_wanted is not None:
            slot_count = min(slot_count, self._slots_wanted)
        if slot_count == 0:
            return False
        layout = Layout.of(slot_bytes, slot_count)
        if self._slab_bytes:
            layout = Layout(slot_bytes, slot_count, max(1, self._slab_bytes // slot_bytes))
        assert layout.total_bytes <= self.info.capacity_bytes
        self.layout = layout
        self._lay_out(layout)
        return True

    def max_block_bytes(self) -> int:
        """Return the size of the largest block that can be kept."""
        return self.info.capacity_bytes if self.layout is None else self.layout.slab_bytes


UNSETTLED_MAX = 16
"""Released leases that pin their slots while lookups are answered."""
LEASE_MS_MAX = 60_000
"""The longest time for which a copier pins a slot without asking again."""
COPIED_PART, COPIED_PART_OF_ALL = 0.25, 0.5
"""A copier pins a quarter of the memory at most, and all together half of it, or each of them
`copied_least` slots where that is more. Others need the rest, whatever a copier asks for."""
COPY = "copy"
"""The reason of the leases that the verb grants, and the only ones that it takes back."""


class ArenaLeases:
    """The leases of one life of the tier; `leases` is their table, which remembers only."""

    def __init__(self, table: SlotTable, means: Means, *, epoch: int) -> None:
        assert epoch >= 0
        self.leases = LeaseTable(epoch)
        self._table = table
        self._counts, self._copied_least = means.counts, means.limits.copied_least
        self._epoch = epoch
        self._copied, self._copied_bytes = Counter[str](), Counter[str]()
        """Slots that copiers have leased, by owner, and how long they are."""
        self._unsettled: list[Lease] = []
        """Leases that engines have released, and that pin their slots until `settle`."""

    def end(self, leases: Iterable[Lease]) -> None:
        """Unpin the slots of leases that have left the table."""
        for lease in leases:
            assert self.leases.find(lease.id) is None, f"lease {lease.id} is still running"
            if lease.reason == COPY:
                self._copied[lease.owner] -= len(lease.slots)
                self._copied_bytes[lease.owner] -= sum(map(self._table.slot_bytes, lease.slots))
                if not self._copied[lease.owner]:
                    del self._copied[lease.owner], self._copied_bytes[lease.owner]
            self._table.unpin(lease.slots)

    def end_owner(self, owner: str) -> None:
        """End every lease of an owner that has left."""
        assert owner
        self.end(self.leases.end_owner(owner))

    def expire(self, now_ms: int) -> None:
        """End the leases whose deadline has passed."""
        assert now_ms >= 0
        self.end(self.leases.expire(now_ms))

    def let_go(self, slots: Iterable[int]) -> None:
        """Take slots whose blocks leave out of operators' pins: no reader will give them back."""
        self._table.unpin(self.leases.leave(slots))

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
        self._unsettled.append(lease)
        if found:
            self.settle()  # The blocks leave, and so may their slots.
        return found

    @property
    def must_settle(self) -> bool:
        """Tell whether so many released leases pin slots that no lookup may wait for less."""
        assert len(self._unsettled) <= UNSETTLED_MAX, f"{len(self._unsettled)} leases pin on"
        return len(self._unsettled) == UNSETTLED_MAX

    @property
    def is_settled(self) -> bool:
        """Tell whether every released lease has unpinned its slots."""
        return not self._unsettled

    def settle(self) -> None:
        """Unpin the slots of leases that engines have released."""
        if self._unsettled:
            ended, self._unsettled = self._unsettled, []
            self.end(ended)

    # --- the verbs --------------------------------------------------------------------------

    def lease_to_copy(self, request: LeaseRequest, now_ms: int) -> LeaseReply | ErrorBody:
        """Lease those of the wanted blocks that are here; raises IdentityError."""
        if request.epoch != self._epoch:
            return ErrorBody(code="stale_epoch", message="the arena is another one", field="epoch")
        slots: list[int] = []
        over_share: list[str] = []
        for name in dict.fromkeys(hashes_from_hex(request.hashes)):
            slot = self._table.find(name)
            if slot is not None and self._may_copy(slot, request.owner):
                self._table.pin(slot)
                self._copied[request.owner] += 1
                self._copied_bytes[request.owner] += self._table.slot_bytes(slot)
                slots.append(slot)
            elif slot is not None:
                over_share.append(name.hex())
        deadline_ms = now_ms + min(request.lease_ms, LEASE_MS_MAX)
        lease = self.leases.grant(
            request.owner, COPY, tuple(slots), deadline_ms=deadline_ms, token=request.token
        )
        assert lease.slots == tuple(slots)
        self._counts["leases_over_share"] += len(over_share)
        return LeaseReply(
            lease=lease.id, slots=[self._leased(slot) for slot in slots], over_share=over_share
        )

    def _may_copy(self, slot: int, owner: str) -> bool:
        """Tell whether a slot is within its owner's share, and that of all copiers."""
        assert self._copied[owner] >= 0, f"{owner} has leased {self._copied[owner]} slots"
        if self._copied[owner] < self._copied_least:
            return True
        size, most = self._table.slot_bytes(slot), self._table.usable_bytes
        own, total = self._copied_bytes[owner] + size, self._copied_bytes.total() + size
        return own <= COPIED_PART * most and total <= COPIED_PART_OF_ALL * most

    def _leased(self, slot: int) -> LeasedSlot:
        block = self._table.block(slot)
        assert self._table.pin_count(slot), f"slot {slot} is leased and not pinned"
        return LeasedSlot(
            hash=block.hash.hex(),
            parent=block.parent.hex(),
            namespace=block.namespace.hex(),
            slot=self._table.place(slot),
            checksum=block.checksum,
            bytes=block.bytes,
            parts=block.code,
        )

    def release_copy(self, request: ReleaseRequest) -> ReleaseReply:
        """End a copier's lease; the reply says whether it was valid until now."""
        lease = self.leases.find(request.lease)
        if lease is None or lease.reason != COPY or lease.token != request.token:
            return ReleaseReply(valid=False)
        self.leases.release(lease.id)
        self.end([lease])
        return ReleaseReply(valid=True)

    # --- questions --------------------------------------------------------------------------

    def is_read(self) -> bool:
        """Tell whether slots may be read now: a pin of an operator reads no bytes."""
        return any(lease.reason != PIN for lease in self.leases.all())

    def pins(self) -> Counter[int]:
        """Return how many leases hold each slot, those not settled included, for `check`."""
        pinning = (*self.leases.all(), *self._unsettled)
        return Counter(slot for lease in pinning for slot in lease.slots)

    def check(self) -> None:
        """Assert every invariant of the leases."""
        self.leases.check()
        assert self._table.discarded().isdisjoint(self.leases.pinned_slots), "a lost block's slot"
        copied, copied_bytes = Counter[str](), Counter[str]()
        for lease in self.leases.all():
            if lease.reason == COPY and lease.slots:
                copied[lease.owner] += len(lease.slots)
                copied_bytes[lease.owner] += sum(map(self._table.slot_bytes, lease.slots))
        assert +self._copied == copied, f"{self._copied} are counted, {copied} are copied"
        assert +self._copied_bytes == copied_bytes, f"{self._copied_bytes} bytes are counted"
