"""Child processes that never outlive their parent, and free ports for them."""

from __future__ import annotations

import ctypes
import signal
import socket
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def dying_with_parent(signal_number: int = signal.SIGTERM) -> Callable[[], None] | None:
    """A `preexec_fn`: the kernel sends the child a signal when the thread that forked it ends.

    Fork from the main thread, therefore. Elsewhere than on Linux there is no such thing: None.
    """
    if _LIBC is None:
        return None
    libc = _LIBC

    def ask_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)

    return ask_kernel


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that nobody uses now. Somebody may take it before you do: retry then."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
