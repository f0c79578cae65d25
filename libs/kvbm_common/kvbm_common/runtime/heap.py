"""Heap: large memory goes back to the kernel when it is freed.

glibc takes memory above a threshold from the kernel alone, and gives it back. But each time that
such memory is freed, glibc raises the threshold to its size, up to 32 MiB. What is smaller comes
from the heap from then on, and stays there: a disk tier that had read its journal held 130 bytes a
block that nothing used. With a threshold of its own, a process gives all large memory back.
"""

from __future__ import annotations

import ctypes

LARGE_BYTES = 9 << 17
"""More than a message has: to take so much from the kernel costs some 0.1 ms."""
_MMAP_THRESHOLD = -3
"""The parameter's number in `malloc.h`."""


def give_back_large(large_bytes: int = LARGE_BYTES) -> bool:
    """Let memory of so many bytes leave the process when it is freed; False: not with this libc."""
    assert large_bytes > 0, f"memory of {large_bytes} bytes"
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_option is not None and bool(set_option(_MMAP_THRESHOLD, large_bytes))
