"""A disk tier's restart with a million blocks: from the journal to ready, and the whole process.

The blocks are in chains of 256, and their file of slots is all holes: a restart does not read it.
The journal is read from the disk, as after a loss of power: it is not in the page cache.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
from kvbm_cli.service_process import ServiceProcess
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.identity import SequenceHash
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.service.garbage import Garbage
from kvbm_common.tier.announcer import EVENT_BLOCKS_MAX
from kvbm_common.tier.blocks import Block
from kvbm_common.wire.verbs import StatsReply, verb_subject
from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_disk_tier.core.effects import AnnounceLater
from kvbm_disk_tier.core.journal import Operation, Record, encode_records
from kvbm_disk_tier.core.messages import AnnounceMore, StoreOpened
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_header import Header
from kvbm_disk_tier.shell.store_options import StoreOptions

from benchmarks.harness import Row, info_row, time_row

BLOCKS = 1_000_000
CHAIN_BLOCKS = 256
SLOT_BYTES = 4096
ROUNDS = 5
READY_S_MAX = 1.0
"""Per million blocks."""
DEADLINE_S = 60.0
HOST, INSTANCE = "bench", "0"
POLICIES = ("lru", "lfu", "prefix")


def run() -> list[Row]:
    """Medians."""
    journal = journal_of(BLOCKS)
    rows: list[Row] = []
    with store_of(journal, BLOCKS) as directory:
        for policy in POLICIES:
            ready_s, announced_s = _restored_in(directory, policy)
            what = f"{BLOCKS:,} blocks, from the journal's file to ready, {policy}"
            rows.append(time_row(what, ready_s, unit="s", target=READY_S_MAX))
            if policy == POLICIES[0]:
                what = "from ready to the last announcement made, without those who hear it"
                rows.append(info_row(what, announced_s, unit="s"))
    for what, data in (("no block", b""), (f"{BLOCKS:,} blocks", journal)):
        with store_of(data, BLOCKS) as directory:
            ready_s, announced_s = asyncio.run(_process(directory, BLOCKS if data else 0))
        rows.append(info_row(f"a process's start to ready, {what} in the store", ready_s, unit="s"))
    what = "the same process, from ready to the last announcement"
    return [*rows, info_row(what, announced_s, unit="s")]


def journal_of(blocks: int) -> bytes:
    """Committed blocks in order, as the disk tier writes them."""
    rng = random.Random(3)
    names = [SequenceHash(rng.randbytes(16)) for _ in range(blocks)]
    root, namespace = SequenceHash(bytes(16)), rng.randbytes(32)
    return encode_records(
        Record(
            Operation.COMMITTED, slot + 1, slot,
            Block(name, names[slot - 1] if slot % CHAIN_BLOCKS else root, namespace, slot, 4096),
        )
        for slot, name in enumerate(names)
    )  # fmt: skip


@contextmanager
def store_of(journal: bytes, blocks: int) -> Iterator[Path]:
    """A directory as DYN_KVBM_DISK_CACHE_DIR, with the store of a former life."""
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-", ignore_cleanup_errors=True) as root:
        store = Path(root) / f"kvbm-{HOST}-{INSTANCE}"
        store.mkdir()
        header = Header.of(SLOT_BYTES, blocks, "")
        (store / "header").write_bytes(msgspec.json.encode(header))
        (store / "journal").write_bytes(journal)
        with (store / "slots").open("wb") as slots:
            slots.truncate(SLOT_BYTES * blocks)
        yield Path(root)


def _restored_in(directory: Path, policy: str) -> tuple[float, float]:
    """Seconds until the core can serve, and from then until all is announced."""
    spawn = multiprocessing.get_context("spawn")  # A restart is the first work of a process.
    rounds: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            rounds.append(process.submit(_restored_once, directory, policy).result(DEADLINE_S))
    ready_s, announced_s = zip(*rounds, strict=True)
    return statistics.median(ready_s), statistics.median(announced_s)


def _restored_once(directory: Path, policy: str) -> tuple[float, float]:
    Garbage().start()  # As every service does.
    core = DiskTierCore(host=HOST, instance=INSTANCE, epoch=1, policy=policy)
    options = StoreOptions(directory / f"kvbm-{HOST}-{INSTANCE}", 0, BLOCKS)
    store = Store(options)
    _out_of_page_cache(options.directory / "journal")
    try:
        started_s = time.perf_counter()
        found = store.recover()
        assert found is not None
        assert store.header is not None
        effects = core.step(StoreOpened(store.header.layout, found), 1)
        ready_s = time.perf_counter()
        assert len(core.inventory.table) == BLOCKS
        while any(isinstance(effect, AnnounceLater) for effect in effects):
            effects = core.step(AnnounceMore(), 2)
        assert not core.inventory.table.folded_count
        return ready_s - started_s, time.perf_counter() - ready_s
    finally:
        store.close()


def _out_of_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())  # What is not written yet cannot leave.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def _process(directory: Path, blocks: int) -> tuple[float, float]:
    """The same of a real process, killed each time."""
    async with NatsServer(directory / "nats") as server:
        given = {
            "nats_url": server.url, "host": HOST, "instance": INSTANCE, "runtime_dir": directory,
            "disk_cache_dirs": directory, "disk_cache_override_num_blocks": BLOCKS,
        }  # fmt: skip
        environ = os.environ | Settings.load({}, given).as_environ()
        bus = await Bus.connect(server.url, "bench", deadline_s=5)
        rounds: list[tuple[float, float]] = []
        try:
            for _ in range(ROUNDS):
                tier = ServiceProcess("disk-tier", environ=environ, restart=False, log_path=None)
                started_s = time.perf_counter()
                tier.start()
                await tier.wait_ready(deadline_s=DEADLINE_S)
                ready_s = time.perf_counter()
                await _wait_announced(bus, blocks)
                rounds.append((ready_s - started_s, time.perf_counter() - ready_s))
                await tier.end(signal.SIGKILL, deadline_s=5)
        finally:
            await bus.close()
    return statistics.median(one for one, _ in rounds), statistics.median(two for _, two in rounds)


async def _wait_announced(bus: Bus, blocks: int) -> None:
    """Until it has made the events of all its blocks. All but the last have arrived by then."""
    subject = verb_subject("disk-tier", "stats", host=HOST, instance=INSTANCE)
    events = 1 + -(-blocks // EVENT_BLOCKS_MAX)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                reply = await bus.request(subject, b"", deadline_s=5)
            except KvbmError:
                continue
            if msgspec.json.decode(reply, type=StatsReply).seq >= events:
                return
            await asyncio.sleep(0.01)
