"""Reads, G3 → G2: fills that the host tier asks for, verified, and answered per block.

A fill waits until its arena is mapped and its turn has come. Then its blocks are pinned and read
into the staged arena slots that the host tier has lent, and the fill is answered once. A block
whose bytes are wrong is quarantined. `READ` has the states of a fill that is being read.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from kvbm_common.identity import SequenceHash, hashes_from_hex
from kvbm_common.nixl.transfers import TransferTimeout
from kvbm_common.tier.layout import rounded_up
from kvbm_common.tier.machine import InvalidTransition, Machine
from kvbm_common.tier.slots import Block
from kvbm_common.wire.slot_entries import FilledSlot
from kvbm_common.wire.verbs import ArenaReply, ErrorBody, FillReply, FillRequest, FillSlot

from kvbm_disk_tier.core.early_fills import EarlyFills
from kvbm_disk_tier.core.effects import Answer, ReadSlots
from kvbm_disk_tier.core.health import SLOW_MS, Cause, DiskHealth
from kvbm_disk_tier.core.host_arenas import HostArenas
from kvbm_disk_tier.core.inventory import Inventory
from kvbm_disk_tier.core.limits import Means
from kvbm_disk_tier.core.messages import STALE_ARENA, FillAsked, ReadDone, ReadFailed
from kvbm_disk_tier.core.store_status import StoreStatus

AHEAD_MS = 1
"""The delay of a fill for each block of its run before it, in milliseconds. The front of a short
run overtakes the tail of a long one, and no tail waits without end."""
SUMMED_UP = 2
"""Reads on their way, those being summed up included, as a multiple of what may be in flight."""
NOT_THE_DISK = (TransferTimeout.code, STALE_ARENA)
"""Reasons of failed reads that are no trouble of the disk."""


class ReadState(Enum):
    """The step that a read waits for: the disk, or the checksums of the bytes that came."""

    READING = "reading"
    SUMMING = "summing"


READ = Machine(
    "disk read",
    {
        (None, "start"): ReadState.READING,
        (ReadState.READING, "landed"): ReadState.SUMMING,
        (ReadState.READING, "done"): None,
        (ReadState.READING, "failed"): None,
        (ReadState.SUMMING, "done"): None,
        (ReadState.SUMMING, "failed"): None,
    },
)


@dataclass(slots=True)
class Read:
    """A fill in flight: `slots` are pinned and being read; its other blocks are gone."""

    reply_to: int
    asked: list[FillSlot]
    slots: dict[SequenceHash, int]
    too_large: dict[SequenceHash, str]
    """Blocks that are longer than the slots that were lent for them, and the reason to tell."""
    load: int
    """The part of `StoreStatus.read_load_max` that the read takes while it is in flight."""
    started_ms: int
    state: ReadState


class Reads:
    """All fills that are not answered yet."""

    def __init__(
        self,
        *,
        ids: Iterator[int],
        store: StoreStatus,
        health: DiskHealth,
        arenas: HostArenas,
        inventory: Inventory,
        means: Means,
    ) -> None:
        """Start without reads; `ids` numbers them and is shared with the writes."""
        self.in_flight: dict[int, Read] = {}
        self.waiting: list[tuple[int, int, FillAsked]] = []
        """A heap of (turn, number of arrival, fill)."""
        self.stopped = False
        """True if the tier is stopping, so that every fill is refused."""
        self._ids = ids
        self._limits, self._counts, self._emit = means.limits, means.counts, means.emit
        self._store = store
        self._health = health
        self._arenas = arenas
        self._inventory = inventory
        self.early = EarlyFills(arenas)
        self._arrivals = 0

    @property
    def waiting_count(self) -> int:
        """The fills that wait for their arena or their turn."""
        return len(self.waiting) + len(self.early.fills)

    # --- fills ------------------------------------------------------------------------------

    def asked(self, event: FillAsked, now_ms: int) -> None:
        """Let a fill wait, or refuse it; raises IdentityError."""
        hashes_from_hex([slot.hash for slot in event.request.slots])
        if self.waiting_count >= self._limits.reads_waiting_max:
            self._refuse(event, ErrorBody(code="busy", message="too many fills are waiting"))
            return
        if self.stopped or not self.early.takes(event):
            self._queue(event, now_ms)

    def _queue(self, event: FillAsked, now_ms: int) -> None:
        """Let a fill wait for its turn, or refuse it."""
        refusal = self._refusal(event.request, now_ms)
        if refusal is not None:
            self._refuse(event, refusal)
            return
        assert event.request.ahead >= 0
        self._arrivals += 1
        turn = now_ms + event.request.ahead * AHEAD_MS
        heapq.heappush(self.waiting, (turn, self._arrivals, event))

    def _refusal(self, request: FillRequest, now_ms: int) -> ErrorBody | None:
        arena = self._arenas.usable.get(request.epoch)
        if self.stopped:
            return ErrorBody(code="stopping", message="this disk tier is stopping")
        if arena is None or not self._store.works:
            return ErrorBody(code="stale_arena", message="another arena is mapped", field="epoch")
        if now_ms >= request.until_ms:
            return ErrorBody(code="too_late", message="the deadline has passed", field="until_ms")
        if not self._health.reads:
            return ErrorBody(code="disk_bypassed", message="the disk fails or is too slow")
        return _bad_slots(request, arena)

    def _refuse(self, event: FillAsked, refusal: ErrorBody) -> None:
        assert refusal.code, "a refusal says why"
        self._counts[f"dropped.fill_{refusal.code}"] += len(event.request.slots)
        self._emit(Answer(event.reply_to, refusal))

    def advance(self, now_ms: int) -> None:
        """Start as many reads as may be in flight; some that wait may be stale by now."""
        early = self.early
        for event in early.release_all() if self.stopped else early.release(now_ms):
            self._queue(event, now_ms)
        while self.waiting and self._may_start():
            _, _, event = heapq.heappop(self.waiting)
            refusal = self._refusal(event.request, now_ms)
            if refusal is not None:
                self._refuse(event, refusal)
            else:
                self._start(event, now_ms)

    def _may_start(self) -> bool:
        store = self._store
        most, ahead = store.read_load_max, store.ahead_load
        load = reading = 0
        for read in self.in_flight.values():
            load += read.load
            reading += read.load if read.state is ReadState.READING else 0
        free = reading < most + ahead and load < SUMMED_UP * most + ahead
        return free and len(self.in_flight) < self._limits.reads_max

    def _start(self, event: FillAsked, now_ms: int) -> None:
        table, request = self._inventory.table, event.request
        arena = self._arenas.usable[request.epoch]
        room = request.slot_bytes or arena.slot_bytes
        slots: dict[SequenceHash, int] = {}
        too_large: dict[SequenceHash, str] = {}
        targets: list[int] = []
        names = hashes_from_hex([asked.hash for asked in request.slots])
        for asked, name in zip(request.slots, names, strict=True):
            slot = table.find(name)
            if slot is None:
                self._counts["dropped.fill_gone"] += 1
                continue
            if rounded_up(table.bytes_in(slot)) > room:
                self._counts["dropped.fill_too_large"] += 1
                too_large[name] = "too_large"
                continue
            table.pin(slot, used=True)
            slots[name] = slot
            targets.append(asked.slot)
        blocks = tuple(table.block(slot) for slot in slots.values())
        load = sum([table.slot_bytes(slot) for slot in slots.values()])
        read = Read(
            event.reply_to, request.slots, slots, too_large, load, now_ms, READ.next(None, "start")
        )
        if not slots:
            self._emit(Answer(read.reply_to, _reply(read, {}, {})))
            return
        assert len(targets) == len(slots), "a block is asked for twice"
        read_id = next(self._ids)
        assert read_id not in self.in_flight, f"two reads have id {read_id}"
        self.in_flight[read_id] = read
        self._emit(
            ReadSlots(
                read_id,
                request.epoch,
                tuple(table.places(slots.values())),
                tuple(targets),
                blocks,
                arena.slot_bytes,
                request.until_ms,
            )
        )

    # --- outcomes ---------------------------------------------------------------------------

    def landed(self, read_id: int) -> None:
        """Let another read start: the bytes of this one are there.

        The mover may say so once more, or when the read has ended.
        """
        read = self.in_flight.get(read_id)
        if read is not None and READ.has(read.state, "landed"):
            self._move(read_id, "landed")

    def done(self, event: ReadDone, now_ms: int) -> None:
        """Answer a fill whose bytes are there and summed up, and quarantine what is wrong."""
        read = self._move(event.read, "done")
        assert len(event.intact) == len(read.slots), f"{event}: {self._story(read)}"
        self._health.good(Cause.READ, read.started_ms, now_ms)
        table, counts = self._inventory.table, self._counts
        intact: dict[SequenceHash, Block] = {}
        lost: dict[str, list[tuple[int, Block]]] = {"corrupt": [], "gone": []}
        reasons = event.reasons or ("corrupt",) * len(event.intact)
        told: dict[SequenceHash, str] = {}
        sums = event.sums or (b"",) * len(event.intact)
        outcomes = zip(read.slots.items(), event.intact, reasons, sums, strict=True)
        for (name, slot), ok, reason, parts in outcomes:
            if ok:
                block = table.block(slot)
                intact[name] = block.with_sums(parts) if parts else block
                continue
            told[name] = reason
            counts[f"dropped.fill_{reason}"] += 1
            self._inventory.diary.note(now_ms, f"was read: {reason}", name)
            # Another read may have found it so, and it may have been written again since.
            if reason in lost and table.find(name) == slot:
                lost[reason].append((slot, table.block(slot)))
        counts["fill_blocks"] += len(intact)
        sizes = [table.bytes_in(slot) for slot in read.slots.values()]
        counts["bytes.read"] += read.load if self._store.kind.sized else sum(sizes)
        table.unpin(read.slots.values())
        for reason, entries in lost.items():
            if entries:
                self._inventory.lose(entries, reason, now_ms)
        self._emit(Answer(read.reply_to, _reply(read, intact, told)))

    def failed(self, event: ReadFailed, now_ms: int) -> None:
        """Answer a fill whose read failed: none of its bytes can be believed."""
        assert event.reason, "a read fails for a reason"
        read = self._move(event.read, "failed")
        # A short deadline that has passed says nothing of the disk, an old arena neither.
        if event.reason not in NOT_THE_DISK or now_ms - read.started_ms >= SLOW_MS:
            self._health.trouble(Cause.READ, event.detail or event.reason, now_ms)
        self._counts[f"dropped.fill_{event.reason}"] += len(read.slots)
        self._inventory.table.unpin(read.slots.values())
        told = dict.fromkeys(read.slots, event.reason)
        self._emit(Answer(read.reply_to, _reply(read, {}, told)))

    def _move(self, read_id: int, event: str) -> Read:
        """Move a read by the table, and return it; it is gone when the table says so."""
        read = self.in_flight.get(read_id)
        assert read is not None, f"{event!r} for read {read_id}, which is not in flight"
        if not READ.has(read.state, event):
            raise InvalidTransition(READ.refusal(read.state, event, self._story(read)))
        state = READ.transitions[read.state, event]
        if state is None:
            del self.in_flight[read_id]
        else:
            read.state = state
        return read

    # --- questions --------------------------------------------------------------------------

    def pins(self) -> Counter[int]:
        """Return every pin that a read holds, for `check`."""
        return Counter(slot for read in self.in_flight.values() for slot in read.slots.values())

    def _story(self, read: Read) -> str:
        return str([self._inventory.diary.story(name) for name in read.slots])

    def check(self) -> None:
        """Assert every invariant of the fills."""
        assert len(self.in_flight) <= self._limits.reads_max
        assert self.waiting_count <= self._limits.reads_waiting_max
        assert all(read.slots for read in self.in_flight.values()), "a read without blocks"


def _bad_slots(request: FillRequest, arena: ArenaReply) -> ErrorBody | None:
    """Return what is wrong with the slots that a fill lends; None: nothing is."""
    length = request.slot_bytes or (0 if arena.sizes else arena.slot_bytes)
    units = -(-length // arena.slot_bytes)
    slots = sorted(slot.slot for slot in request.slots)
    if not units or (slots and slots[-1] + units > arena.slot_count):
        return ErrorBody(code="bad_slot", message="no such arena slot", field="slots")
    if len({slot.hash for slot in request.slots}) < len(slots):
        return ErrorBody(code="duplicate", message="a hash twice", field="slots")
    if any(after - slot < units for slot, after in pairwise(slots)):
        return ErrorBody(code="duplicate", message="a slot twice, or in part", field="slots")
    return None


def _reply(
    read: Read, intact: Mapping[SequenceHash, Block], told: Mapping[SequenceHash, str]
) -> FillReply:
    """Return one entry per asked slot, in the asked order.

    `told`: why a block that was read is not ok.
    """
    assert not intact.keys() & told.keys(), "a block is intact or not"
    slots: list[FilledSlot] = []
    names = hashes_from_hex([asked.hash for asked in read.asked])
    for asked, name in zip(read.asked, names, strict=True):
        block = intact.get(name)
        if block is None:
            why = told.get(name) or read.too_large.get(name, "gone")
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
                parts=block.code,
                part_sums=block.part_sums if block.code > 1 else b"",
            )
        )
    assert len(slots) == len(read.asked)
    return FillReply(slots=slots)
