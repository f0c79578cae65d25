"""The consolidated stream on real NATS and ZMQ: for consumers of events, and for routers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from kvbm_common.config.settings import Settings
from kvbm_common.identity import SequenceHash, hash_from_hex
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.event_publisher import EventPublisher
from kvbm_common.nats.streams import CONSOLIDATED
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.service.process import serve
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.slots import Block
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    replay_request,
    split_published,
    split_replayed,
)
from kvbm_common.wire.events import (
    CONSOLIDATED_PREFIX,
    Cleared,
    Event,
    Removed,
    Stored,
    event_codec,
    event_subject,
)
from kvbm_common.wire.packed_events import events_on
from kvbm_common.wire.verbs import SnapshotReply, verb_subject
from kvbm_connectors.consolidator.core.router_stream import short_hash
from kvbm_connectors.consolidator.shell.router_sockets import endpoint_of
from kvbm_connectors.consolidator.shell.service import serve_consolidator

from tests.connectors.consolidator.model import NAMESPACE, chain, engine_hash, removed, stored
from tests.connectors.consolidator.shell.test_service import (
    DEADLINE_S,
    Engine,
    dropped,
    running,
    settings_of,
    wait_for,
)
from tests.waiting import wait_until

PROMPT = (1, 2, 3, 4, 5, 6)
BLOCKS = chain(PROMPT)


class Subscriber:
    """A router as they are today: SUB, replay after a gap, blocks by their short hashes."""

    def __init__(self, settings: Settings, topic: bytes = b"", rank: int = 0) -> None:
        self.held: set[int | bytes] = set()
        self.next_seq = 0
        self._topic = topic
        self._context = zmq.asyncio.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic)
        self._sub.connect(endpoint_of(settings.router_endpoint, rank))
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(endpoint_of(settings.router_replay_endpoint, rank))
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        await self.catch_up()
        while True:
            frame = split_published(await self._sub.recv_multipart())
            if frame.seq > self.next_seq:
                await self.catch_up()
            if frame.seq == self.next_seq:
                self._apply(frame.seq, frame.payload)

    async def catch_up(self) -> None:
        """Ask for what was missed."""
        await self._dealer.send_multipart(replay_request(self.next_seq))
        while True:
            frame = split_replayed(await self._dealer.recv_multipart())
            if frame.is_end:
                return
            if self._topic in (b"", frame.topic):
                self._apply(frame.seq, frame.payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        self.next_seq = seq + 1
        for event in decode_batch(payload).events:
            match event:
                case BlockStored():
                    self.held |= set(event.block_hashes)
                case BlockRemoved():
                    self.held -= set(event.block_hashes)
                case AllBlocksCleared():
                    self.held.clear()

    async def ask(self, *frames: bytes) -> None:
        """Any request."""
        await self._dealer.send_multipart(list(frames))

    async def stop_reading(self) -> None:
        """Read nothing from now on."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def read_on(self) -> None:
        """Read again."""
        self._task = asyncio.create_task(self._read())

    async def close(self) -> None:
        """End."""
        await self.stop_reading()
        self._sub.close(linger=0)
        self._dealer.close(linger=0)
        self._context.term()


class HostTier:
    """A host tier in the registry, its events, and its answer for a snapshot."""

    def __init__(self, bus: Bus, publisher: EventPublisher, epoch: int) -> None:
        self._publisher = publisher
        self.announcer = Announcer(host="h", source="host-tier-0", tier="host", epoch=epoch)
        self.held: dict[SequenceHash, Block] = {}
        self._publish(self.announcer.cleared("start"))

    def store(self, *blocks: SequenceHash) -> None:
        """Hold blocks of a chain."""
        parents = [NAMESPACE.root, *blocks[:-1]]
        new = [
            Block(hash=block, parent=parent, namespace=NAMESPACE.digest, checksum=0, bytes=1)
            for block, parent in zip(blocks, parents, strict=True)
        ]
        self.held |= {block.hash: block for block in new}
        self._publish(*self.announcer.stored(new))

    def remove(self, *blocks: SequenceHash) -> None:
        """Drop some."""
        gone = [self.held.pop(block) for block in blocks]
        self._publish(*self.announcer.removed(gone, "evicted"))

    async def snapshot(self, _payload: bytes) -> bytes:
        """The verb."""
        return msgspec.json.encode(self.announcer.snapshot(list(self.held.values())))

    def _publish(self, *events: Event) -> None:
        for event in events:
            payload = event_codec.encode(event)
            self._publisher.publish(event_subject(event), payload, epoch=event.epoch, seq=event.seq)


