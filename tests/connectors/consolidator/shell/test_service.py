"""The consolidator on real ZMQ and NATS: from an engine's socket to the index's answer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import msgspec
import pytest
import zmq
import zmq.asyncio
from kvbm_cli.service_process import ServiceProcess
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError, RequestFailed
from kvbm_common.identity import SequenceHash, request_extras
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.service.process import serve
from kvbm_common.wire.codec import MESSAGE_BYTES_MAX
from kvbm_common.wire.consolidator import (
    Attach,
    Attached,
    Detach,
    FromConsolidator,
    Offered,
    OfferedRun,
    ToConsolidator,
    from_consolidator,
    to_consolidator,
)
from kvbm_common.wire.engine_events import (
    EngineEvent,
    encode_batch,
    published_frames,
    replay_end_frames,
    replayed_frames,
    split_replay_request,
)
from kvbm_common.wire.index_verbs import DumpReply
from kvbm_common.wire.local import Beat, Refused
from kvbm_common.wire.verbs import (
    Offer,
    SnapshotReply,
    StatsReply,
    offer_codec,
    offers_subject,
    verb_subject,
)
from kvbm_connectors.consolidator.shell.service import serve_consolidator
from kvbm_index.shell.service import serve_index

from tests.connectors.consolidator.model import HASHER, INCARNATION, NAMESPACE, Device, chain
from tests.waiting import ask_until, wait_until

DEADLINE_S = 10.0
TTL_S = 1.0
DEAF_BEATS = 20


def settings_of(server: NatsServer, directory: Path) -> Settings:
    """The settings of both services."""
    overrides = {
        "nats_url": server.url,
        "host": "h",
        "registry_ttl_s": TTL_S,
        "runtime_dir": str(directory),
        "router_endpoint": f"ipc://{directory}/router.sock",
        "router_replay_endpoint": f"ipc://{directory}/router-replay.sock",
    }
    return Settings.load({}, overrides)


class Engine:
    """An engine's sockets and its connector's: PUB, replay ROUTER, DEALER."""

    def __init__(self, settings: Settings, name: str = "sim-0", rank: int = 0) -> None:
        self.device = Device(clock=time.time())
        self.name, self.rank = name, rank
        self.lost = 0
        """Batches that were numbered and never sent."""
        directory = settings.runtime_dir
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, 100_000)
        self._replay = self._context.socket(zmq.ROUTER)
        self.dealer = self._context.socket(zmq.DEALER)
        self.endpoint = f"ipc://{directory}/{name}-{rank}-pub.sock"
        self.replay_endpoint = f"ipc://{directory}/{name}-{rank}-replay.sock"
        self._pub.bind(self.endpoint)
        self._replay.bind(self.replay_endpoint)
        self._consolidator = settings.consolidator_endpoint
        self.dealer.connect(self._consolidator)
        self._tasks = [asyncio.create_task(self._answer_replays())]

    def attach_message(self) -> Attach:
        """Its introduction."""
        return Attach(
            engine=self.name,
            incarnation=INCARNATION,
            endpoint=self.endpoint,
            replay_endpoint=self.replay_endpoint,
            rank=self.rank,
            namespace=NAMESPACE,
        )

    async def say(self, message: ToConsolidator | bytes) -> None:
        """Send to the consolidator."""
        raw = message if isinstance(message, bytes) else to_consolidator.encode(message)
        await self.dealer.send(raw)

    async def hear(self) -> FromConsolidator:
        """The consolidator's next message."""
        async with asyncio.timeout(DEADLINE_S):
            return from_consolidator.decode(await self.dealer.recv())

    async def attach(self) -> Attached:
        """Introduce the engine until the consolidator follows it."""
        await self.say(self.attach_message())
        answer = await self.hear()
        assert isinstance(answer, Attached), answer
        return answer

    def keep_attached(self) -> None:
        """Beat, and attach again when told to, as connectors do. As they do, too: take another
        socket when one hears nothing (seen once in some hundred restarts of a consolidator)."""
        self._tasks.append(asyncio.create_task(self._keep_attached()))

    async def publish(self, *events: EngineEvent, lose: bool = False) -> None:
        """Send a batch; or only number it."""
        seq = self.device.publish(*events)
        if lose:
            self.lost += 1
        else:
            await self.send(b"", seq, encode_batch(self.device.batches[seq]))

    async def send(self, topic: bytes, seq: int, payload: bytes) -> None:
        """Send any frames."""
        await self._pub.send_multipart(published_frames(topic, seq, payload))

    async def send_frames(self, *frames: bytes) -> None:
        """Send frames that may be none."""
        await self._pub.send_multipart(list(frames))

    async def close(self) -> None:
        """Fall silent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in (self._pub, self._replay, self.dealer):
            socket.close(linger=0)
        self._context.term()

    async def _answer_replays(self) -> None:
        while True:
            client, *frames = await self._replay.recv_multipart()
            for seq in range(split_replay_request(frames), len(self.device.batches)):
                payload = encode_batch(self.device.batches[seq])
                await self._replay.send_multipart([client, *replayed_frames(b"", seq, payload)])
            await self._replay.send_multipart([client, *replay_end_frames()])

    async def _keep_attached(self) -> None:
        unanswered = 0
        while True:
            if unanswered == DEAF_BEATS:
                self.dealer.close(linger=0)
                self.dealer = self._context.socket(zmq.DEALER)
                self.dealer.connect(self._consolidator)
                unanswered = 0
            await self.say(Beat(engine=self.name, incarnation=INCARNATION))
            try:
                async with asyncio.timeout(0.2):
                    answer = await self.dealer.recv()
            except TimeoutError:
                unanswered += 1
                continue
            unanswered = 0
            # Attaching is answered, too, and so is each beat that waited while none was there. Read
            # one by one, old answers would hide a new life for longer after each restart.
            while await self.dealer.poll(0):
                answer = await self.dealer.recv()
            if isinstance(from_consolidator.decode(answer), Refused):
                await self.say(self.attach_message())
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(*services: Awaitable[int], stopping: asyncio.Event) -> AsyncIterator[None]:
    """Services in this event loop."""
    lives = [asyncio.ensure_future(service) for service in services]
    try:
        yield
    finally:
        stopping.set()
        assert await asyncio.gather(*lives) == [0] * len(lives)


@pytest.fixture
def settings(nats_server: NatsServer, tmp_path: Path) -> Settings:
    """The settings of both services; sockets in a directory of the test."""
    return settings_of(nats_server, tmp_path)


@pytest.fixture
async def services(settings: Settings) -> AsyncIterator[None]:
    """A consolidator and an index."""
    stopping = asyncio.Event()
    async with running(
        serve("consolidator", serve_consolidator, settings, stopping),
        serve("index", serve_index, settings, stopping),
        stopping=stopping,
    ):
        yield


@pytest.fixture
async def engine(settings: Settings, services: None) -> AsyncIterator[Engine]:
    """An attached engine."""
    engine = Engine(settings)
    await engine.attach()
    yield engine
    await engine.close()


async def wait_for(look: Callable[[], Awaitable[object]], expected: object) -> None:
    """Look until what is seen is as expected; an error is no answer."""

    async def right() -> bool:
        return await look() == expected

    await ask_until(right, deadline_s=DEADLINE_S, despite=KvbmError)


async def held_by_index(bus: Bus, source: str = "sim-0") -> set[SequenceHash]:
    """What the index believes of a source."""
    request = msgspec.json.encode({"source": source})
    payload = await bus.request(verb_subject("index", "dump"), request, deadline_s=2.0)
    holders = msgspec.json.decode(payload, type=DumpReply).holders
    return {SequenceHash(bytes.fromhex(name)) for holder in holders for name in holder.hashes}


async def wait_agreed(bus: Bus, engine: Engine) -> None:
    """Until the index believes what the engine holds."""
    await wait_for(lambda: held_by_index(bus, engine.name), engine.device.truth())


async def stats_of(bus: Bus) -> StatsReply:
    """The consolidator's figures."""
    subject = verb_subject("consolidator", "stats", host="h", instance="0")
    return msgspec.json.decode(await bus.request(subject, b"", deadline_s=2.0), type=StatsReply)


