"""One engine in a process of its own that looks the same blocks up again and again.

`python -m tests.soak.onlooker` writes a line for each lookup: when, how long, how long the machine
took for the same without KVBM (a byte there and back through `cat`), blocks found. At last the
processor time of some work that is always the same.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

from kvbm_common.config.settings import Settings

from benchmarks.probe import Probe

BLOCKS = 16
SPACING_S = 0.05
WORK_NAMES = 1_000
OFFER_S = 2.0
"""A block that has left the tiers is offered again after so long."""


def main() -> None:
    """Look up until the standard input is closed."""
    settings, number = Settings.load(), 0
    parent = os.getppid()
    echo = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    while os.getppid() == parent:
        probe = Probe(settings, f"onlooker-{number}", block_bytes=65_536, block_count=BLOCKS,
                      deadline_ms=2_000)  # fmt: skip
        number += 1
        with contextlib.suppress(Exception), contextlib.closing(probe):
            probe.start()
            watch(probe, echo, parent)


def ping_ms(echo: subprocess.Popen[bytes]) -> float:
    """Measure how long a byte takes through another process and back."""
    assert echo.stdin is not None
    assert echo.stdout is not None
    began_s = time.monotonic()
    echo.stdin.write(b".")
    echo.stdout.read(1)
    return 1000 * (time.monotonic() - began_s)


def work_us() -> float:
    """Measure the processor time of filling and reading a table of a thousand names."""
    began_ns = time.thread_time_ns()
    table = {number.to_bytes(16, "big"): number for number in range(WORK_NAMES)}
    assert sum(table.values()) == sum(range(WORK_NAMES)), "a sum is the same each time"
    return (time.thread_time_ns() - began_ns) / 1_000


def watch(probe: Probe, echo: subprocess.Popen[bytes], parent: int) -> None:
    """Look up, and offer what is missing."""
    names, asked, offered_s = probe.chain(1, BLOCKS), 0, 0.0
    while os.getppid() == parent:
        started_s = time.monotonic()
        if started_s - offered_s > OFFER_S:
            probe.offload(names)
            offered_s = started_s
        probe.events.answer_replays()
        asked += 1
        request, began_s = f"look-{asked}", time.monotonic()
        found = probe.lookup(request, names).blocks
        took_ms = 1000 * (time.monotonic() - began_s)
        probe.scheduler.forget(request)
        measured = f"{took_ms:.3f} {ping_ms(echo):.3f} {found} {work_us():.0f}"
        sys.stdout.write(f"{began_s:.3f} {measured}\n")
        sys.stdout.flush()
        time.sleep(SPACING_S)


if __name__ == "__main__":
    main()