@asynccontextmanager
async def host_tier(bus: Bus) -> AsyncIterator[HostTier]:
    """A host tier that lives."""
    registry = NatsRegistry(bus, ttl_s=2.0)
    entry = await registry.register("host-tier", "h", "0")
    publisher = bus.event_publisher("host-tier-0")
    running_publisher = asyncio.create_task(publisher.run())
    tier = HostTier(bus, publisher, entry.epoch)
    await bus.add_verbs("host-tier", "0", "h", {"snapshot": tier.snapshot})
    try:
        yield tier
    finally:
        running_publisher.cancel()
        await entry.revoke()
        await registry.close()


async def consolidated_blocks(bus: Bus) -> set[SequenceHash]:
    """The consolidator's own word of the engine's consolidated stream."""
    subject = verb_subject("consolidator", "snapshot", host="h", instance="0")
    request = b'{"source":"sim-0","consolidated":true}'
    payload = await bus.request(subject, request, deadline_s=2.0)
    parts = msgspec.json.decode(payload, type=SnapshotReply).parts
    return {hash_from_hex(text) for part in parts for run in part.runs for text in run.hashes}


@pytest.fixture
def settings(nats_server: NatsServer, tmp_path: Path) -> Settings:
    return settings_of(nats_server, tmp_path)


@pytest.fixture
async def consolidator(settings: Settings) -> AsyncIterator[None]:
    stopping = asyncio.Event()
    service = serve("consolidator", serve_consolidator, settings, stopping)
    async with running(service, stopping=stopping):
        yield


@pytest.fixture
async def engine(settings: Settings, consolidator: None) -> AsyncIterator[Engine]:
    engine = Engine(settings)
    await engine.attach()
    yield engine
    await engine.close()


def short(blocks: set[SequenceHash]) -> set[int]:
    """What routers call them."""
    return set(map(short_hash, blocks))


async def test_host_evicts_and_device_evicts_and_the_router_hears_the_last_one(
    settings: Settings, engine: Engine, bus: Bus
) -> None:
    """1. Device and host store. 2. The device evicts: the router keeps the blocks. 3. So does the
    host: they are gone. 4. A router that comes late holds the same."""
    early = Subscriber(settings)
    async with host_tier(bus) as host:
        await engine.publish(stored(PROMPT))
        host.store(*BLOCKS)
        await wait_until(lambda: early.held == short(set(BLOCKS)))
        await wait_for(lambda: tier_blocks(bus), 3.0)
        await engine.publish(removed(*(engine_hash(PROMPT[:end]) for end in (6, 4, 2))))
        await engine.publish(stored((9, 9)))
        both = set(BLOCKS) | set(chain((9, 9)))
        await wait_until(lambda: early.held == short(both))
        host.remove(BLOCKS[2])
        left = both - {BLOCKS[2]}
        await wait_until(lambda: early.held == short(left))
        assert await consolidated_blocks(bus) == left
        late = Subscriber(settings)
        await wait_until(lambda: late.held == short(left))
        await late.close()
    # The tier has left the registry: what only it had is gone.
    await wait_until(lambda: early.held == short(set(chain((9, 9)))))
    await early.close()


async def tier_blocks(bus: Bus) -> float:
    """How many blocks of tiers the consolidator knows."""
    subject = verb_subject("consolidator", "stats", host="h", instance="0")
    payload = await bus.request(subject, b"", deadline_s=2.0)
    figure: float = msgspec.json.decode(payload)["figures"]["tier_blocks"]
    return figure


