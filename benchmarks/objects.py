"""A listing of a bucket with a million objects: pages, blocks, deletes, memory, and longest pause.

The server is a process of its own that makes up its pages. What lists is the product's: boto3, the
lister, the core behind its loop, and the deletes. Once all objects have a slot, and once there is
room for a part of them only, so that the rest is deleted while it is listed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import re
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvbm_common.identity import SequenceHash
from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.service.garbage import Garbage
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.layout import Layout
from kvbm_disk_tier.core.effects import AppendJournal, Effect
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.journal import Operation, Replay
from kvbm_disk_tier.core.messages import StoreOpened, Tick
from kvbm_disk_tier.objects.core.answers import Listed
from kvbm_disk_tier.objects.core.core import ObjectTierCore
from kvbm_disk_tier.objects.core.messages import ListedBlock
from kvbm_disk_tier.objects.core.names import Names
from kvbm_disk_tier.objects.shell.bucket import Bucket
from kvbm_disk_tier.objects.shell.deletes import Deletes
from kvbm_disk_tier.objects.shell.lister import Lister, ListerDoors
from kvbm_disk_tier.objects.shell.s3_client import BucketOptions

from benchmarks.harness import Row, info_row, time_row

OBJECTS = 1_000_000
ROOM = 100_000
"""Slots where there are too few."""
SMALLER = 4
"""A listing of one part of so many shows that neither time nor memory grows faster."""
LISTING_S_MAX = 300.0
"""Per million objects: `KVBM_OBJECT_LIST_S`."""
NAMES = Names("kvbm")
[ROOT] = NAMES.roots
NAMESPACE = bytes(32)
HASH_AT = len(ROOT) + 65


def run() -> list[Row]:
    """One listing each; the smaller one first."""
    rows: list[Row] = []
    for objects, slots in ((OBJECTS // SMALLER, ROOM), (OBJECTS, ROOM), (OBJECTS, OBJECTS)):
        with _server(objects) as port:
            found = _in_process(_list, port, objects, slots)
        what = f"{objects:,} objects, {slots:,} slots: "
        limit_s = LISTING_S_MAX * objects / OBJECTS
        rows += [
            time_row(f"{what}listed", found.seconds, unit="s", target=limit_s),
            info_row(f"{what}CPU of the object tier", found.cpu_s, unit="s"),
            info_row(f"{what}memory beside the table", found.listing_mb, unit="MB"),
            info_row(f"{what}memory of the table", found.table_mb, unit="MB"),
            info_row(f"{what}longest pause", found.pause_ms, unit="ms"),
            info_row(f"{what}left in the bucket", found.left, unit="objects"),
        ]
    return rows


@dataclass(frozen=True, slots=True)
class Figures:
    """What one listing has cost."""

    seconds: float
    cpu_s: float
    table_mb: float
    listing_mb: float
    pause_ms: float
    left: float


def _in_process(function: Any, *arguments: Any) -> Figures:
    """Run in a process of its own: its memory is the listing's."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        found: Figures = pool.apply(function, arguments)
    return found


# --- what lists ---------------------------------------------------------------------------------


def _list(port: int, objects: int, slots: int) -> Figures:
    garbage = Garbage()
    garbage.start()
    return asyncio.run(_listed(port, objects, slots, garbage))


async def _listed(port: int, objects: int, slots: int, garbage: Garbage) -> Figures:
    core = ObjectTierCore(
        host="h", instance="0", epoch=1, frequency_filter=FrequencyFilter(enabled=False)
    )
    core.start()
    core.step(Tick(), 0)
    core.step(StoreOpened(Layout.unsized(slots), Replay({}, 1, 0, 0)), 0)
    options = BucketOptions(
        bucket="kv", endpoint=f"http://127.0.0.1:{port}", access_key="key", secret_key="secret"
    )
    bucket = Bucket(options, lambda _kind, _ok: None)
    deletes = Deletes(bucket, lambda _outcome, _count: None)

    def carry_out(effect: Effect) -> None:
        if isinstance(effect, AppendJournal):
            removed = [r.block for r in effect.records if r.operation is Operation.REMOVED]
            deletes.add(map(NAMES.name_of, removed))

    def take(entry: Listed) -> ListedBlock | None:
        block = NAMES.block_of(entry.name)
        assert block is not None
        return None if entry.name in deletes.lately else ListedBlock(block, entry.age_ms)

    async def pauses() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            longest[0] = max(longest[0], time.monotonic() - before - 0.005)

    longest = [0.0]
    loop: CoreLoop[Any, Effect] = CoreLoop(core, carry_out, inbox_size=10_000)
    doors = ListerDoors(
        take=take, begun=deletes.forget, worked=lambda: None, failed=lambda _: None,
        wait_deletes=deletes.wait_room,
    )  # fmt: skip
    lister = Lister(bucket, NAMES, slots, doors)
    await bucket.page(f"{ROOT}x", "")  # boto3 is loaded.
    deleting = deletes.run(lambda _: None)
    garbage.settle()
    running = [asyncio.create_task(one) for one in (loop.run(()), deleting, pauses())]
    before_mb, started_s, cpu_s = _memory_mb(), time.monotonic(), time.process_time()
    await lister.list_all(loop)
    while len(deletes):  # noqa: ASYNC110  The queue does not tell when it is empty.
        await asyncio.sleep(0.01)
    seconds, cpu_s = time.monotonic() - started_s, time.process_time() - cpu_s
    peak_mb, now_mb = _peak_mb() - before_mb, _memory_mb() - before_mb
    assert len(core.inventory.table) <= slots
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    left = float(objects) if slots >= objects else float(await _left(options))
    return Figures(seconds, cpu_s, now_mb, max(0.0, peak_mb - now_mb), 1000 * longest[0], left)


