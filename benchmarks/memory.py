"""Memory of a disk tier: bytes for each block after a restart, and the most while it restarts.

`make bench ARGS=memory`. A process of its own reads a journal and announces all blocks. What its
core and its store take then is steady, with what the heap keeps. Blocks are in chains of 256.

    BLOCKS=10000000 python -m benchmarks memory      ten million, in some minutes; 8 GB
"""

from __future__ import annotations

import multiprocessing
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from kvbm_common.runtime.heap import give_back_large
from kvbm_common.service.garbage import Garbage
from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_disk_tier.core.effects import AnnounceLater
from kvbm_disk_tier.core.messages import AnnounceMore, StoreOpened
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_options import StoreOptions

from benchmarks.harness import Row, info_row, time_row
from benchmarks.restart import HOST, INSTANCE, journal_of, store_of

BLOCKS = int(os.environ.get("BLOCKS", "1_000_000"))
POLICIES = ("adaptive", "lru", "lfu", "prefix")
BYTES_MAX = 250.0
"""The goal for a block."""
PEAK_MAX = 1.3
"""The goal for the most while it restarts, beside what stays."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one restart has taken, in bytes."""

    steady: int
    peak: int


def run() -> list[Row]:
    """Return the memory with each policy."""
    rows: list[Row] = []
    with store_of(journal_of(BLOCKS), BLOCKS) as directory:
        for policy in POLICIES:
            spawn = multiprocessing.get_context("spawn")
            with spawn.Pool(1) as process:
                taken: Taken = process.apply(_restarted, (directory, policy))
            what, most = f"{BLOCKS:,} blocks, {policy}", taken.peak / taken.steady
            rows += [
                time_row(f"{what}: bytes of a block", taken.steady / BLOCKS, unit="B",
                         target=BYTES_MAX),
                time_row(f"{what}: the most while it restarts, beside that", most, unit="times",
                         target=PEAK_MAX),
                info_row(f"{what}: all of them", taken.steady / 1e6, unit="MB"),
            ]  # fmt: skip
    return rows


def _restarted(directory: Path, policy: str) -> Taken:
    give_back_large()  # As a disk tier does; and this, as every service.
    Garbage().start()
    before = _memory_bytes()
    core = DiskTierCore(host=HOST, instance=INSTANCE, epoch=1, policy=policy)
    store = Store(StoreOptions(directory / f"kvbm-{HOST}-{INSTANCE}", 0, BLOCKS))
    try:
        _restart(core, store)
        assert len(core.inventory.table) == BLOCKS
        return Taken(_memory_bytes() - before, _peak_bytes() - before)
    finally:
        store.close()


def _restart(core: DiskTierCore, store: Store) -> None:
    found = store.recover()
    assert found is not None
    assert store.header is not None
    effects = core.step(StoreOpened(store.header.layout, found), 1)
    del found
    while any(isinstance(effect, AnnounceLater) for effect in effects):
        effects = core.step(AnnounceMore(), 2)


def _memory_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    # The `ru_maxrss` of a new process begins with that of its parent.
    with open("/proc/self/status", encoding="ascii") as file:
        [line] = [line for line in file if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
