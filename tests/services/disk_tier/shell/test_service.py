"""The disk tier on a real NATS, with real files over NIXL: restarts, rot, bad input, full disks."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_cli.service_process import ServiceProcess
from kvbm_common.checksum import block_checksum, pack_sums, part_checksums
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError, RequestFailed
from kvbm_common.memory.arena import Arena
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.event_publisher import EventPublisher
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.registry.services import ServiceRegistration
from kvbm_common.runtime.loop import monotonic_ms
from kvbm_common.service.process import serve as serve_service
from kvbm_common.tier.announcer import EVENT_BLOCKS_MAX, Announcer
from kvbm_common.tier.block_columns import BlockColumns
from kvbm_common.tier.layout import UNIT_BYTES
from kvbm_common.tier.parts import Grid
from kvbm_common.tier.slots import Block
from kvbm_common.wire.events import (
    Cleared,
    Event,
    Removed,
    Stored,
    event_codec,
    event_subject,
)
from kvbm_common.wire.packed_events import events_on
from kvbm_common.wire.slot_entries import FilledSlot, LeasedSlot
from kvbm_common.wire.verbs import (
    ArenaReply,
    FillReply,
    FillRequest,
    FillSlot,
    LeaseReply,
    LeaseRequest,
    ReleaseReply,
    SnapshotReply,
    StatsReply,
    hits_subject,
    verb_subject,
)
from kvbm_disk_tier.core.journal import RECORD_BYTES, Operation, Record
from kvbm_disk_tier.shell.service import serve
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_options import StoreOptions

from tests.services.disk_tier.helpers import NAMESPACE, name
from tests.waiting import ask_until, wait_until

DEADLINE_S = 10.0
TTL_S = 1.0
SLOT_BYTES = 8192
BLOCK_BYTES = 5000
"""Smaller than its slot, and no multiple of anything."""
ARENA_SLOTS = 16
DISK_SLOTS = 8


def settings_of(server: NatsServer, directory: Path, **changes: Any) -> Settings:
    """A small disk tier that writes everything at once."""
    values = {
        "nats_url": server.url, "host": "h", "registry_ttl_s": TTL_S, "disk_cache_dirs": directory,
        "disk_cache_gb": DISK_SLOTS * SLOT_BYTES / 1e9, "disable_disk_offload_filter": True,
        "runtime_dir": directory / "run",
    }  # fmt: skip
    return Settings.load({}, values | changes)


@asynccontextmanager
async def living(settings: Settings) -> AsyncIterator[None]:
    """A disk tier in this event loop."""
    stopping = asyncio.Event()
    life = asyncio.create_task(serve_service("disk-tier", serve, settings, stopping))
    try:
        yield
    finally:
        stopping.set()
        assert await life == 0


@asynccontextmanager
async def process(settings: Settings, log_path: Path) -> AsyncIterator[ServiceProcess]:
    """A disk tier in a process of its own, to be killed."""
    settings.runtime_dir.mkdir(mode=0o700, exist_ok=True)
    environ = os.environ | settings.as_environ()
    service = ServiceProcess("disk-tier", environ=environ, restart=True, log_path=log_path)
    service.start()
    await service.wait_ready(deadline_s=DEADLINE_S)
    try:
        yield service
    finally:
        await service.end(signal.SIGTERM, deadline_s=4.0)


def content(number: int) -> bytes:
    """What block `number` holds."""
    return bytes((number * 31 + i) % 251 for i in range(BLOCK_BYTES))


def block(number: int) -> Block:
    """A block of the chain, with the checksum of its bytes."""
    total = block_checksum(content(number))
    return Block(name(number), name(number - 1), NAMESPACE, total, BLOCK_BYTES)


class Host:
    """A host tier, as far as the disk tier sees one: an arena, leases, events. Block n is in its
    slot n; fills go into the slots after."""

    def __init__(self, bus: Bus, arena: Arena) -> None:
        self.bus = bus
        self._registry = NatsRegistry(bus, ttl_s=TTL_S)
        self._publisher: EventPublisher = bus.event_publisher("host-tier-0")
        self.arena = arena
        self.registration: ServiceRegistration
        self.announcer: Announcer
        self.held: list[int] = []
        """The blocks in the arena, for a disk tier that was not there when they came."""
        self.leases: set[int] = set()
        self.revoking = False
        """Every lease ends early."""
        self.events: list[Event] = []
        """What the disk tier has announced."""
        self.part_count = 1
        """Of its blocks: one per rank."""
        self.lies: dict[str, Any] = {}
        """What it says of its arena, and is not so."""

    @classmethod
    @asynccontextmanager
    async def living(cls, bus: Bus, shm_dir: Path = Path("/dev/shm")) -> AsyncIterator[Host]:
        """A life of it."""
        with Arena.create(
            shm_dir, f"kvbm-test-{os.getpid()}-{id(bus)}", ARENA_SLOTS * SLOT_BYTES
        ) as arena:
            host = cls(bus, arena)
            host.registration = await host._registry.register("host-tier", "h", "0")
            host.announcer = Announcer(
                host="h", source="host-tier-0", tier="host", epoch=host.registration.epoch
            )
            verbs = {"arena": host._arena, "lease": host._lease, "release": host._release,
                     "snapshot": host._snapshot}  # fmt: skip
            await bus.add_verbs("host-tier", "0", "h", verbs)
            tasks = [
                asyncio.create_task(host._publisher.run()),
                asyncio.create_task(host._listen()),
            ]
            host._publish(host.announcer.cleared("start"))
            try:
                yield host
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await host._registry.close()

    async def _arena(self, _payload: bytes) -> bytes:
        reply = ArenaReply(
            path=str(self.arena.path), bytes=self.arena.bytes, slot_bytes=SLOT_BYTES,
            slot_count=ARENA_SLOTS, epoch=self.registration.epoch, instance="0",
        )  # fmt: skip
        return msgspec.json.encode(msgspec.structs.replace(reply, **self.lies))

    async def _lease(self, payload: bytes) -> bytes:
        request = msgspec.json.decode(payload, type=LeaseRequest)
        lease = len(self.leases) + 1
        self.leases.add(lease)
        blocks = [self.block(int(text, 16)) for text in request.hashes]
        slots = [
            LeasedSlot(
                hash=b.hash.hex(), parent=b.parent.hex(), namespace=b.namespace.hex(),
                slot=int(b.hash.hex(), 16), checksum=b.checksum, bytes=b.bytes,
                parts=b.code,
            )
            for b in blocks
        ]  # fmt: skip
        return msgspec.json.encode(LeaseReply(lease=lease, slots=slots))

    def block(self, number: int) -> Block:
        """A block as an engine of so many ranks has it."""
        one, grid = block(number), Grid(heads=self.part_count)
        sums = part_checksums(memoryview(content(number)), grid)
        return Block.of_sums(one.hash, one.parent, one.namespace, one.bytes, grid, sums)

    async def _release(self, _payload: bytes) -> bytes:
        return msgspec.json.encode(ReleaseReply(valid=not self.revoking))

    async def _snapshot(self, _payload: bytes) -> bytes:
        return msgspec.json.encode(self.announcer.snapshot([block(number) for number in self.held]))

    async def _listen(self) -> None:
        own = "kvbm.v1.events.h.disk-tier-0.*"
        async with self.bus.event_subscription(start="all", subject=own) as events:
            async for batch in events:
                for subject, payload, _ in batch:
                    self.events += events_on(subject, payload)

    def _publish(self, event: Event) -> None:
        payload = event_codec.encode(event)
        self._publisher.publish(event_subject(event), payload, epoch=event.epoch, seq=event.seq)

    def store(self, *wanted: int) -> None:
        """Blocks are in the arena, and announced."""
        for event in self.hold(*wanted):
            self._publish(event)

    def hold(self, *wanted: int) -> list[Event]:
        """Blocks are in the arena; returns what would announce them."""
        self.held += wanted
        for number in wanted:
            self.arena.view(number * SLOT_BYTES, BLOCK_BYTES)[:] = content(number)
        return [*self.announcer.stored([block(number) for number in wanted])]

    @property
    def announced(self) -> set[int]:
        """What a reader of the disk tier's events believes."""
        held: set[int] = set()
        for event in self.events:
            match event:
                case Cleared():
                    held.clear()
                case Stored(runs=runs):
                    held |= {int(text, 16) for run in runs for text in run.hashes}
                case Removed(hashes=hashes):
                    held -= {int(text, 16) for text in hashes}
        return held

    async def wait_announced(self, *wanted: int) -> None:
        """Wait until exactly these are on disk."""
        await wait_until(lambda: self.announced == set(wanted), deadline_s=DEADLINE_S)

    async def fill(self, *wanted: int) -> dict[int, FilledSlot]:
        """Have blocks read into slots that hold something else; those that came are right."""
        slots = {number: ARENA_SLOTS - 1 - i for i, number in enumerate(wanted)}
        for slot in slots.values():
            self.arena.view(slot * SLOT_BYTES, SLOT_BYTES)[:] = b"\xee" * SLOT_BYTES
        request = FillRequest(
            epoch=self.registration.epoch,
            until_ms=monotonic_ms() + 5_000,
            slots=[FillSlot(hash=name(n).hex(), slot=slot) for n, slot in slots.items()],
        )
        reply = msgspec.json.decode(await ask(self.bus, "fill", request), type=FillReply)
        answers = dict(zip(wanted, reply.slots, strict=True))
        for number, answer in answers.items():
            if answer.ok:
                found = bytes(self.arena.view(answer.slot * SLOT_BYTES, BLOCK_BYTES))
                assert found == content(number), "wrong bytes were served"
                whole = self.block(number)
                assert answer.checksum == whole.checksum
                assert (answer.part_sums or pack_sums([answer.checksum])) == whole.part_sums
        return answers


