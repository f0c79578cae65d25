"""What a transfer is, how it ends, and how it fails. Free of NIXL: cheap to import."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvbm_common.errors import KvbmError


class TransferError(KvbmError):
    """A transfer, or a call that prepares one, that did not happen.

    `settled` tells whether the local memory is safe to reuse. While it is False a late transfer
    may still write there; `settling` is then a future that ends when NIXL has confirmed the end
    (it may take for ever where a peer is stopped: `MoverThread.close` ends it for UCX).
    """

    code = "transfer_error"

    def __init__(self, message: str, settling: Future[None] | None = None) -> None:
        super().__init__(message)
        self.settling = settling

    @property
    def settled(self) -> bool:
        return self.settling is None or self.settling.done()


class TransferTimeout(TransferError):
    """The deadline passed before the transfer ended."""

    code = "transfer_timeout"


class PeerLost(TransferError):
    """The peer's process ended, it was removed, or it was never added. Add it again to go on."""

    code = "peer_lost"


class TransferFailed(TransferError):
    """NIXL refused or failed: bounds, a short read, a file error, an unregistered range."""

    code = "transfer_failed"


class BadPeerMetadata(TransferError):
    """The metadata of a peer is not readable, or leads nowhere."""

    code = "bad_peer_metadata"


class MoverBusy(TransferError):
    """The mover's queue is full, or a registration is still in use. Try again later."""

    code = "mover_busy"


class MoverClosed(TransferError):
    """The mover is closed, or was closed while this was under way."""

    code = "mover_closed"


class MoverUnavailable(KvbmError):
    """The NIXL agent or one of its back ends cannot be created on this machine."""

    code = "mover_unavailable"


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Ranges of memory or of a file: N×3 uint64, each row (address or offset, bytes, device).

    `kind` is NIXL's memory type: DRAM, VRAM (the device is the GPU), FILE (the descriptor) or OBJ
    (a number that NIXL knows the object by).
    """

    rows: NDArray[np.uint64]
    kind: str = "DRAM"

    def __post_init__(self) -> None:
        assert self.rows.shape[1:] == (3,), self.rows.shape
        assert len(self.rows) > 0, "a transfer moves at least one span"

    @classmethod
    def of(cls, addresses: ArrayLike, length: int, *, device: int = 0, kind: str = "DRAM") -> Self:
        """Equal spans of `length` bytes at `addresses` (in a file: offsets), in that order."""
        starts = np.asarray(addresses, dtype=np.uint64).reshape(-1)
        rows = np.empty((len(starts), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = starts, length, device
        return cls(rows, kind)

    @classmethod
    def of_pieces(cls, pieces: Sequence[tuple[NDArray[np.uint64], int]]) -> Self:
        """Several groups of equal spans: (addresses, length) each, in that order (see layout)."""
        return cls(np.concatenate([cls.of(starts, length).rows for starts, length in pieces]))

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> int:
        return int(self.rows[:, 1].sum())

    def in_file(self, fd: int) -> Spans:
        """The same offsets and lengths as places in the file `fd`."""
        rows = self.rows.copy()
        rows[:, 2] = fd
        return Spans(rows, "FILE")

    def on_device(self, device: int) -> Spans:
        """The same addresses as places in the memory of a GPU."""
        rows = self.rows.copy()
        rows[:, 2] = device
        return Spans(rows, "VRAM")

    def touch(self, registration: Registration) -> bool:
        """Whether any of these spans lies, even in part, in the registered range."""
        if self.kind != registration.kind:
            return False
        starts, lengths, devices = self.rows.T
        begin, end = registration.address, registration.address + registration.bytes
        inside = (starts < end) & (starts + lengths > begin) & (devices == registration.device)
        return bool(inside.any())


@dataclass(frozen=True, slots=True)
class Registration:
    """A range of memory (DRAM, or VRAM on GPU `device`) or a file (FILE, `device` is its fd)."""

    kind: str
    address: int
    bytes: int
    device: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A transfer that ended well. `seconds` runs from its post to its end, without the queue."""

    bytes: int
    seconds: float
    settled: bool = True


@dataclass(frozen=True, slots=True)
class MoverStatistics:
    """What a mover has under way, and its counters since the start."""

    waiting: int
    in_flight: int
    draining: int
    transfers_done: int
    bytes_moved: int
    failures: int
    timeouts: int
    notifications_dropped: int
