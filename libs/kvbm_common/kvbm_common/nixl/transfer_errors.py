"""Errors of NIXL, judged: whether a transfer's bytes have ended, and why it has failed."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from kvbm_common.nixl.library import bindings
from kvbm_common.nixl.transfer_queue import Transfer
from kvbm_common.nixl.transfers import PeerLost, TransferError, TransferFailed


def proves_end(
    agent: Any, transfer: Transfer, error: Exception, *, file_errors_prove: bool
) -> bool:
    """Return whether nothing can be written any more: see `mover_thread.py`."""
    never_posted = transfer.handle is None
    # A file's error comes after its last I/O, an object's after its only request.
    kind = transfer.remote.kind
    local = kind == "OBJ" or (kind == "FILE" and file_errors_prove)
    return never_posted or local or _is_lost(agent, transfer.peer, error)


def failure_of(
    agent: Any, transfer: Transfer, error: Exception, settling: Future[None] | None
) -> TransferError:
    """Return the failure that the caller of a transfer gets; `settling` ends with its last byte."""
    what = f"{transfer.operation} of {transfer.local.bytes} bytes, {transfer.local.count} spans"
    if transfer.remote.kind not in ("FILE", "OBJ") and _is_lost(agent, transfer.peer, error):
        return PeerLost(f"{what}: {transfer.peer} is gone ({error})", settling)
    return TransferFailed(f"{what}: {error}", settling)


def _is_lost(agent: Any, peer: str, error: Exception) -> bool:
    if isinstance(error, bindings.nixlRemoteDisconnectError):
        return True
    # One failed transfer makes NIXL forget the peer; the others then do not find it.
    return isinstance(error, bindings.nixlNotFoundError) and not agent.check_remote_metadata(peer)