async def dropped(bus: Bus, name: str) -> dict[str, float]:
    """One counter of drops, by reason."""
    subject = verb_subject("consolidator", "metrics", host="h", instance="0")
    families = msgspec.json.decode(await bus.request(subject, b"", deadline_s=2.0))["families"]
    samples = next(family["samples"] for family in families if family["name"] == name)
    return {sample["labels"]["reason"]: sample["value"] for sample in samples}


async def test_no_series_is_exported_twice(engine: Engine, bus: Bus) -> None:
    """Goal: the publishers of both streams count under names of their own."""
    subject = verb_subject("consolidator", "metrics", host="h", instance="0")
    families = msgspec.json.decode(await bus.request(subject, b"", deadline_s=2.0))["families"]
    counts = Counter(
        (family["name"], tuple(sorted(sample["labels"].items())))
        for family in families
        for sample in family["samples"]
    )
    assert [series for series, count in counts.items() if count > 1] == []
    names = {family["name"] for family in families}
    assert names >= {"kvbm_event_messages_total", "kvbm_consolidated_event_messages_total"}


async def test_from_the_engine_to_the_index(engine: Engine, bus: Bus) -> None:
    """1. Stores, evictions and a copy arrive. 2. So does a clear. 3. The snapshot agrees."""
    device = engine.device
    await engine.publish(device.store((1, 2, 3, 4, 5, 6), 0), device.store((7, 8), 0))
    await engine.publish(device.evict(0), device.store((1, 2, 9, 9), 1))
    await wait_agreed(bus, engine)
    await engine.publish(device.clear(), device.store((5, 5), 0))
    await wait_agreed(bus, engine)
    subject = verb_subject("consolidator", "snapshot", host="h", instance="0")
    payload = await bus.request(subject, b'{"source":"sim-0"}', deadline_s=2.0)
    snapshot = msgspec.json.decode(payload, type=SnapshotReply)
    assert snapshot.parts[0].runs[0].hashes == [chain((5, 5))[0].hex()]
    with pytest.raises(RequestFailed) as caught:
        await bus.request(subject, b'{"source":"nobody"}', deadline_s=2.0)
    assert (caught.value.code, caught.value.field) == ("unknown_source", "source")
    stats = await stats_of(bus)
    assert stats.ready
    assert stats.positions["sim-0"] == [snapshot.epoch, snapshot.seq]


