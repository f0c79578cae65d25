"""The index on a real NATS: events in, answers out, snapshots, the registry, bad input, kills."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_cli.service_process import ServiceProcess
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError, RequestFailed
from kvbm_common.identity import Hasher, Namespace, SequenceHash, request_extras
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.dumps import ask_dump
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.event_publisher import EventPublisher
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.streams import EVENTS
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.registry.services import ServiceRegistration
from kvbm_common.service.process import serve
from kvbm_common.wire.events import Cleared, Event, Removed, Run, Stored, event_subject
from kvbm_common.wire.index_verbs import DumpReply, MatchReply
from kvbm_common.wire.scores import HoldersReply, MatchBatchReply, ScoreReply, WhereReply
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply, StatsReply, verb_subject
from kvbm_index.shell import service
from kvbm_index.shell.service import serve_index

from tests.waiting import ask_until, wait_until

DEADLINE_S = 10.0
TTL_S = 1.0
NAMESPACE = Namespace(model="m", block_tokens=4)
TOKENS = list(range(40))
CHAIN = Hasher(NAMESPACE).chain(TOKENS)


def settings_of(server: NatsServer) -> Settings:
    """The index's settings."""
    return Settings.load({}, {"nats_url": server.url, "host": "h", "registry_ttl_s": TTL_S})


@asynccontextmanager
async def living(settings: Settings) -> AsyncIterator[None]:
    """An index in this event loop."""
    stopping = asyncio.Event()
    life = asyncio.create_task(serve("index", serve_index, settings, stopping))
    try:
        yield
    finally:
        stopping.set()
        assert await life == 0


class Source:
    """A host tier, as far as the index sees one: registered, publishing, answering snapshots."""

    def __init__(self, bus: Bus, *, instance: str = "0") -> None:
        self.name = f"host-tier-{instance}"
        self.instance = instance
        self.held: list[SequenceHash] = []
        self.seq = 0
        self.snapshots = 0
        self._bus = bus
        self.registry = NatsRegistry(bus, ttl_s=TTL_S)
        self.publisher: EventPublisher = bus.event_publisher(self.name)
        self.registration: ServiceRegistration
        self._task: asyncio.Task[None]

    @classmethod
    @asynccontextmanager
    async def living(cls, bus: Bus, *, instance: str = "0") -> AsyncIterator[Source]:
        """A source with an epoch, from its first event to its death without a word."""
        source = cls(bus, instance=instance)
        await source.begin()
        source._task = asyncio.create_task(source.publisher.run())
        verbs = {"snapshot": source._snapshot}
        await bus.add_verbs("host-tier", instance, "h", verbs)
        try:
            yield source
        finally:
            source._task.cancel()
            await source.registry.close()

    async def begin(self) -> None:
        """Another life."""
        self.registration = await self.registry.register("host-tier", "h", self.instance)
        self.seq, self.held = 0, []
        self.publish(Cleared(**self._envelope()))

    def store(self, hashes: list[SequenceHash], *, lose: bool = False) -> None:
        """Hold more blocks; the event may get lost."""
        self.held += hashes
        run = Run(parent="0" * 32, hashes=[block.hex() for block in hashes])
        event = Stored(**self._envelope(), namespace="0" * 64, runs=[run])
        if not lose:
            self.publish(event)

    def remove(self, hashes: list[SequenceHash]) -> None:
        """Hold fewer."""
        self.held = [block for block in self.held if block not in hashes]
        names = [block.hex() for block in hashes]
        self.publish(Removed(**self._envelope(), namespace="0" * 64, hashes=names))

    def publish(self, event: Event) -> None:
        """Put an event on the stream."""
        payload = msgspec.json.encode(event)
        self.publisher.publish(event_subject(event), payload, epoch=event.epoch, seq=event.seq)

    async def flush(self) -> None:
        """Until the stream has everything."""
        await self.publisher.flush(deadline_s=DEADLINE_S)

    def _envelope(self) -> dict[str, Any]:
        self.seq += 1
        epoch = self.registration.epoch
        return {"host": "h", "source": self.name, "tier": "host", "epoch": epoch,
                "seq": self.seq, "ts_ms": 1}  # fmt: skip

    async def _snapshot(self, _payload: bytes) -> bytes:
        self.snapshots += 1
        run = Run(parent="0" * 32, hashes=[block.hex() for block in self.held])
        return msgspec.json.encode(
            SnapshotReply(
                host="h", source=self.name, tier="host", epoch=self.registration.epoch,
                seq=self.seq, parts=[SnapshotPart(namespace="0" * 64, runs=[run])],
            )
        )  # fmt: skip


