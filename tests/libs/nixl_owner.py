"""A process that owns memory and lets peers read it: `python -m tests.libs.nixl_owner BYTES`.

It prints one line of JSON (address, metadata), and lives until its stdin closes.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from collections.abc import Mapping
from typing import Self

import numpy as np
from kvbm_common.nixl.mover_thread import MoverThread
from numpy.typing import NDArray

SEED = 7


def content(size_bytes: int) -> NDArray[np.uint8]:
    """What every owner of this size holds."""
    return np.random.default_rng(SEED).integers(0, 256, size_bytes, dtype=np.uint8)


class Owner:
    """The process, seen from the test."""

    def __init__(self, size_bytes: int, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.libs.nixl_owner", str(size_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # An owner that UCX aborts prints a page of backtrace.
            env=environment,
        )
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        self.address: int = ready["address"]
        self.metadata = bytes.fromhex(ready["metadata"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


def main(size_bytes: int) -> None:
    memory = mmap.mmap(-1, size_bytes)
    array = np.frombuffer(memory, dtype=np.uint8)
    array[:] = content(size_bytes)
    with MoverThread("owner") as mover:
        mover.register_memory(array.ctypes.data, size_bytes).result(10)
        ready = {"address": array.ctypes.data, "metadata": mover.metadata().result(10).hex()}
        print(json.dumps(ready), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]))