async def test_what_was_before_us_and_what_gets_lost_is_replayed(
    settings: Settings, services: None, bus: Bus
) -> None:
    engine = Engine(settings)
    await engine.publish(engine.device.store((1, 2, 3, 4), 0))
    await engine.attach()
    await wait_agreed(bus, engine)
    await engine.publish(engine.device.evict(0), lose=True)
    await engine.publish(engine.device.store((7, 8), 0))
    await wait_agreed(bus, engine)
    await engine.close()


async def test_a_generation_that_is_heard_of_late(engine: Engine, bus: Bus) -> None:
    """1. An engine is reset and stores blocks: they have the names of before.
    2. Seconds later the consolidator hears of the generation: the index has the new names."""
    device, prompt = engine.device, (1, 2, 3, 4)
    await engine.publish(device.store((7, 8), 0))
    since_us = int(device.clock * 1e6) + 1
    await engine.publish(device.clear(), device.store(prompt, 0))
    await engine.publish(device.store((*prompt, 5, 6), 2))
    await wait_agreed(bus, engine)
    said = {"generation": "00000000000000f1", "generation_us": since_us}
    await engine.say(msgspec.structs.replace(engine.attach_message(), **said))
    named = HASHER.chain((*prompt, 5, 6), extras=request_extras(generation="00000000000000f1"))
    await wait_for(lambda: held_by_index(bus), set(named))


async def test_bad_frames_are_counted_and_harm_nothing(engine: Engine, bus: Bus) -> None:
    """Garbage where batches should be: each is counted, and the stream goes on."""
    device = engine.device
    await engine.publish(device.store((1, 2), 0))
    await wait_agreed(bus, engine)
    await engine.send_frames(b"alone")
    await engine.send_frames(b"", b"short", b"x")
    await engine.send(b"", 1, b"\xc1garbage")
    await engine.send(b"", 1, msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}], 0]))
    await engine.send(b"", 2**64 - 1, b"")
    await engine.publish(device.store((3, 4), 0))
    await wait_agreed(bus, engine)
    assert await dropped(bus, "kvbm_consolidator_frames_dropped_total") == {"malformed": 5.0}


@pytest.mark.slow
async def test_an_oversized_frame_ends_the_connection_and_not_the_stream(
    engine: Engine, bus: Bus
) -> None:
    """ZMQ closes a connection over MAXMSGSIZE; it comes back, and the replay brings the rest."""
    await engine.send(b"", 0, bytes(MESSAGE_BYTES_MAX + 1))
    await engine.publish(engine.device.store((1, 2), 0))
    await engine.publish(engine.device.store((3, 4), 0))
    await wait_agreed(bus, engine)


