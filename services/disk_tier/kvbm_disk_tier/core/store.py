"""The store below the core: whether it works, and how large its slots and transfers are.

It follows the arenas: slots are as large as an arena's, and a store that fits no arena is replaced
once nothing is in flight. A store that cannot be made is tried again, and reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum

from kvbm_common.tier.batches import batch_blocks
from kvbm_common.tier.machine import Machine
from kvbm_common.tier.slots import Block

from kvbm_disk_tier.core.limits import DiskTierLimits, StoreKind
from kvbm_disk_tier.core.messages import StoreOpened

STORE_RETRY_MS = 5_000
"""A full disk is rarely emptied faster."""


class StoreState(Enum):
    """Whether blocks can be moved to and from the store."""

    CLOSED = "closed"
    OPENING = "opening"
    OPEN = "open"
    DOWN = "down"


STORE = Machine(
    "store",
    {
        (None, "made"): StoreState.CLOSED,
        (StoreState.CLOSED, "open"): StoreState.OPENING,
        (StoreState.OPEN, "open"): StoreState.OPENING,
        (StoreState.CLOSED, "opened"): StoreState.OPEN,
        (StoreState.OPENING, "opened"): StoreState.OPEN,
        (StoreState.CLOSED, "open failed"): StoreState.CLOSED,
        (StoreState.OPENING, "open failed"): StoreState.CLOSED,
        (StoreState.OPEN, "went down"): StoreState.DOWN,
        (StoreState.DOWN, "went down"): StoreState.DOWN,
        (StoreState.CLOSED, "went down"): StoreState.CLOSED,
        (StoreState.OPENING, "went down"): StoreState.OPENING,
        (StoreState.DOWN, "came up"): StoreState.OPEN,
        (StoreState.OPEN, "came up"): StoreState.OPEN,
        (StoreState.CLOSED, "came up"): StoreState.CLOSED,
        (StoreState.OPENING, "came up"): StoreState.OPENING,
    },
)


class Store:
    """One store at a time, by what the medium says of it."""

    def __init__(self, kind: StoreKind, limits: DiskTierLimits, counts: Counter[str]) -> None:
        self.kind = kind
        self.state = STORE.next(None, "made")
        self.problem = ""
        """Why there is no store, or why it does not work, for /readyz."""
        self.slot_bytes = 0
        self.misfits = not kind.sized
        """Another store, or a first one, is to be opened once nothing is in flight."""
        self.read_blocks_max = limits.read_blocks_max
        self.write_blocks_max = limits.write_blocks_max
        """Blocks in flight that keep the store busy: as measured, or as configured."""
        self.transfer_blocks = limits.batch_blocks_max
        """How many blocks are moved at once."""
        self.ahead_blocks = 0
        """How many blocks wait in the mover at most."""
        self.works = False
        """Blocks can be moved now."""
        self._limits = limits
        self._counts = counts
        self._open_again_ms = 0

    def takes(self, slot_bytes: int) -> bool:
        """Tell whether blocks move between an arena with slots of this size and the store."""
        assert slot_bytes >= 0
        return slot_bytes > 0 and (slot_bytes == self.slot_bytes or not self.kind.sized)

    def bytes_of(self, blocks: Sequence[Block]) -> int:
        """Return what blocks take up in the store: slots, or their own size."""
        if self.kind.sized:
            return self.slot_bytes * len(blocks)
        return sum(block.bytes for block in blocks)

    def follow(self, sizes: Collection[int]) -> None:
        """Compare the store with the slot sizes of the arenas that are mapped."""
        assert 0 not in sizes, "an arena without slots has no size yet"
        if self.kind.sized:
            self.misfits = bool(sizes) and self.slot_bytes not in sizes
        else:
            self.misfits = self.state is StoreState.CLOSED
            self.slot_bytes = max(sizes, default=self.slot_bytes)

    def may_open(self, now_ms: int) -> bool:
        """Tell whether a store can be opened now: none is being opened, or has just failed."""
        return self.state is not StoreState.OPENING and now_ms >= self._open_again_ms

    def open(self) -> None:
        """Note that a store is being opened; the one before it is lost."""
        self._move("open")
        self.slot_bytes = 0

    def opened(self, event: StoreOpened) -> None:
        """Take over what is known of the store that was opened."""
        assert event.slot_count > 0, "a store has slots"
        self._move("opened")
        self.problem = ""
        self.slot_bytes = event.slot_bytes
        depth, limits = event.depth, self._limits
        if depth.reads is not None:
            self.read_blocks_max = depth.reads
        if depth.writes is not None:
            self.write_blocks_max = depth.writes
        self._counts["stores_outdated"] += event.replaced_format
        self._counts["bytes.measuring"] += depth.written_bytes
        if self.kind.sized:  # Otherwise every object is a request of its own.
            self.transfer_blocks = batch_blocks(
                limits.batch_blocks_max, limits.batch_bytes, self.slot_bytes
            )
            self.ahead_blocks = limits.ahead_batches * self.transfer_blocks

    def open_failed(self, reason: str, now_ms: int) -> None:
        """Note why there is no store; another try comes later, and the service lives on."""
        self._move("open failed")
        self.problem = reason
        self._counts["store_failures"] += 1
        self._open_again_ms = now_ms + STORE_RETRY_MS

    def went_down(self, reason: str) -> None:
        """Note that the store does not work for now: nothing is begun until it is up again."""
        self._move("went down")
        self.problem = reason
        self._counts["store_failures"] += 1

    def came_up(self) -> None:
        """Note that the store works again."""
        self._move("came up")
        self.problem = ""

    def _move(self, event: str) -> None:
        self.state = STORE.next(self.state, event, self.problem)
        self.works = self.state is StoreState.OPEN

    def check(self) -> None:
        """Assert every invariant of the store."""
        assert self.works == (self.state is StoreState.OPEN)
        assert not self.works or not self.problem, f"it works, but {self.problem}"
        assert self.transfer_blocks > 0
        assert (
            not self.kind.sized
            or self.works
            or self.state is StoreState.DOWN
            or (self.slot_bytes == 0)
        )