async def ask(bus: Bus, verb: str, request: object, *, instance: bool = False) -> bytes:
    """A verb of the index, of any replica or of this one."""
    where = {"host": "h", "instance": "0"} if instance else {}
    payload = request if isinstance(request, bytes) else msgspec.json.encode(request)
    return await bus.request(verb_subject("index", verb, **where), payload, deadline_s=5.0)


async def held_by_index(bus: Bus, source: str = "host-tier-0") -> set[str]:
    """What the index believes that a source holds; empty while it does not answer."""
    try:
        payload = await ask(bus, "dump", {"source": source})
    except KvbmError:
        return set()
    reply = msgspec.json.decode(payload, type=DumpReply)
    return {name for holder in reply.holders for name in holder.hashes}


async def wait_held(bus: Bus, source: Source, *, deadline_s: float = DEADLINE_S) -> None:
    """Until the index believes what is true."""
    truth = {block.hex() for block in source.held}

    async def right() -> bool:
        return await held_by_index(bus, source.name) == truth

    await ask_until(right, deadline_s=deadline_s)


async def wait_ready(bus: Bus) -> None:
    """Until the index serves."""
    await ask_until(
        lambda: ask(bus, "match", {"hashes": []}), deadline_s=DEADLINE_S, despite=KvbmError
    )


@pytest.fixture
async def index(nats_server: NatsServer, bus: Bus) -> AsyncIterator[None]:
    """A running index."""
    async with living(settings_of(nats_server)):
        await wait_ready(bus)
        yield


@pytest.mark.usefixtures("index")
async def test_events_are_answered(bus: Bus) -> None:
    """1. A source stores and removes. 2. Match by hashes and by tokens, dump, holders, stats."""
    async with Source.living(bus) as source:
        source.store(CHAIN[:8])
        source.remove([CHAIN[5]])
        await wait_held(bus, source)
        by_hashes = {"hashes": [block.hex() for block in CHAIN]}
        by_tokens = {"tokens": TOKENS, "namespace": msgspec.to_builtins(NAMESPACE)}
        for verb, request in (("match", by_hashes), ("match_tokens", by_tokens)):
            reply = msgspec.json.decode(await ask(bus, verb, request), type=MatchReply)
            assert reply.asked == 10
            assert [(found.source, found.tier, found.blocks) for found in reply.matches] == [
                ("host-tier-0", "host", 5)
            ]
        batch = await ask(bus, "match_batch", {"questions": [by_hashes, by_tokens]})
        replies = msgspec.json.decode(batch, type=MatchBatchReply).replies
        assert [[found.blocks for found in reply.matches] for reply in replies] == [[5], [5]]
        payload = await ask(bus, "score", by_tokens | {"weights": {"host": 0.5}})
        (place,) = msgspec.json.decode(payload, type=ScoreReply).scores
        assert (place.host, place.source, place.blocks, place.score) == ("h", "", 5, 2.5)
        payload = await ask(bus, "where", {"hashes": [CHAIN[5].hex(), CHAIN[7].hex()]})
        gone, there = msgspec.json.decode(payload, type=WhereReply).blocks
        assert (gone.holders, [one.source for one in there.holders]) == ([], ["host-tier-0"])
        (holder,) = msgspec.json.decode(await ask(bus, "holders", b""), type=HoldersReply).holders
        assert (holder.blocks, holder.epoch, holder.seq) == (7, source.registration.epoch, 3)
        stats = msgspec.json.decode(await ask(bus, "stats", b"", instance=True), type=StatsReply)
        assert stats.ready
        assert stats.positions == {"h.host-tier-0": [source.registration.epoch, 3]}
        assert stats.figures["blocks"] == 7


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("seq", [1, 2**62])
async def test_an_epoch_from_the_future_hides_no_source(bus: Bus, seq: int) -> None:
    """1. A message is forged with a huge epoch. 2. What the source stores later is believed."""
    async with Source.living(bus) as source:
        source.store(CHAIN[:4])
        await wait_held(bus, source)
        run = Run(parent="0" * 32, hashes=["f" * 32])
        forged = Stored(
            host="h", source=source.name, tier="host", epoch=2**62, seq=seq, ts_ms=1,
            namespace="0" * 64, runs=[run],
        )  # fmt: skip
        source.publish(forged)
        await source.flush()
        source.store(CHAIN[4:8])
        await wait_held(bus, source)


