"""Transfers: how one is described, ends and fails. Free of NIXL: cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbm_common.errors import KvbmError

if TYPE_CHECKING:
    from concurrent.futures import Future


class TransferError(KvbmError):
    """A transfer, or a call that prepares one, that did not happen.

    `settled` tells whether the local memory is safe to reuse. While it is False a late transfer
    may still write there; `settling` is then a future that ends when NIXL has confirmed the end
    (it may take without end where a peer is stopped: `MoverThread.close` ends it for UCX).
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


@dataclass(frozen=True, slots=True)
class Transferred:
    """A transfer that ended well. `seconds` runs from its post to its end, without the queue."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MoverStatistics:
    """The transfers that a mover has under way, and its counters since the start."""

    waiting: int
    in_flight: int
    draining: int
    transfers_done: int
    failures: int
    timeouts: int
