"""Doorbell: the mover's thread sleeps on it until there is a job, or an I/O has ended.

NIXL's POSIX back end has one io_uring for an agent. NIXL asks to be polled; but the file
descriptor of a ring is readable while it has completions, io_uring_setup(2), and so a thread may
sleep until then. The descriptor is NIXL's: it is found among the process's own, only looked at,
and where none is found the caller polls.
"""

from __future__ import annotations

import contextlib
import os
import select

RING = "anon_inode:[io_uring]"


class Doorbell:
    """One thread waits, any may ring."""

    def __init__(self, ring_fd: int) -> None:
        self._ring_fd = ring_fd
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung, self._either = select.poll(), select.poll()
        self._rung.register(self._event_fd, select.POLLIN)
        for fd in (self._event_fd, ring_fd):
            self._either.register(fd, select.POLLIN)

    def ring(self) -> None:
        """Wake who waits, or who will."""
        with contextlib.suppress(BlockingIOError):  # It has rung 2**64 times: that is enough.
            os.eventfd_write(self._event_fd, 1)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait, and tell whether I/O has ended. The timeout is rounded up to milliseconds. Without
        one nothing is in flight, and no completion wakes the thread."""
        if timeout_s is None:
            ready = dict(self._rung.poll())
        else:
            ready = dict(self._either.poll(timeout_s * 1000))
        if self._event_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)
        return self._ring_fd in ready

    def close(self) -> None:
        """Close the event descriptor, when no thread waits or rings any more. The ring is its
        owner's."""
        os.close(self._event_fd)


def only_new_ring(before: set[int]) -> int | None:
    """Return the only ring that was not there before; None without one, or with several."""
    new = rings() - before
    return new.pop() if len(new) == 1 else None


def rings() -> set[int]:
    """Return the descriptors of this process's rings."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # It was closed meanwhile.
            if os.readlink(f"/proc/self/fd/{name}") == RING:
                found.add(int(name))
    return found
