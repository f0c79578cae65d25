"""Memory in small pages, outside Python's heap: it is taken page by page, when it is written to."""

from __future__ import annotations

import contextlib
import mmap


def small_pages(byte_count: int) -> mmap.mmap:
    """Return zeroed memory that the kernel gives 4 KiB at a time.

    numpy asks for pages of 2 MiB. The first write to each would wait until the kernel has zeroed
    it: 64 scattered writes took 0.3 s.
    """
    assert byte_count > 0, f"{byte_count} bytes"
    memory = mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel without large pages.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
