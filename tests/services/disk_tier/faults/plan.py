"""The plan of faults that `shim.c` carries out, and what it has counted; both map one file."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from pathlib import Path

SITES = (
    "open", "read", "preadv", "write", "pwrite", "fdatasync", "fsync", "ftruncate", "fallocate",
    "rename", "unlink", "mkdir", "flock", "close", "uring read", "uring write",
)  # fmt: skip
KINDS = ("none", "fail", "short", "late")
SOURCE = Path(__file__).with_name("shim.c")


class _Plan(ctypes.Structure):
    _fields_ = (
        ("draws", ctypes.c_uint64),
        ("on", ctypes.c_uint32),
        ("rate", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("only", ctypes.c_uint64),
        ("calls", ctypes.c_uint64 * len(SITES)),
        ("faults", ctypes.c_uint64 * len(KINDS) * len(SITES)),
    )


class Plan:
    """A file that the shim reads while it runs."""

    def __init__(self, path: Path) -> None:
        """Make the file where it is missing, without faults."""
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(ctypes.sizeof(_Plan))
            self._memory = mmap.mmap(file.fileno(), ctypes.sizeof(_Plan))
        self._plan = _Plan.from_buffer(self._memory)

    def begin(self, *, rate: float, seed: int) -> None:
        """Let so many of all calls fail from now on."""
        self._plan.seed, self._plan.rate, self._plan.only = seed, round(rate * 65536), 0
        self._plan.on = 1

    def fail_at(self, site: str) -> None:
        """Let every call of one kind fail from now on, and no other."""
        self._plan.only = 1 << SITES.index(site)
        self._plan.on = 1

    def end(self) -> None:
        """Let every call succeed."""
        self._plan.on = 0

    @property
    def faults(self) -> dict[str, dict[str, int]]:
        """Faults by site and kind."""
        return {
            site: {kind: self._plan.faults[i][k] for k, kind in enumerate(KINDS)}
            for i, site in enumerate(SITES)
        }

    @property
    def total(self) -> int:
        """Count all faults."""
        return sum(count for by_kind in self.faults.values() for count in by_kind.values())


def compiled(directory: Path) -> Path | None:
    """Return the shim, compiled; None: there is no compiler here."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = directory / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library
