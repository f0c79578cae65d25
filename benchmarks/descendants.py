"""All processes below this one: their processor time, memory and command lines.

Orphans come to this process (`adopt_orphans`): nothing that it has started gets out of sight.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

END_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36
_CPU_CLOCK_OF_PROCESS = 2


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """Return the processes below this one that live."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            state, parent, *_ = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if state != "Z":
                children[int(parent)].append(int(folder.name))
    found, left = [], [os.getpid()]
    while left:
        below = children[left.pop()]
        found += below
        left += below
    return sorted(found)


def cpu_seconds() -> dict[int, float]:
    """Return the processor time of each so far, with that of its threads that have ended."""
    found: dict[int, float] = {}
    for pid in descendants():
        with contextlib.suppress(OSError):
            found[pid] = time.clock_gettime((~pid << 3) | _CPU_CLOCK_OF_PROCESS)
    return found


def cpu_since(before: dict[int, float]) -> float:
    """Return the processor time of all of them since then."""
    return sum(now - before.get(pid, 0.0) for pid, now in cpu_seconds().items())


def memory_bytes() -> int:
    """Return the memory of all of them; pages that several share count once."""
    total = 0
    for pid in descendants():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def command_lines(pids: Iterable[int]) -> list[str]:
    """Return the command line of each."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            found.append(shlex.join(word.decode(errors="replace") for word in words))
    return found


def end_all(spare: Collection[int] = ()) -> list[str]:
    """Kill what is left of them and wait; returns the command lines of those that were left."""
    left = [pid for pid in descendants() if pid not in spare]
    lines = command_lines(left)
    killed = set(left)
    give_up_s = time.monotonic() + END_S
    while left:
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"processes {left} do not end")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        left = [pid for pid in descendants() if pid not in spare]
        killed |= set(left)
    for pid in killed:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return lines