@pytest.mark.usefixtures("index")
async def test_a_salted_prompt_is_another(bus: Bus) -> None:
    async with Source.living(bus) as source:
        source.store(Hasher(NAMESPACE).chain(TOKENS, extras=request_extras(salt="s", lora="l")))
        await wait_held(bus, source)
        request = {"tokens": TOKENS, "namespace": msgspec.to_builtins(NAMESPACE)}
        for more, blocks in (({}, 0), ({"salt": "s"}, 0), ({"salt": "s", "lora": "l"}, 10)):
            payload = await ask(bus, "match_tokens", request | more)
            reply = msgspec.json.decode(payload, type=MatchReply)
            assert sum(found.blocks for found in reply.matches) == blocks


@pytest.mark.parametrize(
    ("verb", "request_", "field"),
    [
        ("match", {}, "hashes"),
        ("match", {"hashes": 5}, "hashes"),
        ("match", {"hashes": ["x" * 32]}, "hashes"),
        ("match", {"hashes": ["ab"]}, "hashes"),
        ("match", {"hashes": ["00" * 16] * 65_537}, "hashes"),
        ("match", {"hashes": [], "tokens": []}, "tokens"),
        ("match_batch", {"questions": [{"hashes": ["ab"]}]}, "hashes"),
        ("match_batch", {"questions": [{"hashes": []}] * 257}, "questions"),
        ("score", {"hashes": [], "weights": {"device": -1}}, "weights"),
        ("route", {"hashes": [], "engines": [{"source": "e", "running": -1}]}, "engines"),
        ("route", {"hashes": [], "engines": [{"source": "e"}] * 1_025}, "engines"),
        ("route", {"hashes": [], "peer_weight": 1_001}, "peer_weight"),
        ("where", {"hashes": ["x" * 32]}, "hashes"),
        ("match_tokens", {"tokens": [1, 2]}, "namespace"),
        ("match_tokens", {"tokens": [-1]}, "tokens"),
        ("match_tokens", {"tokens": [1], "namespace": {"model": "m"}}, "block_tokens"),
        (
            "match_tokens",
            {"tokens": [1], "namespace": {"model": "m", "block_tokens": 0}},
            "namespace.block_tokens",
        ),
        ("dump", {"source": "no dots. please"}, "source"),
        ("dump", {"limit": 16_385}, "limit"),
        ("dump", {"limit": 1, "after": "nowhere"}, "after"),
        ("holders", {"source": 7}, "source"),
        ("match", b"no json", ""),
    ],
)
@pytest.mark.usefixtures("index")
async def test_bad_requests_name_the_field(
    bus: Bus, verb: str, request_: object, field: str
) -> None:
    with pytest.raises(RequestFailed) as caught:
        await ask(bus, verb, request_)
    assert caught.value.code == "bad_request"
    assert caught.value.field == field


@pytest.mark.usefixtures("index")
async def test_bad_events_are_counted_and_harm_nothing(bus: Bus) -> None:
    """Garbage, another version, another source's subject: dropped, and all else goes on."""
    async with Source.living(bus) as source:
        event = Stored(host="h", source="host-tier-0", tier="host", epoch=10**17, seq=1, ts_ms=0,
                       namespace="0" * 64, runs=[])  # fmt: skip
        good = msgspec.json.encode(event)
        subject = "kvbm.v1.events.h.host-tier-0.stored"
        for payload in (b"", b"garbage", good.replace(b'"v":1', b'"v":9'), good[:-2]):
            await bus.publish(subject, payload)
        await bus.publish("kvbm.v1.events.h.somebody.stored", good)
        source.store(CHAIN[:3])
        await wait_held(bus, source)
        metrics = await ask(bus, "metrics", b"", instance=True)
        families = {f["name"]: f for f in msgspec.json.decode(metrics)["families"]}
        dropped = families["kvbm_index_messages_dropped_total"]["samples"]
        assert {s["labels"]["reason"]: s["value"] for s in dropped} == {
            "malformed": 3.0, "version": 1.0, "wrong_subject": 1.0,
        }  # fmt: skip