async def ask(bus: Bus, verb: str, request: object) -> bytes:
    """A verb of the disk tier."""
    payload = request if isinstance(request, bytes) else msgspec.json.encode(request)
    subject = verb_subject("disk-tier", verb, host="h", instance="0")
    return await bus.request(subject, payload, deadline_s=5.0)


async def stats(bus: Bus) -> StatsReply | None:
    """Its figures; None while it does not answer."""
    try:
        return msgspec.json.decode(await ask(bus, "stats", b"{}"), type=StatsReply)
    except KvbmError:
        return None


async def wait_stats(bus: Bus, what: str, value: object) -> StatsReply:
    """Wait until a field of the figures has a value."""

    async def right() -> StatsReply | None:
        reply = await stats(bus)
        return reply if reply is not None and getattr(reply, what) == value else None

    return await ask_until(right, deadline_s=DEADLINE_S)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again until the condition holds."""
    await ask_until(condition, deadline_s=DEADLINE_S)


async def counted(bus: Bus, metric: str) -> dict[str, float]:
    """The samples of a counter by their first label."""
    metrics = msgspec.json.decode(await ask(bus, "metrics", b""))
    families = {family["name"]: family for family in metrics["families"]}
    samples = families[metric]["samples"] if metric in families else []
    return {next(iter(s["labels"].values()), ""): s["value"] for s in samples}


@pytest.fixture
async def host(bus: Bus) -> AsyncIterator[Host]:
    """A living host tier."""
    async with Host.living(bus) as living_host:
        yield living_host


# --- there and back -------------------------------------------------------------------------------


async def test_what_the_host_tier_holds_already_comes_to_disk(
    nats_server: NatsServer, host: Host, tmp_path: Path
) -> None:
    """The stream has forgotten its events: only its snapshot tells."""
    host.hold(1, 2)
    async with living(settings_of(nats_server, tmp_path)):
        await host.wait_announced(1, 2)


@pytest.mark.slow
async def test_blocks_come_back_after_kill_9(
    nats_server: NatsServer, host: Host, tmp_path: Path
) -> None:
    """1. Three blocks to disk. 2. kill -9. 3. They are announced again, read and verified."""
    settings = settings_of(nats_server, tmp_path)
    async with process(settings, tmp_path / "log") as service:
        host.store(1, 2, 3)
        await host.wait_announced(1, 2, 3)
        before, lives = service.pid, epochs(host)
        os.kill(before, signal.SIGKILL)
        await wait_until(lambda: epochs(host) > lives, deadline_s=DEADLINE_S)
        await host.wait_announced(1, 2, 3)
        assert service.pid != before
        await service.wait_ready(deadline_s=DEADLINE_S)
        await until(lambda: can_fill(host))
        host.store(4)
        await host.wait_announced(1, 2, 3, 4)


@pytest.mark.parametrize("keys", ["", "11" * 32])
async def test_the_parts_of_two_ranks_come_back_after_a_restart(
    nats_server: NatsServer, host: Host, tmp_path: Path, keys: str
) -> None:
    """1. To disk, plain or sealed. 2. The next life reads them with the checksum of each part.
    3. A byte of rank 1's part flips in the file: that block is a miss, the other one is read."""
    settings = settings_of(nats_server, tmp_path, disk_keys=keys)
    host.part_count = 2
    async with living(settings):
        host.store(1, 2)
        await host.wait_announced(1, 2)
    lives = epochs(host)
    async with living(settings):
        await wait_until(lambda: epochs(host) > lives, deadline_s=DEADLINE_S)
        await host.wait_announced(1, 2)
        await until(lambda: can_fill(host, 1, 2))
        answers = await host.fill(1, 2)
        assert all(len(answer.part_sums) == 16 for answer in answers.values())
        with (tmp_path / "kvbm-h-0/slots").open("r+b") as file:
            file.seek(BLOCK_BYTES // 2)  # Block 1 is in slot 0.
            [old] = file.read(1)
            file.seek(BLOCK_BYTES // 2)
            file.write(bytes([old ^ 1]))
        answers = await host.fill(1, 2)
        assert [(answers[n].ok, answers[n].reason) for n in (1, 2)] == [
            (False, "corrupt"), (True, "")
        ]  # fmt: skip
        await host.wait_announced(2)


async def test_many_blocks_are_served_before_all_are_announced(
    nats_server: NatsServer, host: Host, tmp_path: Path
) -> None:
    """1. A former life has left three events' worth of blocks, of which the last has bytes.
    2. They are announced in order, each once, and the snapshot is of what was announced.
    """
    count = 2 * EVENT_BLOCKS_MAX + 10
    store = Store(StoreOptions(tmp_path / "kvbm-h-0", 0, count, direct=False))
    store.create(SLOT_BYTES)
    bare = [Block(name(n), name(n - 1), NAMESPACE, 0, BLOCK_BYTES) for n in range(1, count)]
    records = [
        Record(Operation.COMMITTED, 1 + slot, slot * SLOT_BYTES // UNIT_BYTES, there)
        for slot, there in enumerate([*bare, block(count)])
    ]
    os.pwrite(store.fd, content(count), (count - 1) * SLOT_BYTES)
    store.append(tuple(records), commit=True)
    store.close()
    settings = settings_of(nats_server, tmp_path, disk_cache_override_num_blocks=count)
    async with living(settings):
        await wait_stats(host.bus, "ready", True)
        await until(lambda: can_fill(host, count))
        await host.wait_announced(*range(1, count + 1))
        assert [len(run.hashes) for event in host.events if isinstance(event, Stored)
                for run in event.runs] == [EVENT_BLOCKS_MAX, EVENT_BLOCKS_MAX, 10]  # fmt: skip
        reply = msgspec.json.decode(
            await ask(host.bus, "snapshot", b'{"source":"disk-tier-0"}'), type=SnapshotReply
        )
        assert sum(len(run.hashes) for part in reply.parts for run in part.runs) == count
        assert reply.seq == len(host.events)
        columns = [one for one in gc.get_objects() if type(one) is BlockColumns]
        assert count not in map(len, columns), "what was read of the journal is kept"


@pytest.mark.slow
async def test_sealed_blocks_come_back_as_well(
    nats_server: NatsServer, host: Host, tmp_path: Path
) -> None:
    """With keys: there, read and verified after kill -9; nothing of it is readable in the file."""
    settings = settings_of(nats_server, tmp_path, disk_keys="5a" * 32)
    async with process(settings, tmp_path / "log") as service:
        host.store(1, 2, 3)
        await host.wait_announced(1, 2, 3)
        data = (tmp_path / "kvbm-h-0/slots").read_bytes()
        assert not any(content(number)[:64] in data for number in (1, 2, 3))
        lives = epochs(host)
        os.kill(service.pid, signal.SIGKILL)
        await wait_until(lambda: epochs(host) > lives, deadline_s=DEADLINE_S)
        await host.wait_announced(1, 2, 3)
        await service.wait_ready(deadline_s=DEADLINE_S)
        await until(lambda: can_fill(host))


async def test_keys_that_are_none_end_the_start_and_are_not_shown(
    nats_server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(nats_server, tmp_path, disk_keys="5a" * 31)
    assert await serve_service("disk-tier", serve, settings, asyncio.Event()) == 1
    assert "KVBM_DISK_KEYS: entry 1 is not 64 hex digits" in caplog.text
    assert "5a5a" not in caplog.text


def epochs(host: Host) -> int:
    """How many lives have announced something."""
    return len({event.epoch for event in host.events})


async def can_fill(host: Host, *wanted: int) -> bool:
    """Whether these, or blocks 1, 2 and 3, can be read; the arena may not be mapped yet."""
    try:
        answers = await host.fill(*wanted or (1, 2, 3))
    except RequestFailed as error:
        return error.code != "stale_arena"
    return all(answer.ok for answer in answers.values())


async def test_rotten_bytes_are_a_miss_quarantined_and_never_served(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path
) -> None:
    """A flipped bit in block 2's slot: `corrupt`, then `gone`, also after a restart."""
    settings = settings_of(nats_server, tmp_path)
    async with living(settings):
        host.store(1, 2, 3)
        await host.wait_announced(1, 2, 3)
        flip(tmp_path / "kvbm-h-0/slots", content(2))
        answers = await host.fill(1, 2, 3)
        assert [answers[n].reason for n in (1, 2, 3)] == ["", "corrupt", ""]
        await host.wait_announced(1, 3)
        removed = [event for event in host.events if isinstance(event, Removed)]
        assert [(event.hashes, event.reason) for event in removed] == [([name(2).hex()], "corrupt")]
        assert (await host.fill(2))[2].reason == "gone"
    host.held.clear()
    async with living(settings):
        await wait_until(lambda: epochs(host) == 2)
        await host.wait_announced(1, 3)
        reply = msgspec.json.decode(
            await ask(bus, "snapshot", b'{"source":"disk-tier-0"}'), type=SnapshotReply
        )
        held = {int(t, 16) for part in reply.parts for run in part.runs for t in run.hashes}
        assert held == {1, 3}


def flip(path: Path, wanted: bytes) -> None:
    """Flip a bit of what is in a file."""
    data = path.read_bytes()
    at = data.index(wanted) + len(wanted) // 2
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 4]))
        file.flush()
        os.fsync(file.fileno())


async def test_a_full_store_evicts_and_a_lease_that_did_not_hold_is_not_believed(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path
) -> None:
    """Eight slots, ten blocks: the eight newest. Then a copy whose lease ended early."""
    async with living(settings_of(nats_server, tmp_path)):
        host.store(*range(1, 9))
        await host.wait_announced(*range(1, 9))
        host.store(9, 10)
        await wait_until(lambda: {9, 10} <= host.announced, deadline_s=DEADLINE_S)
        assert len(host.announced) == DISK_SLOTS
        host.revoking = True
        before = host.announced
        host.store(11)

        async def is_lost() -> bool:
            return "dropped.write_lease_lost" in (await wait_stats(bus, "ready", True)).figures

        await until(is_lost)
        assert 11 not in host.announced
        assert host.announced <= before


async def test_an_orderly_end_says_so_and_the_next_life_has_everything(
    nats_server: NatsServer, host: Host, tmp_path: Path
) -> None:
    """`cleared` when it stops, `cleared` and everything when it starts."""
    settings = settings_of(nats_server, tmp_path)
    async with living(settings):
        host.store(1, 2)
        await host.wait_announced(1, 2)
    host.held.clear()
    await host.wait_announced()
    last = host.events[-1]
    assert isinstance(last, Cleared)
    assert last.reason == "stop"
    async with living(settings):
        await host.wait_announced(1, 2)


# --- bad input ------------------------------------------------------------------------------------

GOOD_FILL = FillRequest(epoch=1, until_ms=1, slots=[FillSlot(hash="0" * 32, slot=0)])


@pytest.mark.parametrize(
    ("payload", "code", "counter"),
    [
        (b"", "bad_message", "bad_message"),
        (b"garbage", "bad_message", "bad_message"),
        (b"x" * 900_000, "bad_message", "bad_message"),
        (msgspec.json.encode(GOOD_FILL).replace(b'"v":1', b'"v":9'), "bad_message", "bad_message"),
        (msgspec.json.encode(GOOD_FILL).replace(b"0" * 32, b"zz"), "bad_message", "bad_message"),
        (msgspec.json.encode(GOOD_FILL), "stale_arena", "peer_failed"),
    ],
    ids=["empty", "garbage", "oversized", "version", "hash", "epoch"],
)
async def test_a_bad_fill_gets_a_typed_error(
    nats_server: NatsServer,
    bus: Bus,
    tmp_path: Path,
    payload: bytes,
    code: str,
    counter: str,
) -> None:
    """… and is counted; the service goes on."""
    async with living(settings_of(nats_server, tmp_path)):
        await wait_stats(bus, "ready", True)
        with pytest.raises(RequestFailed) as caught:
            await ask(bus, "fill", payload)
        assert caught.value.code == code
        await wait_stats(bus, "ready", True)
        errors = await counted(bus, "kvbm_bus_handler_errors_total")
        # We may have asked for its figures before it had any.
        assert {code: errors[code] for code in errors if code != "not_ready"} == {counter: 1.0}


@pytest.mark.parametrize(
    "lie", [{"instance": "1"}, {"sizes": [0]}, {"slot_count": ARENA_SLOTS + 1}, {"path": "\0"}]
)
async def test_an_arena_that_cannot_be_used_ends_the_wait_for_it(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path, lie: dict[str, Any]
) -> None:
    """It is another's, its slots have no length, end after it, or it is in no file."""
    host.lies = lie
    async with living(settings_of(nats_server, tmp_path)):
        await wait_stats(bus, "ready", True)
        slots = [FillSlot(hash=name(1).hex(), slot=0)]
        late_ms = monotonic_ms() + 60_000
        request = FillRequest(epoch=host.registration.epoch, until_ms=late_ms, slots=slots)
        with pytest.raises(RequestFailed, match="stale_arena"):
            await ask(bus, "fill", request)
        host.lies = {}
        host.store(1)
        await host.wait_announced(1)


async def test_bad_events_and_hits_are_counted_and_harm_nothing(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path
) -> None:
    """Garbage, another version, another's subject, no hashes: dropped, and the rest goes on."""
    async with living(settings_of(nats_server, tmp_path)):
        await wait_stats(bus, "ready", True)
        host.store(1)
        await host.wait_announced(1)
        [event] = Announcer(host="h", source="host-tier-0", tier="host", epoch=1).stored([block(9)])
        good = event_codec.encode(event)
        subject = event_subject(event)
        for payload in (b"", b"garbage", good.replace(b'"v":1', b'"v":9'), good[:-2]):
            await bus.publish(subject, payload)
        await bus.publish(subject.replace("host-tier-0", "host-tier-x"), good)
        await bus.publish(subject, good.replace(name(9).hex().encode(), b"zz"))
        for payload in (b"", b"garbage", b'{"v":9,"namespace":"' + b"0" * 64 + b'","hashes":[]}'):
            await bus.publish(hits_subject("h"), payload)
        host.store(2)
        await host.wait_announced(1, 2)
        dropped = await counted(bus, "kvbm_bus_messages_dropped_total")
        assert dropped == {"malformed": 3.0, "version": 1.0, "wrong_subject": 1.0}
        assert (await counted(bus, "kvbm_bus_handler_errors_total"))["bad_message"] == 3
        assert (await wait_stats(bus, "ready", True)).figures["dropped.malformed"] == 1
        assert all(answer.ok for answer in (await host.fill(1, 2)).values())


# --- the directory --------------------------------------------------------------------------------


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A file system of its own, where we may mount one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def remount(path: Path, option: str) -> None:
    """Make it larger, or read-only."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(path)], check=True)


async def test_what_writing_costs_is_a_metric(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path
) -> None:
    """A block takes a slot and a record of the journal."""
    async with living(settings_of(nats_server, tmp_path)):
        host.store(1, 2, 3)
        await host.wait_announced(1, 2, 3)
        amplification = (await counted(bus, "kvbm_write_amplification"))[""]
        assert amplification == pytest.approx((SLOT_BYTES + RECORD_BYTES) / BLOCK_BYTES)
        assert await counted(bus, "kvbm_disk_bypassed") == {"": 0}


@pytest.mark.slow
async def test_a_full_disk_is_not_ready_says_why_and_recovers(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 KiB where 64 are needed: alive, not ready, clear; with more room it goes on by itself."""
    monkeypatch.setattr("kvbm_disk_tier.core.store_status.STORE_RETRY_MS", 50)
    with small_disk(tmp_path / "disk", "32k") as directory:
        settings = settings_of(nats_server, directory, runtime_dir=tmp_path / "run")
        async with living(settings):
            host.store(1)
            [reason] = (await wait_stats(bus, "ready", False)).reasons
            assert f"no room for {DISK_SLOTS * SLOT_BYTES} bytes" in reason
            assert str(directory) in reason
            assert "DYN_KVBM_DISK_CACHE_GB" in reason
            remount(directory, "size=1m")
            await wait_stats(bus, "ready", True)
            await host.wait_announced(1)


async def test_a_cache_that_is_larger_than_the_disk_takes_nothing_from_it(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path
) -> None:
    """A petabyte: refused before anything is allocated."""
    async with living(settings_of(nats_server, tmp_path, disk_cache_gb=1e6)):
        host.store(1)
        reply = await wait_stats(bus, "ready", False)
        assert "no room for" in reply.reasons[0]
        assert (tmp_path / "kvbm-h-0/slots").stat().st_blocks == 0


async def test_a_second_disk_tier_on_the_same_directory_is_refused(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Another process holds the lock, and does not let go: an error that names the directory."""
    monkeypatch.setattr("kvbm_disk_tier.shell.service.LOCK_DEADLINE_S", 0.2)
    settings = settings_of(nats_server, tmp_path)
    directory = tmp_path / "kvbm-h-0"
    directory.mkdir()
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert await serve_service("disk-tier", serve, settings, asyncio.Event()) == 1
    assert f"{directory} is used by another disk tier" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_predecessor_may_take_its_time_to_leave(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """Who takes a place over waits for the lock a while."""
    directory = tmp_path / "kvbm-h-0"
    directory.mkdir()
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        async with living(settings_of(nats_server, tmp_path)):
            with pytest.raises(RequestFailed):
                await ask_when_there(bus, "stats")
            fcntl.flock(lock, fcntl.LOCK_UN)
            await wait_stats(bus, "ready", True)


async def ask_when_there(bus: Bus, verb: str) -> bytes:
    """Ask until somebody answers, be it with an error."""

    async def answer() -> bytes | RequestFailed:
        try:
            return await ask(bus, verb, b"{}")
        except RequestFailed as error:
            return error

    found: bytes | RequestFailed = await ask_until(answer, deadline_s=DEADLINE_S, despite=KvbmError)
    if isinstance(found, RequestFailed):
        raise found
    return found


@pytest.mark.parametrize(("theirs", "changes"), [(1, {}), (1, {"disk_keys": "11" * 32}), (4, {})])
async def test_another_formats_store_is_replaced_by_an_empty_one(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, theirs: int, changes: dict[str, Any],
) -> None:  # fmt: skip
    """An earlier or later version's header, of a sealed store, too: nothing of it is announced, its
    slots are used again, the log says why, and it is counted."""
    settings = settings_of(nats_server, tmp_path, **changes)
    async with living(settings):
        host.store(1)
        await host.wait_announced(1)
    host.held.clear()
    header = tmp_path / "kvbm-h-0/header"
    header.write_bytes(header.read_bytes().replace(b'"format":3', b'"format":%d' % theirs))
    seen = len(host.events)
    with caplog.at_level(logging.WARNING):
        async with living(settings):
            host.store(2)
            await host.wait_announced(2)
            assert await counted(bus, "kvbm_stores_outdated_total") == {"": 1.0}
            figures = await wait_stats(bus, "ready", True)
            assert figures.slots["reset"] == figures.slots["total"] - 1
    assert f"it has format {theirs}, and this release has format 3" in caplog.text
    stored = [event for event in host.events[seen:] if isinstance(event, Stored)]
    assert [run.hashes for event in stored for run in event.runs] == [[name(2).hex()]]


async def test_without_a_disk_cache_it_answers_that_it_is_empty(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """Whoever asks every source gets an answer: nothing, ready, no files."""
    async with living(settings_of(nats_server, tmp_path, disk_cache_gb=0)):
        reply = await wait_stats(bus, "ready", True)
        assert (reply.kind, reply.slots["total"]) == ("disk-tier", 0)
        snapshot = msgspec.json.decode(
            await ask(bus, "snapshot", b'{"source":"disk-tier-0"}'), type=SnapshotReply
        )
        assert (snapshot.source, snapshot.epoch) == ("disk-tier-0", reply.epoch)
        assert snapshot.parts == []
        assert not (tmp_path / "kvbm-h-0").exists()


async def test_a_number_of_blocks_is_enough(
    nats_server: NatsServer, bus: Bus, host: Host, tmp_path: Path
) -> None:
    """DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS wins over the size, also over none."""
    changes = {"disk_cache_gb": 0, "disk_cache_override_num_blocks": 3}
    async with living(settings_of(nats_server, tmp_path, **changes)):
        host.store(1)
        await host.wait_announced(1)
        assert (await wait_stats(bus, "ready", True)).slots["total"] == 3
