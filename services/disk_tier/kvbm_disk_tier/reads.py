"""Reads, G3 → G2: fills that the host tier asks for, verified, and answered per block.

A fill waits for its turn, pins the blocks that are there, reads them into the staged arena slots
that it was lent, and is answered once. A block whose bytes are wrong is quarantined.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvbm_common.identity import SequenceHash, hashes_from_hex
from kvbm_common.slots import Block
from kvbm_common.transfers import TransferTimeout
from kvbm_common.wire.verbs import ErrorBody, FilledSlot, FillReply, FillRequest, FillSlot

from kvbm_disk_tier.messages import (
    STALE_ARENA,
    Answer,
    FillAsked,
    ReadDone,
    ReadFailed,
    ReadSlots,
)
from kvbm_disk_tier.tier import SLOW_MS, Tier

AHEAD_MS = 1
"""A block that is asked for ahead costs a fill so much of its turn: the front of a short run
overtakes the tail of a long one, and no tail waits for ever."""
SUMMED_UP = 2
"""So many times what may fly may be on its way, with what is summed up."""
NOT_THE_DISK = (TransferTimeout.code, STALE_ARENA)
"""Reasons of failed reads."""


@dataclass(frozen=True, slots=True)
class Read:
    """A fill in flight: some slots pinned and being read, the rest of it already answered."""

    reply_to: int
    asked: list[FillSlot]
    slots: dict[SequenceHash, int]
    started_ms: int


class Reads:
    """All fills that are not answered yet."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._reads: dict[int, Read] = {}
        self._landed: set[int] = set()
        """Reads whose bytes are there and are summed up: the disk has done with them."""
        self._waiting: list[tuple[int, int, FillAsked]] = []
        """A heap of (turn, number of arrival, fill)."""
        self._arrivals = 0

    def __len__(self) -> int:
        """Fills in flight."""
        return len(self._reads)

    @property
    def waiting_count(self) -> int:
        """Fills that wait for their turn."""
        return len(self._waiting)

    def asked(self, event: FillAsked, now_ms: int) -> None:
        """The host tier wants blocks; raises IdentityError."""
        hashes_from_hex([slot.hash for slot in event.request.slots])
        if len(self._waiting) >= self._tier.limits.reads_waiting_max:
            self._refuse(event, ErrorBody(code="busy", message="too many fills are waiting"))
            return
        refusal = self._refusal(event.request, now_ms)
        if refusal is not None:
            self._refuse(event, refusal)
            return
        self._arrivals += 1
        turn = now_ms + event.request.ahead * AHEAD_MS
        heapq.heappush(self._waiting, (turn, self._arrivals, event))

    def _refusal(self, request: FillRequest, now_ms: int) -> ErrorBody | None:
        arena = self._tier.arena_of_life(request.epoch)
        if self._tier.stopping:
            return ErrorBody(code="stopping", message="this disk tier is stopping")
        if arena is None or not self._tier.usable(arena) or not self._tier.fits():
            return ErrorBody(code="stale_arena", message="another arena is mapped", field="epoch")
        if now_ms >= request.until_ms:
            return ErrorBody(code="too_late", message="the deadline has passed", field="until_ms")
        if not self._tier.breaker.allows(now_ms):
            return ErrorBody(code="disk_bypassed", message="the disk fails or is too slow")
        if any(slot.slot >= arena.slot_count for slot in request.slots):
            return ErrorBody(code="bad_slot", message="no such arena slot", field="slots")
        for field_name in ("slot", "hash"):
            if len({getattr(slot, field_name) for slot in request.slots}) < len(request.slots):
                return ErrorBody(code="duplicate", message=f"a {field_name} twice", field="slots")
        return None

    def _refuse(self, event: FillAsked, refusal: ErrorBody) -> None:
        self._tier.counts[f"dropped.fill_{refusal.code}"] += len(event.request.slots)
        self._tier.emit(Answer(event.reply_to, refusal))

    def advance(self, now_ms: int) -> None:
        """Start as many reads as may fly; what was right when it came may be stale by now."""
        while self._waiting and self._may_start():
            _, _, event = heapq.heappop(self._waiting)
            refusal = self._refusal(event.request, now_ms)
            if refusal is not None:
                self._refuse(event, refusal)
            else:
                self._start(event, now_ms)

    def _may_start(self) -> bool:
        limits, ahead = self._tier.limits, self._tier.ahead_blocks
        sizes = {read_id: len(read.slots) for read_id, read in self._reads.items()}
        blocks = sum(sizes.values())
        flying = blocks - sum(sizes[read_id] for read_id in self._landed)
        free = flying < limits.read_blocks_max + ahead
        free = free and blocks < SUMMED_UP * limits.read_blocks_max + ahead
        return free and len(self._reads) < limits.reads_max

    def _start(self, event: FillAsked, now_ms: int) -> None:
        table = self._tier.table
        slots: dict[SequenceHash, int] = {}
        targets: list[int] = []
        names = hashes_from_hex([asked.hash for asked in event.request.slots])
        for asked, name in zip(event.request.slots, names, strict=True):
            slot = table.find(name)
            if slot is None:
                self._tier.counts["dropped.fill_gone"] += 1
                continue
            table.pin(slot, used=True)
            slots[name] = slot
            targets.append(asked.slot)
        read = Read(event.reply_to, event.request.slots, slots, now_ms)
        arena = self._tier.arena_of_life(event.request.epoch)
        assert arena is not None, "a fill for no arena was not refused"
        if not slots:
            self._tier.emit(Answer(read.reply_to, _reply(read, {}, {})))
            return
        read_id = self._tier.take_id()
        self._reads[read_id] = read
        self._tier.breaker.start()
        self._tier.emit(
            ReadSlots(
                read_id,
                event.request.epoch,
                tuple(slots.values()),
                tuple(targets),
                tuple(table.block(slot) for slot in slots.values()),
                arena.slot_bytes,
                event.request.until_ms,
            )
        )

    def landed(self, read_id: int) -> None:
        """Its bytes are there: another one may fly."""
        if read_id in self._reads:
            self._landed.add(read_id)

    def _ended(self, read_id: int) -> Read:
        self._landed.discard(read_id)
        return self._reads.pop(read_id)

    def done(self, event: ReadDone, now_ms: int) -> None:
        """The bytes are there and summed up: answer, and quarantine what is wrong."""
        tier = self._tier
        read = self._ended(event.read)
        tier.disk_ended(read.started_ms, now_ms, failed=False)
        intact: dict[SequenceHash, Block] = {}
        lost: dict[str, list[tuple[int, Block]]] = {"corrupt": [], "gone": []}
        reasons = event.reasons or ("corrupt",) * len(event.intact)
        told: dict[SequenceHash, str] = {}
        for (name, slot), ok, reason in zip(read.slots.items(), event.intact, reasons, strict=True):
            if ok:
                intact[name] = tier.table.block(slot)
                continue
            told[name] = reason
            tier.counts[f"dropped.fill_{reason}"] += 1
            tier.diary.note(now_ms, f"was read: {reason}", name)
            # Another read may have found it so, and it may have been written anew since.
            if reason in lost and tier.table.find(name) == slot:
                lost[reason].append((slot, tier.table.block(slot)))
        tier.counts["fill_blocks"] += len(intact)
        tier.counts["bytes.read"] += tier.stored_bytes(map(tier.table.block, read.slots.values()))
        tier.table.unpin(read.slots.values())
        tier.quarantine(lost["corrupt"])
        tier.lose(lost["gone"], "gone")
        tier.emit(Answer(read.reply_to, _reply(read, intact, told)))

    def failed(self, event: ReadFailed, now_ms: int) -> None:
        """Nothing of it can be believed."""
        read = self._ended(event.read)
        # A short deadline that has passed says nothing of the disk, an old arena neither.
        if event.reason not in NOT_THE_DISK or now_ms - read.started_ms >= SLOW_MS:
            self._tier.disk_ended(read.started_ms, now_ms, failed=True)
        self._tier.counts[f"dropped.fill_{event.reason}"] += len(read.slots)
        self._tier.table.unpin(read.slots.values())
        told = dict.fromkeys(read.slots, event.reason)
        self._tier.emit(Answer(read.reply_to, _reply(read, {}, told)))

    def pins(self) -> Counter[int]:
        """Every pin that a read holds, for `check`."""
        return Counter(slot for read in self._reads.values() for slot in read.slots.values())

    def check(self) -> None:
        """Assert every invariant."""
        assert len(self._reads) <= self._tier.limits.reads_max
        assert len(self._waiting) <= self._tier.limits.reads_waiting_max
        assert self._landed <= self._reads.keys()


def _reply(
    read: Read, intact: Mapping[SequenceHash, Block], told: Mapping[SequenceHash, str]
) -> FillReply:
    """One entry per asked slot, in the asked order; `told`: why a block that was read is not ok."""
    slots: list[FilledSlot] = []
    names = hashes_from_hex([asked.hash for asked in read.asked])
    for asked, name in zip(read.asked, names, strict=True):
        block = intact.get(name)
        if block is None:
            why = told.get(name, "gone")
            slots.append(FilledSlot(hash=asked.hash, slot=asked.slot, ok=False, reason=why))
            continue
        slots.append(
            FilledSlot(
                hash=asked.hash,
                slot=asked.slot,
                ok=True,
                parent=block.parent.hex(),
                namespace=block.namespace.hex(),
                checksum=block.checksum,
                bytes=block.bytes,
            )
        )
    return FillReply(slots=slots)
