"""The scrubber: idle blocks of the arena are read in turn and compared with their checksums.

Memory that has lost a bit is found before an engine asks for the block. A batch is read without a
pin, so that the scrubber holds up no eviction. The slot's generation tells what was evicted or
replaced under the read: that is no mismatch. A batch that took t ms of a processor is followed by a
pause that keeps the share of one core below the limit. A round through the arena that ends early is
followed by a rest: an idle tier would be read again and again. The states of the scrubber are drawn
in `docs/state_machines.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.machine import Machine
from kvbm_common.tier.slots import SlotTable

from kvbm_host_tier.core.arena import Arena
from kvbm_host_tier.core.held_blocks import HeldBlocks
from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.scrub_messages import ScrubDone, ScrubFailed, ScrubFound, ScrubSlots

BATCH_BYTES = 8 * 1024 * 1024
"""About 2 ms of reading from cold memory: no request waits long for its end."""
BATCH_BLOCKS_MAX = 256
SCAN_MAX = 1_024
"""Slots that one step looks at: some 0.2 ms."""
STEP_US = 500
"""The cost of a batch beside the reading: two steps of the core, and the way to the thread."""
EMPTY_MS = 250
"""The pause where none of the slots that were looked at holds an idle block."""
FAILED_MS = 60_000


class Reading(NamedTuple):
    """A block whose bytes are being read, and what tells that they are still its own."""

    name: SequenceHash
    slot: int
    generation: int


class ScrubState(Enum):
    """The states of the scrubber."""

    WAITING = "waiting"
    READING = "reading"


SCRUB = Machine(
    "scrubber",
    {
        (ScrubState.WAITING, "due"): ScrubState.READING,
        (ScrubState.READING, "done"): ScrubState.WAITING,
        (ScrubState.READING, "failed"): ScrubState.WAITING,
    },
)


class Scrubber:
    """One batch at a time, round the arena."""

    def __init__(
        self,
        held: HeldBlocks,
        arena: Arena,
        *,
        is_busy: Callable[[], bool],
        means: Means,
    ) -> None:
        """Start waiting.

        `is_busy`: whether a transfer is in flight, which the scrubber would take bandwidth from.
        """
        assert 0 <= means.limits.scrub_cpu_percent <= 100, means.limits
        self._held = held
        self._table: SlotTable = held.table
        self._arena = arena
        self._cpu_percent = means.limits.scrub_cpu_percent
        self._round_ms = means.limits.scrub_round_ms
        self._next_round_ms = 0
        self._is_busy = is_busy
        self._counts, self._emit = means.counts, means.emit
        self._state = ScrubState.WAITING
        self._reading: tuple[Reading, ...] = ()
        self._next_slot = 0
        self._due_ms = 0
        self._rests = False
        """True if the next look has time: there was no idle block, or the round has ended."""

    def _move(self, event: str) -> None:
        self._state = SCRUB.next(self._state, event)

    @property
    def is_resting(self) -> bool:
        """Tell whether the scrubber can wait for the next slow tick."""
        assert not self._reading or self._state is ScrubState.READING, f"{self._state.value}"
        return not self._cpu_percent or self._rests

    def tick(self, now_ms: int) -> None:
        """Begin the next batch if it is due."""
        is_waiting = self._cpu_percent and self._state is ScrubState.WAITING
        if not is_waiting or now_ms < self._due_ms or self._is_busy():
            return
        if self._next_slot == 0:
            if now_ms < self._next_round_ms:
                self._rests, self._due_ms = True, self._next_round_ms
                return
            self._next_round_ms = now_ms + self._round_ms
        found = self._next_batch()
        self._rests = not found
        if not found:
            self._due_ms = now_ms + EMPTY_MS
            return
        self._move("due")
        table = self._table
        self._reading = tuple(
            Reading(block.hash, slot, table.generation(slot)) for slot, block in found
        )
        slots, blocks = zip(*found, strict=True)
        self._emit(ScrubSlots(self._arena.info.path, tuple(table.places(slots)), blocks))

    def _next_batch(self) -> list[tuple[int, Block]]:
        """Return the next idle blocks and their slots; fewer where the scan ends before."""
        table, found, size = self._table, list[tuple[int, Block]](), 0
        for _ in range(min(SCAN_MAX, table.slots_made)):
            slot = self._next_slot % table.slots_made
            block = table.idle_block(slot)
            if block is not None:
                size += block.bytes
                if found and size > BATCH_BYTES:
                    break
                found.append((slot, block))
            self._end_slot(slot)
            is_round_over = self._next_slot == 0 and self._round_ms
            if is_round_over or len(found) == BATCH_BLOCKS_MAX:
                break
        assert len(found) <= BATCH_BLOCKS_MAX
        return found

    def _end_slot(self, slot: int) -> None:
        assert 0 <= slot < self._table.slots_made, f"slot {slot} of {self._table.slots_made}"
        self._next_slot = slot + 1
        if self._next_slot == self._table.slots_made:
            self._next_slot = 0
            self._counts["scrub_rounds"] += 1

    def done(self, event: ScrubDone, now_ms: int) -> None:
        """Discard the blocks whose bytes are wrong and that are still in their slots."""
        self._move("done")
        count = len(self._reading)
        assert all(0 <= index < count for index in event.wrong), f"{event.wrong} of {count} slots"
        reading, self._reading = self._reading, ()
        counts, table = self._counts, self._table
        counts["scrubbed_blocks"] += len(reading)
        counts["scrub_cpu_us"] += event.cpu_us
        cost_ms = (event.cpu_us + STEP_US) / 1000
        pause_ms = cost_ms * (100 / self._cpu_percent - 1)
        self._due_ms = now_ms + max(1, math.ceil(pause_ms))
        wrong = [reading[index] for index in event.wrong]
        corrupt = tuple(
            one.name
            for one in wrong
            if table.find(one.name) == one.slot and table.generation(one.slot) == one.generation
        )
        counts["scrub_corrupt_blocks"] += len(corrupt)
        if corrupt:
            self._held.diary.note_all(now_ms, "the scrubber found other bytes", corrupt)
            self._emit(ScrubFound(corrupt))
            self._held.remove(corrupt, "corrupt", now_ms)

    def failed(self, event: ScrubFailed, now_ms: int) -> None:
        """Wait for longer: the arena could not be read, and will most likely not be for a while."""
        assert event.reason
        self._move("failed")
        self._reading = ()
        self._counts[f"dropped.scrub_{event.reason}"] += 1
        self._due_ms = now_ms + FAILED_MS

    def check(self) -> None:
        """Assert every invariant of the scrubber."""
        assert len(self._reading) <= BATCH_BLOCKS_MAX
        assert 0 <= self._next_slot < max(1, self._table.slots_made)
        assert bool(self._reading) == (self._state is ScrubState.READING)
