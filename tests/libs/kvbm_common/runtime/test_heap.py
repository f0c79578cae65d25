"""Large memory that was freed leaves the process, though glibc would keep it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

MIB = 1 << 20
COUNT, SIZE = 16, 3 * MIB
PROGRAM = f"""
import resource
from kvbm_common.runtime.heap import give_back_large

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

if GIVES_BACK:
    assert give_back_large()
once = bytes([1]) * (4 * {SIZE})
del once  # From now on glibc takes what is smaller from its heap.
before, large, small = resident(), [], []
for _ in range({COUNT}):
    large.append(bytes([1]) * {SIZE})
    small.append(bytearray(4096))  # It keeps the heap from shrinking.
del large
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("gives_back", [True, False])
def test_freed_memory_leaves_the_process(gives_back: bool) -> None:
    """Without it nearly all stays: the test would notice a glibc that needs no help."""
    program = PROGRAM.replace("GIVES_BACK", str(gives_back))
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    left = int(ran.stdout)
    assert (left < 2 * SIZE) is gives_back, f"{left / MIB:.0f} of {COUNT * SIZE / MIB:.0f} MiB left"