async def test_bad_messages_of_connectors_are_refused(engine: Engine, bus: Bus) -> None:
    good = engine.attach_message()
    run = OfferedRun(parent=b"p" * 16, hashes=b"h" * 32, blocks=[1, 2])
    offered = Offered(engine="sim-0", incarnation=INCARNATION, offer=1, namespace=b"n" * 32,
                      deadline_ms=1, runs=[run])  # fmt: skip
    replace = msgspec.structs.replace
    for message, code in (
        (b"garbage", "bad_message"),
        (bytes(MESSAGE_BYTES_MAX + 1), "bad_message"),
        (to_consolidator.encode(good)[:-1], "bad_message"),
        (replace(good, endpoint="tcp://*:5557"), "bad_endpoint"),
        (replace(good, replay_endpoint="nonsense"), "bad_endpoint"),
        (replace(good, engine="host-tier-0"), "bad_engine"),
        (Beat(engine="nobody", incarnation=INCARNATION), "unknown_engine"),
        (replace(offered, engine="nobody"), "unknown_engine"),
        (replace(offered, namespace=b"short"), "bad_message"),
        (replace(offered, runs=[replace(run, blocks=[1])]), "bad_message"),
        (replace(offered, runs=[replace(run, hashes=b"x")]), "bad_identity"),
        (replace(offered, runs=[replace(run, parent=b"x")]), "bad_identity"),
        (replace(offered, runs=[replace(run, hashes=b"h" * 16 * 4097, blocks=list(range(4097)))]),
         "bad_message"),
    ):  # fmt: skip
        await engine.say(message)
        answer = await engine.hear()
        assert isinstance(answer, Refused)
        assert answer.code == code, message
    await engine.say(Beat(engine="sim-0", incarnation=INCARNATION))
    assert isinstance(await engine.hear(), Attached)
    assert sum((await dropped(bus, "kvbm_consolidator_local_dropped_total")).values()) == 11


async def test_offers_reach_the_host_tier(engine: Engine, bus: Bus) -> None:
    offers: list[Offer] = []
    await bus.subscribe(offers_subject("h"), lambda _, raw: offers.append(offer_codec.decode(raw)))
    await stats_of(bus)  # A round trip: the server has our subscription now.
    blocks = chain((1, 2, 3, 4))
    run = OfferedRun(parent=NAMESPACE.root, hashes=b"".join(blocks), blocks=[7, 9])
    await engine.say(
        Offered(engine="sim-0", incarnation=INCARNATION, offer=3, namespace=NAMESPACE.digest,
                deadline_ms=500, priority=2, runs=[run])
    )  # fmt: skip
    await wait_until(lambda: offers)
    (offer,) = offers
    assert (offer.host, offer.engine, offer.offer, offer.priority) == ("h", "sim-0", 3, 2)
    assert offer.runs[0].hashes == [block.hex() for block in blocks]
    assert offer.runs[0].blocks == [7, 9]


@pytest.mark.slow
async def test_while_nats_is_away_offers_are_refused(
    engine: Engine, nats_server: NatsServer, bus: Bus
) -> None:
    """1. The engine hears that NATS is away. 2. An offer made all the same is refused by number,
    so that its blocks are free at once. 3. NATS is back, and says so."""
    run = OfferedRun(parent=NAMESPACE.root, hashes=b"".join(chain((1, 2))), blocks=[7])
    nats_server.kill()
    answer = await engine.hear()
    assert isinstance(answer, Attached)
    assert not answer.offers
    await engine.say(
        Offered(engine="sim-0", incarnation=INCARNATION, offer=3, namespace=NAMESPACE.digest,
                deadline_ms=500, runs=[run])
    )  # fmt: skip
    refused = await engine.hear()
    assert isinstance(refused, Refused)
    assert (refused.about, refused.code, refused.offer) == ("offered", "offer_not_passed", 3)
    await nats_server.start()
    answer = await engine.hear()
    assert isinstance(answer, Attached)
    assert answer.offers


async def test_several_engines_and_ranks(settings: Settings, services: None, bus: Bus) -> None:
    """One engine of two ranks and another one: three streams, two sources, one epoch each."""
    engines = [Engine(settings), Engine(settings, rank=1), Engine(settings, "sim-1")]
    epochs = [(await engine.attach()).epoch for engine in engines]
    assert epochs[0] == epochs[1] != epochs[2]
    for token, engine in enumerate(engines):
        await engine.publish(engine.device.store((token, token), 0))
    both = engines[0].device.truth() | engines[1].device.truth()
    await wait_for(lambda: held_by_index(bus, "sim-0"), both)
    await wait_agreed(bus, engines[2])
    await engines[1].publish(engines[1].device.clear())
    await wait_agreed(bus, engines[0])
    for engine in engines:
        await engine.close()