@pytest.mark.usefixtures("index")
async def test_a_lost_event_is_repaired_by_a_snapshot(bus: Bus) -> None:
    async with Source.living(bus) as source:
        source.store(CHAIN[:3])
        await wait_held(bus, source)
        source.store(CHAIN[3:6], lose=True)
        source.store(CHAIN[6:])
        await wait_held(bus, source)
        assert source.snapshots == 1


@pytest.mark.usefixtures("index")
async def test_a_source_is_followed_before_its_snapshot_is_freed(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: an event after the snapshot is known while names of the snapshot are still freed."""
    freed, may_end = list[SnapshotReply](), asyncio.Event()

    async def shed(reply: SnapshotReply) -> None:
        freed.append(reply)
        await may_end.wait()

    monkeypatch.setattr(service, "shed", shed)
    async with Source.living(bus) as source:
        source.store(CHAIN[:3])
        await wait_held(bus, source)
        source.store(CHAIN[3:6], lose=True)
        source.store(CHAIN[6:8])
        await wait_until(lambda: freed)
        source.store(CHAIN[8:])
        try:
            await wait_held(bus, source)
        finally:
            may_end.set()
        assert source.snapshots == 1


async def test_history_beyond_the_stream_comes_from_a_snapshot(
    nats_server: NatsServer, bus: Bus
) -> None:
    """Goal: an index that starts when the stream has forgotten everything is right all the same."""
    async with Source.living(bus) as source:
        source.store(CHAIN)
        await source.publisher.flush(deadline_s=5.0)
        await call_api(bus, f"STREAM.PURGE.{EVENTS.name}")
        async with living(settings_of(nats_server)):
            await wait_held(bus, source)
            assert source.snapshots == 1


@pytest.mark.usefixtures("index")
async def test_a_large_dump_comes_in_pages_and_never_at_once(bus: Bus) -> None:
    """70,000 blocks: everything at once is refused before it is made, and names the way out."""
    numbers = random.Random(1)
    async with Source.living(bus) as source:
        for _ in range(7):
            source.store([SequenceHash(numbers.randbytes(16)) for _ in range(10_000)])
        await source.flush()
        truth = sorted(block.hex() for block in source.held)

        async def told() -> bool:
            holders = await ask_dump(partial(bus.request, "kvbm.v1.index.dump", deadline_s=5.0))
            return [holder.hashes for holder in holders] == [truth]

        await ask_until(told, deadline_s=DEADLINE_S, despite=KvbmError)
        with pytest.raises(RequestFailed, match=r"70000 blocks.*`limit`") as refused:
            await ask(bus, "dump", {"source": source.name})
        assert refused.value.code == "reply_too_large"


@pytest.mark.slow
@pytest.mark.usefixtures("index")
async def test_a_dead_source_leaves_and_a_new_life_begins(bus: Bus) -> None:
    """1. Its heartbeats end: it is gone within its TTL. 2. It lives again, and holds less."""
    async with Source.living(bus) as source:
        source.store(CHAIN)
        await wait_held(bus, source)
    source.held = []
    await wait_held(bus, source, deadline_s=TTL_S * 3)
    another = Source(bus)
    await another.begin()
    publishing = asyncio.create_task(another.publisher.run())
    another.store(CHAIN[:2])
    await wait_held(bus, another)
    publishing.cancel()
    await another.registry.close()


@pytest.mark.slow
async def test_the_index_and_nats_are_killed_and_all_converges(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """1. kill -9 of the index, more events, a new index. 2. kill -9 of NATS, more events, NATS."""
    environ = os.environ | settings_of(nats_server).as_environ()
    process = ServiceProcess("index", environ=environ, restart=True, log_path=tmp_path / "log")
    process.start()
    await process.wait_ready(deadline_s=DEADLINE_S)
    async with Source.living(bus) as source:
        source.store(CHAIN[:4])
        await wait_held(bus, source)
        before = process.pid
        os.kill(before, 9)
        source.store(CHAIN[4:6])
        await wait_until(lambda: process.pid not in (0, before))
        await wait_held(bus, source)
        nats_server.kill()
        source.store(CHAIN[6:])
        await nats_server.start()
        await wait_held(bus, source)
    await process.end(signal.SIGTERM, deadline_s=4.0)
