"""Large memory that was freed leaves the process, though glibc would keep it; smaller stays."""

from __future__ import annotations

import os
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

USES = 100
BUFFERS = f"""
import resource
from kvbm_common.runtime.heap import give_back_large

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

assert give_back_large()
bytes([1]) * (8 << 20)
bytes([1]) * (1 << 20)  # The first one grows the heap.
before = faults()
for _ in range({USES}):
    bytes([1]) * (1 << 20)
print(faults() - before)
"""
OPERATORS = [
    {"MALLOC_MMAP_THRESHOLD_": "65536"},
    {"MALLOC_TRIM_THRESHOLD_": "65536"},
    {"GLIBC_TUNABLES": "glibc.pthread.rseq=1:glibc.malloc.mmap_threshold=65536"},
]
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def printed(program: str, **environ: str) -> int:
    """The number that a process prints, whose heap is as glibc has it unless `environ` says more.

    What the machine sets for the tests is left out.
    """
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key != "GLIBC_TUNABLES" and not key.startswith("MALLOC_")
    }
    ran = subprocess.run(
        [sys.executable, "-c", program], env=inherited | environ, check=True, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    return int(ran.stdout)


@needs_glibc
@pytest.mark.parametrize("gives_back", [True, False])
def test_freed_memory_leaves_the_process(gives_back: bool) -> None:
    """Without it nearly all stays: the test would notice a glibc that needs no help."""
    left = printed(PROGRAM.replace("GIVES_BACK", str(gives_back)))
    assert (left < 2 * SIZE) is gives_back, f"{left / MIB:.0f} of {COUNT * SIZE / MIB:.0f} MiB left"


@needs_glibc
def test_buffers_below_the_threshold_use_the_same_memory_again() -> None:
    """A buffer of 1 MiB that the kernel made for each use would cost 256 page faults each time."""
    assert printed(BUFFERS) < USES


@needs_glibc
@pytest.mark.parametrize("environ", OPERATORS, ids=lambda environ: next(iter(environ)))
def test_the_heap_of_an_operator_is_left_alone(environ: dict[str, str]) -> None:
    """The operator's own thresholds hold."""
    program = "from kvbm_common.runtime.heap import give_back_large; print(int(give_back_large()))"
    assert printed(program, **environ) == 0
    assert printed(program, GLIBC_TUNABLES="glibc.malloc.arena_max=2", MALLOC_TOP_PAD_="") == 1
