"""Child processes that never outlive their parent, free ports for them, and locks among them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from kvbm_common.errors import KvbmError

_FIRST_PORT = 10_000
_PORT_ATTEMPTS = 100
_APART = 14_071
"""Between the first numbers of neighbouring processes: the golden section of all ports."""
_STEP = 101
"""Between two ports of a process, which may open a few more above each; a prime, so that no port
comes twice."""
LOCK_ATTEMPTS = 100
"""Attempts at a lock whose file its holder removes at that moment."""
_numbers: dict[int, itertools.count[int]] = {}
"""Process id → its numbers: a fork has numbers of its own."""
_KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def dying_with_parent(signal_number: int = signal.SIGTERM) -> Callable[[], None] | None:
    """Return a `preexec_fn` that has the kernel signal the child when the forking thread ends.

    Fork from the main thread, therefore. Elsewhere than on Linux there is no such thing: None.
    """
    if _LIBC is None:
        return None
    libc = _LIBC

    def ask_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)

    return ask_kernel


class LockTaken(KvbmError):
    """Another process holds the lock."""

    code = "lock_taken"

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"process {holder} holds {path}")
        self.holder = holder
        """Its process id, as far as it said."""


def take_lock(path: Path) -> TextIO:
    """Lock this file for this process alone, as long as it is open; raises LockTaken.

    Its holder may remove the file: a lock on one that is gone would keep no other process out.
    """
    for _ in range(LOCK_ATTEMPTS):
        lock = path.open("a+")  # It is held, not read.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip() or "?"
            lock.close()
            raise LockTaken(path, holder) from error
        if _is_at(path, os.fstat(lock.fileno())):
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            return lock
        lock.close()
    raise LockTaken(path, "?")


def remove_own(path: Path, status: os.stat_result) -> None:
    """Remove a file that is still open here, unless another process has put its own there.

    An open file or socket keeps its inode, so that another one has a number of its own.
    """
    if _is_at(path, status):
        path.unlink(missing_ok=True)


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:
        return False


def free_port(address: str = "127.0.0.1", *, also_above: int = 0) -> int:
    """Return a TCP port that is free now, with `also_above` another so far above it, too.

    Another process may take it first: retry then. Where there is room it lies below those that the
    kernel hands out (`ip_local_port_range`), to connections and for port 0.
    """
    end = _first_of_kernel()
    if end <= _FIRST_PORT + also_above:
        end = 65_536
    for _ in range(_PORT_ATTEMPTS):
        port = _FIRST_PORT + _next_number() % (end - also_above - _FIRST_PORT)
        if all(_is_free(address, wanted) for wanted in {port, port + also_above}):
            return port
    raise OSError(errno.EADDRINUSE, f"no free TCP port found on {address}")


def _next_number() -> int:
    """Return the next number of this process, which begins far from those of its neighbours.

    So no port comes twice soon, and processes that look for ports at the same time find different
    ones. Drawn at random, one in some thousands would be opened by two of them.
    """
    own = os.getpid()
    return next(_numbers.setdefault(own, itertools.count(own * _APART, _STEP)))


def _first_of_kernel() -> int:
    try:
        return int(_KERNELS_PORTS.read_text().split()[0])
    except OSError:  # Not Linux.
        return 49_152


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True
