"""Footprint: the memory of a service process, and the most that its settings allow it.

Each service declares its bound, the sum of the parts that it keeps. The bound is in its log, in the
verb `stats` (`kvbm status`) and a gauge beside the process's own memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvbm_common.runtime.metrics import Metric, gauge_of
from kvbm_common.wire.bounds import Usage
from kvbm_common.wire.metrics import MEMORY, MEMORY_BOUND

MIB = 1 << 20
INTERPRETER_BYTES = 96 * MIB
"""Python, its modules, NATS's client, buffers of sockets and the room that malloc keeps."""
_log = logging.getLogger(__name__)


Parts = Mapping[str, int]
"""The parts of a service's memory, each with the bytes that it may take at most."""


class Footprint:
    """The memory of this process and its bound, for the log, the verb `stats` and the gauges."""

    def __init__(self) -> None:
        self._ask: Callable[[], Parts] = dict
        self._parts: dict[str, int] = {}
        """Part → its highest value so far: Python keeps what it has once taken."""
        self._logged = 0

    def declare(self, parts: Callable[[], Parts]) -> None:
        """Have the bound made of these parts; they are asked for each time."""
        self._ask = parts

    @property
    def bound_bytes(self) -> int:
        """Bytes of anonymous memory that this process may take; 0: none is declared."""
        for name, size in self._ask().items():
            self._parts[name] = max(size, self._parts.get(name, 0))
        return INTERPRETER_BYTES + sum(self._parts.values()) if self._parts else 0

    def log(self) -> None:
        """Log the bound and its parts, where it is an eighth above what was logged before."""
        total = self.bound_bytes
        if total > self._logged * 1.125:
            self._logged = total
            parts = {"interpreter": INTERPRETER_BYTES, **self._parts}
            shown = (f"{name.replace('_', ' ')} {size / MIB:.1f}" for name, size in parts.items())
            _log.info("memory stays below %.0f MiB: %s", total / MIB, ", ".join(shown))

    def figures(self) -> dict[str, float]:
        """Return the memory and its bound, as figures of the verb `stats`."""
        self.log()
        return {MEMORY: float(memory_bytes()), MEMORY_BOUND: float(self.bound_bytes)}

    def usages(self) -> dict[str, Usage]:
        """Return how full the bounds of every process are: its memory and its descriptors."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        descriptors = 0 if most == resource.RLIM_INFINITY else most
        return {
            "memory": Usage(memory_bytes(), self.bound_bytes),
            "descriptors": Usage(_open_files(), descriptors),
        }

    def collect(self) -> list[Metric]:
        """Return the gauges of this process."""
        figures = {
            "kvbm_memory_bytes": ("Anonymous memory of the process.", memory_bytes()),
            "kvbm_memory_bound_bytes": ("What it may take by its settings.", self.bound_bytes),
            "kvbm_python_blocks": ("Blocks that Python has allocated.", sys.getallocatedblocks()),
            "kvbm_open_files": ("Open descriptors.", _open_files()),
        }
        return [gauge_of(name, text, value) for name, (text, value) in figures.items() if value]


def memory_bytes() -> int:
    """Return the anonymous memory of this process, without what it shares; 0: unknown here."""
    with contextlib.suppress(OSError, ValueError):
        return status_bytes(Path("/proc/self/status").read_text(), "RssAnon")
    return 0


def status_bytes(status: str, name: str) -> int:
    """Return a size in the text of `/proc/PID/status`; raises ValueError where it is missing."""
    for line in status.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


def _open_files() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0
