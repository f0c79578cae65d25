"""What a service process takes of its machine, and the memory that its settings allow it.

Each service declares its bound once, from the parts that it keeps: `MemoryBound`. The bound is in
its log, in the verb `stats` (`kvbm status`) and a gauge beside the process's own memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvbm_common.runtime.metrics import Metric, gauge_of

MIB = 1 << 20
INTERPRETER_BYTES = 96 * MIB
"""Python, its modules, NATS's client, buffers of sockets and the room that malloc keeps."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class MemoryBound:
    """The parts of a service's memory, each with the bytes that it may take at most."""

    parts: dict[str, int] = field(default_factory=dict)

    def declare(self, **parts: int) -> None:
        """Set the bound of these parts, in bytes, and log the new sum where it has changed."""
        assert all(size >= 0 for size in parts.values()), parts
        before = self.total
        self.parts |= parts
        if self.total != before:
            _log.info("%s", self)

    @property
    def total(self) -> int:
        """Bytes of anonymous memory that this process may take; 0: none is declared."""
        return INTERPRETER_BYTES + sum(self.parts.values()) if self.parts else 0

    def __str__(self) -> str:
        named = {"the interpreter": INTERPRETER_BYTES, **self.parts}
        parts = ", ".join(f"{name.replace('_', ' ')} {_mib(size)}" for name, size in named.items())
        return f"memory stays below {_mib(self.total)} MiB: {parts}"


def _mib(size: int) -> str:
    return f"{size / MIB:.0f}"


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


def collect(bound: MemoryBound) -> list[Metric]:
    """Return the gauges of this process."""
    figures: Mapping[str, tuple[str, float]] = {
        "kvbm_memory_bytes": ("Anonymous memory of the process.", memory_bytes()),
        "kvbm_memory_bound_bytes": ("What it may take by its settings.", bound.total),
        "kvbm_python_blocks": ("Blocks that Python has allocated.", sys.getallocatedblocks()),
        "kvbm_open_files": ("Open descriptors.", _open_files()),
    }
    return [gauge_of(name, text, value) for name, (text, value) in figures.items() if value]


def _open_files() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0