async def test_the_consolidated_stream_on_nats(engine: Engine, bus: Bus) -> None:
    """First store, last removal, with positions of its own, on subjects per host and engine."""
    async with host_tier(bus) as host:
        host.store(*BLOCKS)
        await wait_for(lambda: consolidated_blocks(bus), set(BLOCKS))
        await engine.publish(stored(PROMPT))
        await engine.publish(stored((9, 9)))
        events: list[Event] = []
        async with bus.event_subscription(
            subject="kvbm.v1.consolidated.h.sim-0.*", spec=CONSOLIDATED
        ) as subscription:
            async for batch in subscription:
                for subject, payload, _ in batch:
                    events += events_on(subject, payload, prefix=CONSOLIDATED_PREFIX)
                if len(events) >= 3:
                    break
    kinds = [(type(event), event.tier, event.seq) for event in events]
    assert kinds == [(Cleared, "device", 1), (Stored, "host", 2), (Stored, "device", 3)]
    assert not any(isinstance(event, Removed) for event in events)
    assert all(event.ts_ms > 0 for event in events)


async def test_ranks_have_ports_and_engines_have_topics(
    settings: Settings, consolidator: None
) -> None:
    engines = [Engine(settings), Engine(settings, rank=1), Engine(settings, "sim-1")]
    readers = [
        Subscriber(settings, b"sim-0"),
        Subscriber(settings, b"sim-0", rank=1),
        Subscriber(settings, b"sim-1"),
    ]
    for token, engine in enumerate(engines):
        await engine.attach()
        await engine.publish(stored((token, token)))
    for token, reader in enumerate(readers):
        wanted = short(set(chain((token, token))))
        await wait_until(lambda reader=reader, wanted=wanted: wanted <= reader.held)  # type: ignore[misc]
    assert readers[1].held == short(set(chain((1, 1))))
    closing: list[Engine | Subscriber] = [*engines, *readers]
    for part in closing:
        await part.close()


async def test_nonsense_of_routers_is_counted(settings: Settings, engine: Engine, bus: Bus) -> None:
    reader = Subscriber(settings)
    for frames in ((b"",), (b"", b"short"), (b"x", bytes(8)), (b"", bytes(8), b"more")):
        await reader.ask(*frames)
    name = "kvbm_consolidator_router_dropped_total"
    await wait_for(lambda: dropped(bus, name), {"malformed": 4.0})
    await engine.publish(stored(PROMPT))
    await wait_until(lambda: reader.held == short(set(BLOCKS)))
    await reader.close()


async def test_a_taken_port_is_said_and_ends_the_start(
    nats_server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`kvbm up` twice: the second one must say which port, and which variable moves it."""
    context = zmq.Context[zmq.Socket[bytes]]()
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    taken = {"router_endpoint": f"tcp://127.0.0.1:{port}", "router_replay_endpoint": "off"}
    settings = Settings.load(settings_of(nats_server, tmp_path).as_environ(), taken)
    async with asyncio.timeout(DEADLINE_S):
        code = await serve("consolidator", serve_consolidator, settings, asyncio.Event())
    assert code == 1
    assert f"127.0.0.1:{port}" in caplog.text
    assert "KVBM_ROUTER_ENDPOINT" in caplog.text
    socket.close(linger=0)
    context.term()


async def test_without_the_consolidator_engines_are_not_followed(
    nats_server: NatsServer, tmp_path: Path, bus: Bus
) -> None:
    """DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR=false: offers pass, events do not."""
    settings = Settings.load(
        settings_of(nats_server, tmp_path).as_environ(),
        {"consolidator_enabled": False, "registry_ttl_s": 5.0},
    )
    stopping = asyncio.Event()
    service = serve("consolidator", serve_consolidator, settings, stopping)
    async with running(service, stopping=stopping):
        engine = Engine(settings)
        assert (await engine.attach()).epoch > 0
        await engine.publish(stored(PROMPT))
        subject = verb_subject("consolidator", "stats", host="h", instance="0")
        figures = msgspec.json.decode(await bus.request(subject, b"", deadline_s=2.0))["figures"]
        assert (figures["streams"], figures["blocks"], figures["router_batches"]) == (1, 0, 0)
        await engine.close()
