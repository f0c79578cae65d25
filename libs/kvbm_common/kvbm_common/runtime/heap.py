"""Heap: large memory goes back to the kernel when it is freed.

glibc takes memory above a threshold from the kernel alone, and gives it back. But each time that
such memory is freed, glibc raises the threshold to its size, up to 32 MiB. What is smaller comes
from the heap from then on, and stays there: a disk tier that had read its journal held 130 bytes a
block that nothing used. With a threshold of its own, a process gives all large memory back.

The price: the kernel clears large memory at each use, in some 0.6 ms a MB. It is for processes
that need large memory seldom, and not for buffers above the threshold in steady use.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

LARGE_BYTES = 9 << 17
"""More than a message has: to take so much from the kernel costs some 0.5 ms."""
KEPT_BYTES = 4 << 20
"""Free memory at the end of a heap that stays there: buffers below the threshold use it again.
With a threshold of its own, glibc would keep 128 KiB, and ask the kernel for each larger buffer."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""The parameters' numbers in `malloc.h`."""
_OPERATORS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TUNABLES = "GLIBC_TUNABLES"
_TUNED = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")


def give_back_large(
    large_bytes: int = LARGE_BYTES, environ: Mapping[str, str] = os.environ
) -> bool:
    """Let memory of so many bytes leave the process when it is freed; False: it may stay.

    It stays with other C libraries, and where an operator has set how glibc takes memory.
    """
    assert large_bytes > 0, f"memory of {large_bytes} bytes"
    tunables = environ.get(_TUNABLES, "")
    if any(map(environ.get, _OPERATORS)) or any(name in tunables for name in _TUNED):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or not set_option(_MMAP_THRESHOLD, large_bytes):
        return False
    return bool(set_option(_TRIM_THRESHOLD, KEPT_BYTES))
