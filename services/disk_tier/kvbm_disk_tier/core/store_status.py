"""Store status: whether the store below the core works, how it is cut, how much moves at once.

It is cut for the largest blocks of the arenas that are there when it is made, and takes blocks of
all sizes up to a slab. A store whose slabs are too short for every block of every arena is replaced
once nothing is in flight. A store that cannot be made is tried again, and reported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from enum import Enum

from kvbm_common.tier.blocks import batch_blocks
from kvbm_common.tier.layout import Layout, rounded_up
from kvbm_common.tier.machine import Machine
from kvbm_common.tier.slab_pool import KNOWN_MAX
from kvbm_common.wire.admin import RemoveReply
from kvbm_common.wire.verbs import ErrorBody

from kvbm_disk_tier.core.limits import Means, StoreKind
from kvbm_disk_tier.core.messages import DeletesAnswered, DeletesRefused, StoreOpened

STORE_FAULT = "store"
"""The error of a store that cannot be used, or keeps what it was to delete."""
UNDELETED = "undeleted"
"""The error of a reset while objects wait to be deleted: it may be well soon."""
RESETS_MAX = 64
"""Jobs whose orders are kept; one that is forgotten waits for the deletes until then."""
STORE_RETRY_MS = 5_000
"""The pause before a store that could not be opened is tried again: full disks stay full."""


class StoreState(Enum):
    """The states of a store: only an OPEN one lets blocks be moved to and from it."""

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
        (StoreState.OPENING, "absent"): StoreState.CLOSED,
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


def may_come_back(code: str, problem: str) -> ErrorBody:
    """Return the refusal of a reset after which blocks may come back."""
    assert problem, "a refusal has a reason"
    return ErrorBody(code=code, message=f"blocks that are removed here may come back: {problem}")


class StoreStatus:
    """One store at a time, by what the medium says of it."""

    def __init__(self, kind: StoreKind, means: Means) -> None:
        limits = means.limits
        self.kind = kind
        self.state = STORE.next(None, "made")
        self.problem = ""
        """The reason why there is no store, or why it does not work, for /readyz."""
        self.keeps = ""
        """The reason why it deletes nothing, for /readyz; empty: it deletes, or was not asked."""
        self.undeleted = ""
        """The objects that wait to be deleted, and why; empty: none was left."""
        self.answered_order = 0
        """The order of the last removal whose deletes a bucket has answered."""
        self._reset_orders: OrderedDict[str, int] = OrderedDict()
        """Job of a reset → the order up to which it waits for answers; the newest jobs last."""
        self.layout: Layout | None = None
        """The layout of the store's slots; None: there is no store."""
        self.misfits = not kind.sized
        """Another store, or a first one, is to be opened once nothing is in flight."""
        self.read_blocks_max = limits.read_blocks_max
        self.write_blocks_max = limits.write_blocks_max
        """Blocks of the first size in flight that keep it busy: as measured, or as configured."""
        self.read_load_max = self.write_load_max = self.ahead_load = 0
        """The loads of those blocks, and of the blocks that wait in the mover at most. A load is
        the bytes of slots, or their number."""
        self.transfer_of: dict[int, int] = {}
        """Slot size → the number of blocks that `transfer_blocks` has returned for it."""
        self.works = False
        """Blocks can be moved now."""
        self.wants_opening = self.misfits
        """A store is to be opened: none fits, or the one here could not be."""
        self._limits, self._counts = limits, means.counts
        self._open_again_ms = 0

    @property
    def has_slots(self) -> bool:
        """Tell whether blocks move between arenas and the store, once it works."""
        return self.layout is not None or not self.kind.sized

    @property
    def removal_problem(self) -> str:
        """Return why the store may keep what is removed from the table; empty: it does not.

        What a bucket holds is not known before it was opened. A disk says it before the core
        starts.
        """
        is_known = self.kind.sized or self.layout is not None
        return self.problem or self.keeps or ("" if is_known else "the store has not answered yet")

    def deletes_told(self, event: DeletesRefused | DeletesAnswered) -> None:
        """Note what a bucket says of its deletes."""
        if isinstance(event, DeletesAnswered):
            assert event.order >= self.answered_order, f"{event} after {self.answered_order}"
            self.answered_order = event.order
        else:
            self.keeps, self.undeleted = event.reason, event.waiting

    def after_reset(self, job: str, answer: RemoveReply, order: int) -> RemoveReply | ErrorBody:
        """Return the answer to a reset: once nothing is left, what the bucket may have still.

        Its job waits for all deletes before its first question, also of evicted blocks, and for its
        own. Of later ones it waits for those that have failed. Without a job it is only its own.
        `order`: that of the last removal.
        """
        is_new = bool(job) and job not in self._reset_orders
        if not self.kind.sized and (answer.removed or is_new):  # A disk answers for no deletes.
            self._reset_orders[job] = order
            self._reset_orders.move_to_end(job)
            while len(self._reset_orders) > RESETS_MAX:
                self._reset_orders.popitem(last=False)
        if answer.removed or answer.more:
            return answer
        behind = self._reset_orders.get(job, 0) - self.answered_order
        text = f"the bucket has not answered all deletes yet: it is {behind} records behind"
        problem = self.undeleted or (text if behind > 0 else "")
        return may_come_back(UNDELETED, problem) if problem else answer

    @property
    def slot_bytes(self) -> int:
        """The length of the slots that the store was cut for; 0: it is not cut."""
        return self.layout.slot_bytes if self.layout is not None and self.kind.sized else 0

    def follow(self, sizes: Collection[int]) -> None:
        """Compare the store with the lengths of slots in the arenas that are mapped."""
        assert 0 not in sizes, "an arena without slots has no size yet"
        layout = self.layout
        if self.kind.sized:
            fits = layout is not None and any(
                layout.slot_bytes_of(size) <= layout.slab_bytes for size in sizes
            )
            self.misfits = bool(sizes) and not fits
        else:
            self.misfits = self.state is StoreState.CLOSED
        self.wants_opening = self.misfits or self._has_failed()

    def transfer_blocks(self, block_bytes: int) -> int:
        """Return how many blocks of this size are moved at once."""
        limits = self._limits
        count = limits.batch_blocks_max
        if self.kind.sized:  # Otherwise every object is a request of its own.
            count = batch_blocks(count, limits.batch_bytes, rounded_up(block_bytes))
        if len(self.transfer_of) >= KNOWN_MAX:
            self.transfer_of.clear()
        self.transfer_of[block_bytes] = count
        return count

    def may_open(self, now_ms: int) -> bool:
        """Tell whether a store can be opened now: none is being opened, or has just failed."""
        return self.state is not StoreState.OPENING and now_ms >= self._open_again_ms

    def open(self) -> None:
        """Note that a store is being opened; the one before it is lost."""
        self._move("open", self.problem)
        self.layout = None
        self.read_load_max = self.write_load_max = self.ahead_load = 0

    def opened(self, event: StoreOpened) -> None:
        """Take over what is known of the store that was opened."""
        layout = event.layout
        assert layout.slot_count > 0, "a store has slots"
        assert layout.is_sized == self.kind.sized, f"{layout} of a {self.kind.tier} tier"
        self._move("opened", "")
        self.layout = layout
        depth = event.depth
        if depth.reads is not None:
            self.read_blocks_max = depth.reads
        if depth.writes is not None:
            self.write_blocks_max = depth.writes
        self._counts["stores_outdated"] += event.replaced_format
        self._counts["bytes.measuring"] += depth.written_bytes
        self.read_load_max = self.read_blocks_max * layout.slot_bytes
        self.write_load_max = self.write_blocks_max * layout.slot_bytes
        if self.kind.sized:
            transfer = self.transfer_blocks(layout.slot_bytes - layout.extra_bytes)
            self.ahead_load = self._limits.ahead_batches * transfer * layout.slot_bytes

    def open_failed(self, reason: str, now_ms: int) -> None:
        """Note why there is no store; another try comes later, and the service lives on."""
        self._move("open failed", reason)
        self._counts["store_failures"] += 1
        self._open_again_ms = now_ms + STORE_RETRY_MS

    def absent(self) -> None:
        """Note that a store could be made here; an arena will say how large its slots are."""
        self._move("absent", "")

    def went_down(self, reason: str) -> None:
        """Note that the store does not work for now: nothing is begun until it is up again."""
        self._move("went down", reason)
        self._counts["store_failures"] += 1

    def came_up(self) -> None:
        """Note that the store works again."""
        self._move("came up", "")

    def _move(self, event: str, problem: str) -> None:
        """Move by the table; `problem` is why there is no store now, or why it does not work."""
        self.state = STORE.next(self.state, event, self.problem)
        self.problem = problem
        self.works = self.state is StoreState.OPEN
        self.wants_opening = self.misfits or self._has_failed()

    def _has_failed(self) -> bool:
        """Tell whether a store could not be opened, and is to be tried again."""
        return self.kind.sized and self.state is StoreState.CLOSED and bool(self.problem)

    def check(self) -> None:
        """Assert every invariant of the store."""
        assert self.works == (self.state is StoreState.OPEN), f"{self.works} in {self.state.name}"
        wanted = self.misfits or self._has_failed()
        assert self.wants_opening == wanted, f"{self.problem} in {self.state.name}"
        assert not self.works or not self.problem, f"it works, but {self.problem}"
        is_there = self.works or self.state is StoreState.DOWN
        assert (self.layout is not None) == is_there, f"{self.layout} in {self.state.name}"
