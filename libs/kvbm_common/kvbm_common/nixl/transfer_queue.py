"""Transfers on their way through the mover: those that wait, in which order they start, and room.

Like the pump, it is driven by the mover's thread only.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvbm_common.nixl.library import IN_FLIGHT_COUNT_MAX, POSIX_IO_COUNT_MAX
from kvbm_common.nixl.spans import Spans
from kvbm_common.nixl.transfers import Transferred

# Reads overtake writes that wait, because engines wait for reads; but no write waits longer than
# this.
OVERTAKEN_S = 0.1


@dataclass(slots=True, eq=False)
class Transfer:
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
        self.flights: list[Transfer] = []  # In flight and draining.
        self.draining = 0
        self._file_ios = 0
        self._file_bytes = {"READ": 0, "WRITE": 0}
        self._file_bytes_max: dict[str, int | None] = {"READ": None, "WRITE": None}

    @property
    def in_flight_count(self) -> int:
        """Return how many transfers NIXL has that may still succeed."""
        return len(self.flights) - self.draining

    def limit_files(self, *, read_bytes: int | None, written_bytes: int | None) -> None:
        """Have at most so many bytes of each direction in flight to files; None: no limit."""
        self._file_bytes_max = {"READ": read_bytes, "WRITE": written_bytes}

    def pop(self, now: float) -> Transfer | None:
        """Take the next transfer that may start out of those that wait; None: nothing may."""
        if not self.waiting or not self._may_start(following := self._next(now)):
            return None
        self.waiting.remove(following)
        return following

    def add_flight(self, transfer: Transfer) -> None:
        """Count a transfer that NIXL gets now."""
        self.flights.append(transfer)
        self._file_ios += transfer.file_ios
        self._file_bytes[transfer.operation] += transfer.file_bytes

    def remove_flight(self, transfer: Transfer) -> None:
        """Give back the room of a transfer that NIXL has ended."""
        self.flights.remove(transfer)
        self._file_ios -= transfer.file_ios
        self._file_bytes[transfer.operation] -= transfer.file_bytes
        self.draining -= transfer.settling is not None

    def _next(self, now: float) -> Transfer:
        first = self.waiting[0]
        if first.operation == "READ" or now > first.accepted + OVERTAKEN_S:
            return first
        return next((one for one in self.waiting if one.operation == "READ"), first)

    def _may_start(self, transfer: Transfer) -> bool:
        if self.in_flight_count >= IN_FLIGHT_COUNT_MAX:
            return False
        if self._file_ios + transfer.file_ios > POSIX_IO_COUNT_MAX:
            return False
        limit = self._file_bytes_max[transfer.operation]
        flying = self._file_bytes[transfer.operation]
        return limit is None or not flying or flying + transfer.file_bytes <= limit
