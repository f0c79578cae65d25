"""Partitions on real NATS servers: one, two and three give the same answers, and say what lacks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kvbm_cli.service_process import ServiceProcess
from kvbm_cli.stack import Stack
from kvbm_common.access.nats_access import nats_access
from kvbm_common.access.roles import ADMIN
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, DeadlineExceeded, KvbmError, RequestFailed
from kvbm_common.identity import Hasher, Namespace
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.dumps import ask_dump
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.event_publisher import EventPublisher
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.streams import EVENTS, Partitions
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.registry.records import ENGINE
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.service.process import serve
from kvbm_common.wire.epochs import epoch_max
from kvbm_common.wire.events import Cleared, Event, Removed, Run, Stored
from kvbm_common.wire.index_verbs import MatchReply
from kvbm_common.wire.verbs import verb_subject
from kvbm_host_tier.core.peers import QUESTION_MS
from kvbm_index.shell.partitions import (
    ANSWER_DEADLINE_S,
    SILENT_DEADLINE_S,
    PartitionVerbs,
    check_partition,
)
from kvbm_index.shell.service import serve_index

from tests.waiting import ask_until

DEADLINE_S = 20.0
HOSTS = tuple(f"gpu-{number}" for number in range(7))
NAMESPACE = Namespace(model="m", block_tokens=4)
CHAINS = [Hasher(NAMESPACE).chain([prompt] * 4 + list(range(60))) for prompt in range(3)]
QUESTIONS: Sequence[tuple[str, dict[str, Any]]] = [
    *(("match", {"hashes": [block.hex() for block in chain]}) for chain in CHAINS),
    *(("score", {"hashes": [block.hex() for block in chain]}) for chain in CHAINS),
    *(("route", {"hashes": [block.hex() for block in chain]}) for chain in CHAINS),
    ("route", {"hashes": [CHAINS[0][0].hex()], "peer_weight": 0}),
    ("route", {"hashes": [], "engines": [{"source": "engine-0"}, {"source": "nobody"}]}),
    ("route", {"hashes": [CHAINS[1][0].hex()], "engines": [
        {"source": "engine-0", "host": host, "waiting": number}
        for number, host in enumerate((*HOSTS, "nowhere"))]}),
    ("where", {"hashes": [block.hex() for chain in CHAINS for block in chain[:6]]}),
    ("match_batch", {"questions": [{"hashes": [block.hex() for block in chain]}
                                   for chain in CHAINS]}),
    ("holders", {}),
    ("dump", {}),
    ("dump", {"source": "engine-0"}),
]  # fmt: skip


def settings_of(server: NatsServer, count: int, own: int | None = None, **more: object) -> Settings:
    """The settings of a fleet, or of the index of one partition."""
    given = {"nats_url": server.url, "host": "ctl", "registry_ttl_s": 5.0, "index_image_s": 0.1}
    if count > 1:
        given |= {"index_partitions": count}
    if own is not None and count > 1:
        given |= {"index_partition": own, "instance": str(own)}
    return Settings.load({}, given | more)


class Fleet:
    """A NATS, the sources of some hosts, and the index of so many partitions."""

    def __init__(self, bus: Bus, registry: NatsRegistry, partitions: Partitions) -> None:
        self.bus, self.partitions = bus, partitions
        self.registry = registry
        self.publishers: dict[str, EventPublisher] = {}
        self._epochs: dict[tuple[str, str], int] = {}
        self._seqs: dict[tuple[str, str], int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    @asynccontextmanager
    async def of(cls, server: NatsServer, count: int) -> AsyncIterator[Fleet]:
        """A fleet without an index."""
        bus = await Bus.connect(nats_access(settings_of(server, count), ADMIN), "fleet")
        fleet = cls(bus, NatsRegistry(bus, ttl_s=5.0), Partitions(count))
        try:
            yield fleet
        finally:
            for task in fleet._tasks:
                task.cancel()
            await fleet.registry.close()
            await bus.close()

    async def join(self, hosts: Sequence[str] = HOSTS) -> None:
        """Register an engine and a host tier on each host; both begin a life."""
        for host in hosts:
            publisher = self.bus.event_publisher(host, spec=self.partitions.events_of(host))
            self.publishers[host] = publisher
            self._tasks.append(asyncio.create_task(publisher.run()))
            for kind, instance, source in (
                (ENGINE, "engine-0", "engine-0"), ("host-tier", "0", "host-tier-0"),
            ):  # fmt: skip
                life = await self.registry.register(kind, host, instance)
                self._epochs[host, source] = life.epoch
                self._seqs[host, source] = 0
                self.say(host, source, Cleared)

    def say(
        self, host: str, source: str, kind: type[Event], *, epoch: int = 0, **what: Any
    ) -> None:
        """Publish an event of a source; `epoch` 0: of its present life."""
        self._seqs[host, source] += 1
        event = kind(
            host=host, source=source, tier="device" if source == "engine-0" else "host",
            epoch=epoch or self._epochs[host, source], seq=self._seqs[host, source], ts_ms=1,
            **what,
        )  # fmt: skip
        self.publishers[host].publish_event(event)

    def play(self, seed: int, steps: int) -> None:
        """Have the sources store, remove and clear by a random program."""
        rng = random.Random(seed)
        for _ in range(steps):
            host, source = rng.choice(HOSTS), rng.choice(("engine-0", "host-tier-0"))
            chain = rng.choice(CHAINS)
            start, size = rng.randrange(len(chain) // 2), rng.randint(1, len(chain))
            names = [block.hex() for block in chain[start : start + size]]
            parent = (chain[start - 1] if start else NAMESPACE.root).hex()
            namespace = NAMESPACE.digest.hex()
            match rng.choices(("store", "remove", "clear"), (8, 3, 0.3))[0]:
                case "store":
                    run = Run(parent=parent, hashes=names)
                    self.say(host, source, Stored, namespace=namespace, runs=[run])
                case "remove":
                    self.say(host, source, Removed, namespace=namespace, hashes=names[:3])
                case _:
                    self.say(host, source, Cleared)

    async def flush(self) -> None:
        """Until the streams have everything, and each index has read it."""
        for publisher in self.publishers.values():
            await publisher.flush(deadline_s=DEADLINE_S)
        wanted = {f"{host}/{source}": seq for (host, source), seq in self._seqs.items()}

        async def read() -> bool:
            holders = (await self.ask("holders", {}))["holders"]
            told = {f"{one['host']}/{one['source']}": one["seq"] for one in holders}
            return bool(told) and all(wanted[name] == seq for name, seq in told.items())

        await ask_until(read, deadline_s=DEADLINE_S, despite=KvbmError)

    async def ask(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        """Ask any replica."""
        payload = msgspec.json.encode(request)
        reply = await self.bus.request(verb_subject("index", verb), payload, deadline_s=5.0)
        answer: dict[str, Any] = msgspec.json.decode(reply)
        return answer

    async def ask_all(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        """Ask until an answer misses no partition: on a busy machine one may be late."""

        async def answer() -> dict[str, Any]:
            reply = await self.ask(verb, request)
            return {} if "missing" in reply else reply

        return await ask_until(answer, deadline_s=DEADLINE_S)

    async def ask_until_whole(self) -> dict[str, Any]:
        """Return the first answer about all holders that misses no partition."""
        replies = list[dict[str, Any]]()

        async def whole() -> bool:
            replies.append(await self.ask("holders", {}))
            return "missing" not in replies[-1]

        await ask_until(whole, deadline_s=DEADLINE_S, despite=KvbmError)
        return replies[-1]

    async def wait_whole(self) -> None:
        """Until an answer misses no partition."""
        await self.ask_until_whole()


@asynccontextmanager
async def index(server: NatsServer, count: int) -> AsyncIterator[None]:
    """An index in this event loop: a replica for each partition."""
    stopping = asyncio.Event()
    lives = [
        asyncio.create_task(serve("index", serve_index, settings_of(server, count, one), stopping))
        for one in range(count)
    ]
    try:
        yield
    finally:
        stopping.set()
        assert await asyncio.gather(*lives) == [0] * count


class Replica(ServiceProcess):
    """An index process of a partition."""

    def __init__(self, server: NatsServer, count: int, own: int, name: str, logs: Path) -> None:
        settings = settings_of(server, count, own, instance=name)
        environ = os.environ | settings.as_environ()
        super().__init__("index", environ=environ, restart=False, log_path=logs / f"{name}.log")

    async def begin(self) -> None:
        """Until it serves."""
        self.start()
        await self.wait_ready(deadline_s=DEADLINE_S)


def comparable(verb: str, reply: dict[str, Any]) -> dict[str, Any]:
    """A reply without the orders that no one promises, and without epochs."""
    assert "missing" not in reply, reply
    if verb == "where":
        for block in reply["blocks"]:
            block["holders"].sort(key=str)
    if verb == "route":
        reply["left_out"].sort(key=str)
    for holder in reply.get("holders", ()):
        holder.pop("epoch")
    return reply


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", [1, 2])
async def test_partitions_answer_as_one(tmp_path: Path, count: int, seed: int) -> None:
    """Goal: each verb of several partitions answers what one index of everything answers.

    1. The same random program on two servers, of one partition and of several.
    2. Every question, and pages of a dump: equal.
    """
    assert {Partitions(count).of(host) for host in HOSTS} == set(range(count))
    async with AsyncExitStack() as stack:
        fleets = []
        for number in (1, count):
            server = await stack.enter_async_context(NatsServer(tmp_path / f"nats-{number}"))
            fleet = await stack.enter_async_context(Fleet.of(server, number))
            await stack.enter_async_context(index(server, number))
            await fleet.join()
            fleet.play(seed, 400)
            await fleet.flush()
            await fleet.wait_whole()
            fleets.append(fleet)
        one, several = fleets
        found = 0
        for verb, request in QUESTIONS:
            expected = comparable(verb, await one.ask(verb, request))
            reply = await several.ask_all(verb, request)
            assert comparable(verb, reply) == expected, (verb, request)
            found += len(expected.get("matches", ())) + sum(
                "peer" in engine["found"] for engine in expected.get("engines", ())
            )
        assert found > 3, "the program has made no matches or peers"
        dumps = []
        for fleet in fleets:

            async def ask(payload: bytes, deadline_s: float = 5.0, fleet: Fleet = fleet) -> bytes:
                subject = verb_subject("index", "dump")
                return await fleet.bus.request(subject, payload, deadline_s=deadline_s)

            asked: dict[str, Any] = {"limit": 7}
            held: dict[tuple[str, str], list[str]] = {}
            while True:
                page = msgspec.json.decode(await ask(msgspec.json.encode(asked)))
                for holder in page["holders"]:
                    held.setdefault((holder["host"], holder["source"]), []).extend(holder["hashes"])
                if not page["next"]:
                    break
                asked["after"] = page["next"]
            dumps.append(held)
            assert len(await ask_dump(ask)) == len(held)
        assert dumps[0] == dumps[1]
        assert sum(len(names) for names in dumps[0].values()) > 50


async def test_one_partition_has_the_names_of_before(nats_server: NatsServer) -> None:
    """A fleet of one partition makes no other stream, bucket or subject than before."""
    async with Fleet.of(nats_server, 1) as fleet, index(nats_server, 1):
        await fleet.join(HOSTS[:1])
        fleet.play(3, 0)
        fleet.say(HOSTS[0], "engine-0", Stored, namespace=NAMESPACE.digest.hex(),
                  runs=[Run(parent=NAMESPACE.root.hex(), hashes=[CHAINS[0][0].hex()])])  # fmt: skip
        await fleet.flush()
        names = msgspec.json.decode(await call_api(fleet.bus, "STREAM.NAMES"))["streams"]
        assert {*names} <= {"KVBM_EVENTS", "KV_kvbm-registry", "KVBM_AUDIT", "OBJ_KVBM_INDEX"}
        described = msgspec.json.decode(await call_api(fleet.bus, f"STREAM.INFO.{EVENTS.name}"))
        assert "subject_transform" not in described["config"]
        with pytest.raises(KvbmError):
            await fleet.bus.request("kvbm.v1.index-partition.1.0.match", b"", deadline_s=1.0)


async def test_hosts_have_the_partition_that_the_server_gives_them(nats_server: NatsServer) -> None:
    """`Partitions.of` is nats-server's own function: a mapping there and a source here agree."""
    async with Fleet.of(nats_server, 1) as fleet:
        names = [f"gpu-{n}" for n in range(40)] + ["a", "Host_9", "x" * 64, "0"]
        for count in (2, 3, 64):
            transform = {
                "src": f"of{count}.*",
                "dest": f"to{count}.{{{{partition({count},1)}}}}.$1",
            }
            config = {"name": f"OF{count}", "subjects": [f"of{count}.*"],
                      "subject_transform": transform}  # fmt: skip
            await call_api(fleet.bus, f"STREAM.CREATE.OF{count}", config)
            for host in names:
                await fleet.bus.request_raw(f"of{count}.{host}", b"", deadline_s=5.0)
                wanted = {"last_by_subj": f"to{count}.{Partitions(count).of(host)}.{host}"}
                await call_api(fleet.bus, f"STREAM.MSG.GET.OF{count}", wanted)  # Or it raises.