async def _left(options: BucketOptions) -> int:
    page = await Bucket(options, lambda _kind, _ok: None).size("count")
    return page or 0


def _memory_mb() -> float:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


# --- the server ---------------------------------------------------------------------------------


@contextmanager
def _server(objects: int) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_serve, args=(listener, objects), daemon=True)
    process.start()
    listener.close()
    try:
        yield port
    finally:
        process.kill()
        process.join()


def _serve(listener: socket.socket, objects: int) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_Store(objects).run(listener))


class _Store:
    """Objects with hashes at even distances, stored a second apart."""

    def __init__(self, objects: int) -> None:
        self.objects = objects
        self.step = 2**128 // objects
        self.gone = bytearray(objects)

    async def run(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._connected, sock=listener)
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                method, target, _ = head.split("\r\n", 1)[0].split(" ")
                query = {k: v[0] for k, v in parse_qs(urlsplit(target).query, True).items()}
                answer = self._delete(body) if method == "POST" else self._list(query)
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n".encode())
                writer.write(answer)
                await writer.drain()

    def _delete(self, body: bytes) -> bytes:
        for found in re.finditer(rb"/([0-9a-f]{32})\.", body):
            self.gone[self._number_of(found[1])] = 1
        return b"<DeleteResult/>"

    def _list(self, query: dict[str, str]) -> bytes:
        prefix, after = query["prefix"], query.get("start-after", "")
        if prefix == "count":
            left = self.objects - sum(self.gone)
            return _xml(prefix, [f"<Key>count</Key><Size>{left}</Size>{STORED}"], more=False)
        if "delimiter" in query:
            folder = f"{ROOT}{NAMESPACE.hex()}/"
            return _xml(prefix, [], more=False, folders=[folder])
        if prefix.endswith("x"):
            return _xml(prefix, [], more=False)
        digits = prefix[HASH_AT:]
        first = -(-int(digits.ljust(32, "0"), 16) // self.step) if digits else 0
        end = self.objects if not digits else int(digits.ljust(32, "f"), 16) // self.step + 1
        if after:
            first = self._number_of(after[HASH_AT : HASH_AT + 32]) + 1
        names: list[str] = []
        at = first
        while at < min(end, self.objects) and len(names) < 1_000:
            if not self.gone[at]:
                names.append(self._entry(at))
            at += 1
        return _xml(prefix, names, more=at < min(end, self.objects))

    def _number_of(self, digits: str | bytes) -> int:
        """Return the number of the object whose hash has these digits."""
        return -(-(int(digits[:16], 16) << 64) // self.step)

    def _entry(self, number: int) -> str:
        # The second half is spread, as in real hashes: tables take their places from it.
        halves = number * self.step >> 64, number * 0x9E3779B97F4A7C15 % 2**64
        name = SequenceHash(b"".join(half.to_bytes(8, "big") for half in halves))
        block = Block(name, SequenceHash(bytes(16)), NAMESPACE, number, 65536)
        second = number * 2654435761 % 80_000
        stored = f"2026-11-23T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}.000Z"
        return (
            f"<Key>{NAMES.name_of(block)}</Key><LastModified>{stored}</LastModified>"
            f'<ETag>"0"</ETag><Size>65536</Size><StorageClass>STANDARD</StorageClass>'
        )


STORED = "<LastModified>2026-11-23T00:00:00.000Z</LastModified>"


def _xml(prefix: str, entries: list[str], *, more: bool, folders: list[str] | None = None) -> bytes:
    contents = "".join(f"<Contents>{entry}</Contents>" for entry in entries)
    contents += "".join(
        f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>" for folder in folders or ()
    )
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>kv</Name><Prefix>{prefix}</Prefix><KeyCount>{len(entries)}</KeyCount>"
        f"<IsTruncated>{str(more).lower()}</IsTruncated>{contents}</ListBucketResult>"
    ).encode()
