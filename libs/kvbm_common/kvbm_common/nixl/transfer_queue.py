"""The transfer queue: which transfers of the mover wait, and which one starts next.

Like the pump, it is called by the mover's thread only.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvbm_common.nixl.library import IN_FLIGHT_COUNT_MAX, POSIX_IO_COUNT_MAX
from kvbm_common.nixl.spans import Spans
from kvbm_common.nixl.transfers import Transferred

# Reads overtake writes that wait, because engines wait for reads. A write that has waited for so
# many seconds goes first where it may start; a limit on writes alone never holds up a read.
OVERTAKEN_S = 0.1


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer; its times are seconds on the clock of `time.monotonic`."""

    operation: str
    peer: str
    local: Spans
    remote: Spans
    deadline: float
    future: Future[Transferred] = field(default_factory=Future)
    name: str = ""  # Of an object: it is known to NIXL only while the transfer lasts.
    handle: Any = None
    accepted: float = 0.0
    posted: float = 0.0
    ended: float = 0.0
    settling: Future[None] | None = None  # Set when the future has failed and NIXL has not ended.

    @property
    def file_ios(self) -> int:
        return self.remote.count if self.remote.kind == "FILE" else 0

    @property
    def file_bytes(self) -> int:
        return self.local.bytes if self.remote.kind == "FILE" else 0


class TransferQueue:
    """The transfers that wait, and those in flight, within the limits of NIXL and the owner."""

    def __init__(self) -> None:
        self.waiting: deque[Transfer] = deque()
        self.posted: list[Transfer] = []  # In flight and draining.
        self.draining = 0
        self._file_ios = 0
        self._file_bytes = {"READ": 0, "WRITE": 0}
        self._file_bytes_max: dict[str, int | None] = {"READ": None, "WRITE": None}

    @property
    def in_flight_count(self) -> int:
        """Return how many transfers NIXL has that may still succeed."""
        return len(self.posted) - self.draining

    def limit_files(self, *, read_bytes: int | None, written_bytes: int | None) -> None:
        """Have at most so many bytes of each direction in flight to files; None: no limit."""
        self._file_bytes_max = {"READ": read_bytes, "WRITE": written_bytes}

    def pop(self, now: float) -> Transfer | None:
        """Take from the waiting transfers the next that may start; None: nothing may."""
        if not self.waiting:
            return None
        first = self._next(now)
        if not self._has_room(first):
            return None
        candidate = first if self._is_within_limit(first) else self._passing(first)
        if candidate is not None:
            self.waiting.remove(candidate)
        return candidate

    def note_posted(self, transfer: Transfer) -> None:
        """Count a transfer that is posted to NIXL now."""
        self.posted.append(transfer)
        self._file_ios += transfer.file_ios
        self._file_bytes[transfer.operation] += transfer.file_bytes

    def note_ended(self, transfer: Transfer) -> None:
        """Give back the room of a transfer that NIXL has ended."""
        self.posted.remove(transfer)
        self._file_ios -= transfer.file_ios
        self._file_bytes[transfer.operation] -= transfer.file_bytes
        self.draining -= transfer.settling is not None

    def _next(self, now: float) -> Transfer:
        first = self.waiting[0]
        if first.operation == "READ" or now > first.accepted + OVERTAKEN_S:
            return first
        return self._first_read() or first

    def _first_read(self) -> Transfer | None:
        return next((one for one in self.waiting if one.operation == "READ"), None)

    def _passing(self, held_up: Transfer) -> Transfer | None:
        """Return the read that may start while a write waits for other writes to end."""
        read = self._first_read() if held_up.operation == "WRITE" else None
        if read is None or not self._has_room(read) or not self._is_within_limit(read):
            return None
        return read

    def _has_room(self, transfer: Transfer) -> bool:
        """Tell whether NIXL takes one more transfer, of so many I/Os."""
        if self.in_flight_count >= IN_FLIGHT_COUNT_MAX:
            return False
        return self._file_ios + transfer.file_ios <= POSIX_IO_COUNT_MAX

    def _is_within_limit(self, transfer: Transfer) -> bool:
        """Tell whether its direction has room. One may always start, however large."""
        limit = self._file_bytes_max[transfer.operation]
        in_flight = self._file_bytes[transfer.operation]
        return limit is None or not in_flight or in_flight + transfer.file_bytes <= limit
