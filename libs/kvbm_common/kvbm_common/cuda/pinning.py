"""Pinning: an arena is registered with CUDA slice by slice, while it is used already.

A slice that is not pinned yet, or could not be, is copied like any other memory: slower, never
wrong. A copy must not cross two slices, since CUDA knows each of them by itself. The threads run on
the processors beside the device, so that pages that are taken now are taken there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from kvbm_common.cuda.copies import Flags, Numbers
from kvbm_common.cuda.runtime import CudaError, Runtime

log = logging.getLogger(__name__)

SLICE_BYTES = 64 << 20
"""Bytes that are pinned in one call, in some 20 ms, which is how long `close` may wait."""
THREADS_MAX = 8
"""Registering is the kernel's work on pages; beyond this its locks decide."""
CLOSE_DEADLINE_S = 10.0
PCI_DEVICES = Path("/sys/bus/pci/devices")


class Pinning:
    """Pins a range of memory in the background. The range outlives this."""

    def __init__(
        self,
        runtime: Runtime,
        address: int,
        length: int,
        *,
        read_only: bool = False,
        slice_bytes: int = SLICE_BYTES,
        thread_count: int | None = None,
    ) -> None:
        assert length > 0, length
        self.address, self.bytes, self.slice_bytes = address, length, slice_bytes
        self.reason = ""
        """The reason why some of the memory is not pinned, for the operator; empty: all is."""
        self._runtime, self._read_only = runtime, read_only
        self._pinned = np.zeros(-(-length // slice_bytes), dtype=np.bool_)
        self._next = 0
        self._lock = threading.Lock()
        self._stop = False
        self._done: Future[None] = Future()
        self._begun_s = 0.0
        self._cpus = cpus_near(runtime.bus_id())
        wanted = thread_count or min(THREADS_MAX, len(self._cpus) or os.cpu_count() or 1)
        count = min(wanted, len(self._pinned))
        self._left = count
        self._threads = [
            threading.Thread(target=self._run, name=f"pin-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> Future[None]:
        """Begin. The future ends when all is pinned, or no more can be: see `reason`."""
        self._begun_s = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self._done

    @property
    def pinned_bytes(self) -> int:
        """The bytes that are pinned by now."""
        starts = np.flatnonzero(self._pinned) * self.slice_bytes
        return int(np.minimum(self.bytes - starts, self.slice_bytes).sum())

    def covers(self, addresses: Numbers) -> Flags:
        """Return whether the slice of each address, which is in the range, is pinned by now."""
        if bool(self._pinned.all()):
            return np.ones(len(addresses), dtype=np.bool_)
        index = (addresses - np.uint64(self.address)) // np.uint64(self.slice_bytes)
        return self._pinned[index.astype(np.int64)]

    def close(self) -> None:
        """Stop, and give back what was pinned. Nothing may be copied from or to it any more."""
        with self._lock:
            self._stop = True
        give_up_s = time.monotonic() + CLOSE_DEADLINE_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, give_up_s - time.monotonic()))
        if self._pinned.any():  # This may be any thread, and CUDA may not be there yet.
            giving_back = threading.Thread(target=self._unpin, name="unpin", daemon=True)
            giving_back.start()
            giving_back.join(CLOSE_DEADLINE_S)

    def _unpin(self) -> None:
        with contextlib.suppress(CudaError):  # The context may be gone with the engine.
            self._runtime.enter()
            for index in np.flatnonzero(self._pinned).tolist():
                self._runtime.unregister_host(self.address + index * self.slice_bytes)
                self._pinned[index] = False

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # A container may forbid these processors.
            if self._cpus:
                os.sched_setaffinity(0, self._cpus)
        try:
            self._runtime.enter()
            while (index := self._take()) is not None:
                self._pin(index)
        except CudaError as error:
            self._fail(error)
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            log.info("%d bytes of the arena were pinned in %.1f s", self.pinned_bytes,
                     time.monotonic() - self._begun_s)  # fmt: skip
            self._done.set_result(None)

    def _take(self) -> int | None:
        with self._lock:
            if self._stop or self._next == len(self._pinned):
                return None
            self._next += 1
            return self._next - 1

    def _pin(self, index: int) -> None:
        offset = index * self.slice_bytes
        length = min(self.slice_bytes, self.bytes - offset)
        self._runtime.register_host(self.address + offset, length, read_only=self._read_only)
        self._pinned[index] = True

    def _fail(self, error: CudaError) -> None:
        """Stop pinning: after one slice that could not be pinned, the next one would fail too."""
        with self._lock:
            is_first = not self._stop
            self._stop = True
        if is_first:
            self.reason = explain(self.bytes, self.pinned_bytes, str(error), lock_limit_bytes())
            log.warning("%s", self.reason)


def explain(wanted_bytes: int, pinned_bytes: int, error: str, limit_bytes: int | None) -> str:
    """Explain to an operator why an arena is not pinned in full, and what to change."""
    text = (
        f"{pinned_bytes} of {wanted_bytes} bytes of the arena are pinned ({error}); "
        "the rest is copied as pageable memory, which is slower"
    )
    if limit_bytes is not None and limit_bytes < wanted_bytes:
        text += (
            f". The limit on locked memory is {limit_bytes} bytes: raise it (`ulimit -l unlimited`,"
            " LimitMEMLOCK=infinity, docker run --ulimit memlock=-1)"
        )
    return text


def lock_limit_bytes() -> int | None:
    """Return the bytes that this process may lock in memory; None: as many as there are."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def cpus_near(bus_id: str, devices: Path = PCI_DEVICES) -> set[int]:
    """Return the processors of a PCI device's NUMA node; empty: it is not known."""
    try:
        return cpu_list((devices / bus_id / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def cpu_list(text: str) -> set[int]:
    """Parse Linux's notation of a set of processors: `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
