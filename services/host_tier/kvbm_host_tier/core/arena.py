"""The arena: the host memory of this tier, and how it is cut into slots.

The slots have the size of the first engine's blocks. Where the configuration gives a number of
blocks and not of bytes, the memory itself is made at that moment, too.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbm_host_tier.core.messages import ArenaInfo, Emit, MakeArena

SLOT_ALIGNMENT = 4096
"""O_DIRECT reads and writes between arena and files need it."""


def slot_bytes_of(block_bytes: int) -> int:
    """Return the size of the slot that a block of this size takes."""
    assert block_bytes > 0
    return -(-block_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class Arena:
    """The memory that was made, and the slots that it was cut into."""

    def __init__(
        self,
        info: ArenaInfo,
        *,
        slots_wanted: int | None,
        make_slots: Callable[[int], None],
        emit: Emit,
    ) -> None:
        """Start without slots; `slots_wanted` is the configured number of them.

        None: as many as fit into the memory.
        """
        assert slots_wanted is None or slots_wanted >= 0
        self.info = info
        self.slot_bytes = 0
        """0: the memory is not cut yet."""
        self.slot_count = 0
        self.failure = ""
        """Why the memory could not be made the last time."""
        self._slots_wanted = slots_wanted
        self._make_slots = make_slots
        self._emit = emit
        self._is_being_made = False

    def is_missing(self, block_bytes: int) -> bool:
        """Have the memory made that the configured number of blocks needs; False: it is there."""
        if not self._slots_wanted or self.slot_bytes:
            return False
        size_bytes = self._slots_wanted * slot_bytes_of(block_bytes)
        if size_bytes <= self.info.capacity_bytes:
            return False
        if not self._is_being_made:
            self._is_being_made = True
            self._emit(MakeArena(size_bytes))
        return True

    def made(self, info: ArenaInfo) -> None:
        """Take the memory that was made; engines that were sent away introduce themselves again."""
        assert info.capacity_bytes > 0
        self._is_being_made, self.failure = False, ""
        self.info = info

    def refused(self, reason: str) -> None:
        """Note why the memory was not made; the next hello asks for it again."""
        self._is_being_made, self.failure = False, reason

    def cut(self, block_bytes: int) -> bool:
        """Cut the memory into slots for blocks of this size, once; False: they do not fit."""
        if self.slot_bytes == 0:
            slot_bytes = slot_bytes_of(block_bytes)
            slot_count = self.info.capacity_bytes // slot_bytes
            if self._slots_wanted is not None:
                slot_count = min(slot_count, self._slots_wanted)
            if slot_count == 0:
                return False
            self.slot_bytes, self.slot_count = slot_bytes, slot_count
            assert slot_bytes * slot_count <= self.info.capacity_bytes
            self._make_slots(slot_count)
        return block_bytes <= self.slot_bytes
