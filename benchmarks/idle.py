"""What an idle stack costs: processor time and wake-ups, by thread.

Twice: without an engine, and beside one that is attached and does nothing. A wake-up is a switch of
a thread that had slept, as the kernel counts them in `/proc/PID/task/TID/status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
from kvbm_cli.stack import NATS, Stack

from benchmarks.harness import Row, info_row, time_row
from benchmarks.probe import Probe

SETTLE_S, SECONDS = 10.0, 30.0
"""Before the first look: what a start leaves behind has ended; then the length of a look."""
PROCESSOR_MAX, WAKEUPS_MAX, WITH_ENGINE_MAX = 1.5, 100.0, 2.0
"""Percent of a core and wake-ups a second, of all services; percent beside an idle engine."""
SHOWN_MIN = 0.05
"""Percent of a core: threads below it have no row."""
KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Use:
    """What threads have used so far, or in a second."""

    processor_ms: float
    wakeups: float

    def since(self, before: Use, seconds: float) -> Use:
        """What came on top in a second."""
        return Use(
            (self.processor_ms - before.processor_ms) / seconds,
            (self.wakeups - before.wakeups) / seconds,
        )

    @property
    def percent(self) -> float:
        """Of a core, for a use in a second."""
        return self.processor_ms / 10


Threads = dict[tuple[str, str, str], Use]
"""By process, number and name of the thread."""


def run() -> list[Row]:
    """Return the rows of a stack by itself, then of one beside an engine."""
    return asyncio.run(_run())


async def _run() -> list[Row]:
    # Without a filter, so that a lookup of unknown blocks still shows how long an answer takes.
    overrides = {"cpu_cache_gb": 0.25, "disk_cache_gb": 0.5, "miss_filter": False}
    async with Stack.private(overrides) as stack:
        alone = await _look(stack.pids)
        probe = Probe(stack.settings, "idle", block_bytes=64 * KIB, block_count=64)
        try:
            await asyncio.to_thread(probe.start)
            for number in range(100, 110):
                _lookup_ms(probe, number)  # What a process does once only is done.
            over = threading.Event()
            answering = asyncio.create_task(asyncio.to_thread(_answer_replays, probe, over))
            attached = await _look(stack.pids | {"engine": os.getpid()})
            over.set()
            await answering
            hits = [_lookup_ms(probe, number) for number in range(10)]
        finally:
            probe.close()
    return [
        time_row("no engine: services", _percent(alone), unit="% of a core", target=PROCESSOR_MAX),
        time_row("no engine: services, wake-ups", _wakeups(alone), unit="wake-ups/s",
                 target=WAKEUPS_MAX),
        info_row("no engine: nats-server", _percent(alone, of=NATS), unit="% of a core"),
        time_row("an idle engine: services and its threads", _percent(attached),
                 unit="% of a core", target=WITH_ENGINE_MAX),
        info_row("an idle engine: the same, wake-ups", _wakeups(attached), unit="wake-ups/s"),
        info_row("the first lookup after these 40 s", hits[0], unit="ms"),
        info_row("the next nine, in the median", statistics.median(hits[1:]), unit="ms"),
        *_rows("no engine", alone),
        *_rows("an idle engine", attached),
    ]  # fmt: skip


def _answer_replays(probe: Probe, over: threading.Event) -> None:
    """Answer who asks for old events, as an engine does, until it is over."""
    poller = zmq.Poller()
    poller.register(probe.events.replay, zmq.POLLIN)
    while not over.is_set():
        poller.poll(1000)
        probe.events.answer_replays()


async def _look(pids: Mapping[str, int]) -> Threads:
    await asyncio.sleep(SETTLE_S)
    before, started = _threads(pids), time.perf_counter()
    await asyncio.sleep(SECONDS)
    after, seconds = _threads(pids), time.perf_counter() - started
    return {thread: use.since(before.get(thread, Use(0, 0)), seconds)
            for thread, use in after.items()}  # fmt: skip


def _threads(pids: Mapping[str, int]) -> Threads:
    found: Threads = {}
    for kind, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # The thread has ended meanwhile.
                status = dict(
                    line.split(":\t", 1) for line in (task / "status").read_text().splitlines()
                )
                ran_ns = int((task / "schedstat").read_text().split()[0])
                switches = int(status["voluntary_ctxt_switches"])
                found[kind, task.name, status["Name"]] = Use(ran_ns / 1e6, switches)
    return found


def _percent(threads: Threads, *, of: str | None = None) -> float:
    return sum(use.percent for (kind, *_), use in threads.items()
               if kind == of or (of is None and kind != NATS))  # fmt: skip


def _wakeups(threads: Threads) -> float:
    return sum(use.wakeups for (kind, *_), use in threads.items() if kind != NATS)


def _rows(when: str, threads: Threads) -> list[Row]:
    """Return a row for each thread that uses something, the greatest first."""
    shown = [(thread, use) for thread, use in threads.items() if use.percent >= SHOWN_MIN]
    return [
        info_row(f"{when}: {kind}, {name} ({use.wakeups:.0f} wake-ups/s)", use.percent,
                 unit="% of a core")
        for (kind, _, name), use in sorted(shown, key=lambda one: -one[1].percent)
    ]  # fmt: skip


def _lookup_ms(probe: Probe, number: int) -> float:
    """Time the lookup of a block that no tier has: a whole round trip."""
    request, names = f"idle-{number}", probe.chain(number, 1)
    started = time.perf_counter()
    assert probe.lookup(request, names).blocks == 0
    probe.scheduler.forget(request)
    return (time.perf_counter() - started) * 1000