async def test_a_detached_engine_leaves_the_index(engine: Engine, bus: Bus) -> None:
    await engine.publish(engine.device.store((1, 2), 0))
    await wait_agreed(bus, engine)
    await engine.say(Detach(engine="sim-0", incarnation=INCARNATION))
    await wait_for(lambda: held_by_index(bus), set())


async def test_an_orderly_end_takes_its_engines_along(
    settings: Settings, bus: Bus, tmp_path: Path
) -> None:
    """The consolidator stops: what nobody follows must not stay in the index as if somebody did."""
    stop_one, stop_both = asyncio.Event(), asyncio.Event()
    async with running(serve("index", serve_index, settings, stop_both), stopping=stop_both):
        async with running(
            serve("consolidator", serve_consolidator, settings, stop_one), stopping=stop_one
        ):
            engine = Engine(settings)
            await engine.attach()
            await engine.publish(engine.device.store((1, 2), 0))
            await wait_agreed(bus, engine)
        await wait_for(lambda: held_by_index(bus), set())
        assert not (tmp_path / "consolidator.sock").exists()
        await engine.close()


@pytest.mark.slow
async def test_nats_and_the_consolidator_are_killed_and_all_converges(
    nats_server: NatsServer, settings: Settings, bus: Bus, tmp_path: Path
) -> None:
    """1. kill -9 of NATS while the engine works. 2. kill -9 of the consolidator, then a new one."""
    environ = os.environ | settings.as_environ()
    process = ServiceProcess(
        "consolidator", environ=environ, restart=True, log_path=tmp_path / "log"
    )
    process.start()
    await process.wait_ready(deadline_s=DEADLINE_S)
    stopping = asyncio.Event()
    async with running(serve("index", serve_index, settings, stopping), stopping=stopping):
        engine = Engine(settings)
        engine.keep_attached()
        device = engine.device
        await engine.publish(device.store((1, 2, 3, 4), 0))
        await wait_agreed(bus, engine)
        nats_server.kill()
        await engine.publish(device.store((5, 6), 0), device.evict(0))
        await nats_server.start()
        await wait_agreed(bus, engine)
        before = process.pid
        os.kill(before, signal.SIGKILL)
        await engine.publish(device.store((7, 8), 0))
        await wait_until(lambda: process.pid not in (0, before))
        await wait_agreed(bus, engine)
        await engine.publish(device.evict(0))
        await wait_agreed(bus, engine)
        await engine.close()
    await process.end(signal.SIGTERM, deadline_s=4.0)


async def test_an_engine_attaches_at_once_though_answers_of_a_dead_life_wait(
    settings: Settings,
) -> None:
    """Goal: the tests' own engine does not take old answers for a consolidator that lives.

    1. A consolidator has answered more often than the engine has beaten. 2. The next life refuses
    a beat. 3. The engine attaches before it has read one old answer per beat.
    """
    context = zmq.asyncio.Context()
    consolidator = context.socket(zmq.ROUTER)
    consolidator.bind(settings.consolidator_endpoint)
    engine = Engine(settings)
    engine.keep_attached()
    try:
        async with asyncio.timeout(DEADLINE_S):
            peer, _ = await consolidator.recv_multipart()
            attached = Attached(engine=engine.name, rank=0, epoch=1)
            refused = Refused(about="beat", code="unknown_engine", message="another life")
            for answer in [attached] * 50 + [refused]:
                await consolidator.send_multipart([peer, from_consolidator.encode(answer)])
            heard: list[ToConsolidator] = []
            while not (heard and isinstance(heard[-1], Attach)):
                _, message = await consolidator.recv_multipart()
                heard.append(to_consolidator.decode(message))
        assert len(heard) < 10
    finally:
        await engine.close()
        consolidator.close(linger=0)
        context.term()


async def test_the_lag_from_socket_to_answer_is_small(engine: Engine, bus: Bus) -> None:
    """Goal: an event is in the index's answer within 50 ms (here, half of them: 500)."""
    device = engine.device
    lags_s = []
    for token in range(20):
        started_s = time.perf_counter()
        await engine.publish(device.store((token, token), 0))
        await wait_agreed(bus, engine)
        lags_s.append(time.perf_counter() - started_s)
    assert median(lags_s) < 0.5