@pytest.mark.slow
async def test_killed_partition_is_named_and_returns(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """Goal: an answer that lacks a partition says so, and one replica of two is enough.

    1. Two partitions, the second with two replicas. One of these dies: nothing is missing.
    2. The other one dies: each verb answers, and names it. A page of a dump does, too.
    3. One begins again, from its image: everything is there.
    """
    async with Fleet.of(nats_server, 2) as fleet, AsyncExitStack() as stack:
        replicas = [Replica(nats_server, 2, own, name, tmp_path)
                    for own, name in ((0, "a"), (1, "b"), (1, "c"))]  # fmt: skip
        for replica in replicas:
            stack.push_async_callback(replica.end, signal.SIGKILL, deadline_s=5)
            await replica.begin()
        await fleet.join()
        fleet.play(5, 300)
        await fleet.flush()
        await fleet.wait_whole()
        expected = await fleet.ask("dump", {})
        await replicas[1].end(signal.SIGKILL, deadline_s=5)
        await fleet.wait_whole()
        for _ in range(20):
            assert await fleet.ask("dump", {}) == expected
        await replicas[2].end(signal.SIGKILL, deadline_s=5)
        for verb, request in QUESTIONS:
            reply = await fleet.ask(verb, request)
            if verb == "dump":
                hosts = {holder["host"] for holder in reply["holders"]}
                assert hosts <= {host for host in HOSTS if fleet.partitions.of(host) == 0}
            assert reply["missing"] == [1], (verb, reply)
        page = await fleet.ask("dump", {"limit": 5, "after": "1:"})
        assert (page["holders"], page["missing"]) == ([], [1])
        with pytest.raises(RequestFailed, match="`next`"):
            await fleet.ask("dump", {"limit": 5, "after": "2:"})
        with pytest.raises(RequestFailed, match="hashes"):
            await fleet.ask("match", {})
        await replicas[2].begin()
        await fleet.wait_whole()
        assert await fleet.ask("dump", {}) == expected


class SlowPartition:
    """A bus with one other partition, which answers when the test lets it."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.answers = asyncio.Event()

    async def request(self, _subject: str, _payload: bytes, *, deadline_s: float) -> bytes:
        """Answer, or raise DeadlineExceeded."""
        self.waits.append(deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                await self.answers.wait()
        except TimeoutError as error:
            raise DeadlineExceeded("no answer") from error
        return await self.own(b"")

    async def own(self, _payload: bytes) -> bytes:
        """Answer for the own partition."""
        return msgspec.json.encode(MatchReply(asked=1, matches=[]))

    def verbs(self) -> dict[str, Any]:
        """Return verbs that have found the partition silent; some have an answer of a dump."""
        bus: Any = SimpleNamespace(request=self.request)
        local = {"match": self.own, "holders": self.own}
        return PartitionVerbs(bus, Partitions(2), 0, local, Metrics(), lambda: b"").verbs


async def missing_in(verbs: dict[str, Any]) -> object:
    """Return the partitions that a lookup's answer lacks."""
    reply = msgspec.json.decode(await verbs["match"](b""), type=MatchReply)
    return reply.missing


async def test_a_partition_that_hangs_soon_delays_no_answer_of_the_others() -> None:
    """It is waited for once. A host tier waits for a quarter of a second, lookup by lookup."""
    slow = SlowPartition()
    verbs = slow.verbs()
    full, short = ANSWER_DEADLINE_S, SILENT_DEADLINE_S
    assert await missing_in(verbs) == [1]
    assert slow.waits == [full]
    began_s = time.monotonic()
    assert [await missing_in(verbs) for _ in range(3)] == [[1]] * 3
    assert time.monotonic() - began_s < full, "all three together"
    assert slow.waits == [full, full, short, short], "one question is not given up"
    assert short < QUESTION_MS / 2_000


async def test_a_partition_whose_answers_take_long_is_silent_until_the_first_of_them() -> None:
    """The answer comes too late for the lookup, and the next one waits as long as the others."""
    slow = SlowPartition()
    verbs = slow.verbs()
    assert await missing_in(verbs) == [1]
    assert await missing_in(verbs) == [1]
    slow.answers.set()
    await asyncio.sleep(0)
    slow.answers.clear()
    looking = asyncio.create_task(missing_in(verbs))
    _, still = await asyncio.wait((looking,), timeout=2 * SILENT_DEADLINE_S)
    assert still, "it waits beyond the short deadline"
    slow.answers.set()
    assert await looking is msgspec.UNSET


async def test_an_event_of_a_future_epoch_is_counted(nats_server: NatsServer) -> None:
    """Goal: an index of several partitions counts what it drops, as one of one partition does."""
    async with Fleet.of(nats_server, 2) as fleet, index(nats_server, 2):
        host = HOSTS[0]
        await fleet.join([host])
        fleet.say(host, "engine-0", Cleared, epoch=2 * epoch_max(time.time()))
        await fleet.publishers[host].flush(deadline_s=DEADLINE_S)
        own = str(fleet.partitions.of(host))
        subject = verb_subject("index", "metrics", host="ctl", instance=own)

        async def is_counted() -> bool:
            reply = await fleet.bus.request(subject, b"", deadline_s=5.0)
            counts = {
                sample["labels"]["reason"]: sample["value"]
                for family in msgspec.json.decode(reply)["families"]
                if family["name"] == "kvbm_index_messages_dropped_total"
                for sample in family["samples"]
            }
            return counts == {"future_epoch": 1.0}

        await ask_until(is_counted, deadline_s=DEADLINE_S, despite=KvbmError)


async def test_only_lookups_are_in_a_hurry() -> None:
    """A dump takes longer than the short deadline, and would lack a partition."""
    slow = SlowPartition()
    verbs = slow.verbs()
    assert await missing_in(verbs) == [1]
    asking = asyncio.create_task(verbs["holders"](b""))
    _, still = await asyncio.wait((asking,), timeout=2 * SILENT_DEADLINE_S)
    assert still
    slow.answers.set()
    await asyncio.gather(asking, return_exceptions=True)
    assert slow.waits == [ANSWER_DEADLINE_S] * 2


async def test_another_number_begins_empty_and_fills(nats_server: NatsServer) -> None:
    """Goal: from two partitions to three: sources that begin again are all found, none twice.

    The streams of two stay as they are, and no answer mixes both.
    """
    for count in (2, 3, 1):
        async with Fleet.of(nats_server, count) as fleet, index(nats_server, count):
            await fleet.join()
            assert (await fleet.ask_until_whole())["holders"] == []
            fleet.play(count, 200)
            await fleet.flush()
            reply = await fleet.ask_until_whole()
            places = [(one["host"], one["source"]) for one in reply["holders"]]
            assert len(places) == len(set(places)) > len(HOSTS)


@pytest.mark.parametrize(
    ("given", "variable"),
    [
        ({"index_partitions": 3}, "KVBM_INDEX_PARTITION"),
        ({"index_partitions": 3, "index_partition": 3}, "0 to 2, since KVBM_INDEX_PARTITIONS is 3"),
        ({"index_partition": 1}, "0 to 0, since KVBM_INDEX_PARTITIONS is 1"),
        ({"index_partitions": 0}, "KVBM_INDEX_PARTITIONS"),
        ({"index_partitions": 65}, "KVBM_INDEX_PARTITIONS"),
        ({"index_partitions": "x"}, "KVBM_INDEX_PARTITIONS"),
        ({"index_partition": -1}, "KVBM_INDEX_PARTITION"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, object], variable: str) -> None:
    """The error names the variable, and what it accepts."""
    with pytest.raises(ConfigError, match=variable):
        check_partition(Settings.load({}, given))


@pytest.mark.slow
async def test_guarded_stack_of_two_partitions_serves(tmp_path: Path) -> None:
    """`kvbm up` with two partitions: an index for each, with credentials."""
    services = ("consolidator", "index", "host-tier")
    async with Stack.private(
        {"index_partitions": 2, "cpu_cache_gb": 0.01}, services=services
    ) as up:
        assert {"index", "index-1"} <= set(up.pids)
        bus = await Bus.connect(up.admin, "test")
        try:
            subject = verb_subject("index", "holders")
            answers = [await bus.request(subject, b"", deadline_s=5.0) for _ in range(20)]
            assert not any(b"missing" in answer for answer in answers), answers
            names = msgspec.json.decode(await call_api(bus, "STREAM.NAMES"))["streams"]
            assert {"KVBM_EVENTS_2_0", "KVBM_EVENTS_2_1", "OBJ_KVBM_INDEX_2_1"} <= {*names}
            assert EVENTS.name not in names
            own = up.settings.host
            last = {"last_by_subj": f"kvbm.v1.events.{own}.host-tier-0.cleared"}
            stream = Partitions(2).events_of(own).name
            await call_api(bus, f"STREAM.MSG.GET.{stream}", last)
        finally:
            await bus.close()
        assert up.log_dir is not None
        said = "".join(path.read_text() for path in up.log_dir.glob("*.log"))
        assert "index" in said
        assert "does not let" not in said
        assert "refused" not in said
