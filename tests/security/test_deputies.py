"""JetStream and services as deputies: what they can be made to send for a role that may not.

nats-server does not ask whether a client may publish on the subject that it names for an answer,
nor on the one that it names for a consumer's messages. So any role that may call the JetStream API
can have a message of its own delivered to any subject. The tests show that the server does so, and
that neither services nor readers of streams take it for more than noise.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from kvbm_common.access.roles import ADMIN, CONSUMER
from kvbm_common.errors import DeadlineExceeded, KvbmError, NoResponder
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.jetstream import (
    JetStreamError,
    call_api,
    ensure_stream,
    publish_acknowledged,
)
from kvbm_common.nats.marked_messages import UNMARKED
from kvbm_common.nats.object_store import ObjectBroken, ObjectStore
from kvbm_common.nats.streams import (
    EVENTS,
    IMAGES,
    IMAGES_BUCKET,
    MARK,
    REGISTRY,
    REGISTRY_BUCKET,
    StreamSpec,
)
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.registry.records import Joined, RegistryEvent, ServiceRecord
from kvbm_common.wire.verbs import offers_subject, verb_subject

from tests.security.guarded_nats import GuardedNats
from tests.waiting import ask_until, wait_until

OWN_KEY = f"$KV.{REGISTRY_BUCKET}.services.disk-tier.a.0"
VICTIM = "kvbm.v1.events.b.host-tier-0.stored"
HEARTBEATS_S = 5.0


@pytest.fixture
async def attacker(guarded: GuardedNats) -> AsyncIterator[Bus]:
    """The disk tier of host `a`, which has fallen into other hands."""
    async with guarded.bus("disk-tier") as bus:
        yield bus


async def sends(
    attacker: Bus, payload: bytes, subject: str, headers: dict[str, str] | None = None
) -> None:
    """Have JetStream send any payload to any subject, for a role that may not publish there.

    The payload is stored under the role's own key of the registry, and the key is asked for with
    the subject in the place of an inbox.
    """
    await attacker.request_raw(OWN_KEY, payload, deadline_s=2, headers=headers)
    await attacker.publish_raw(f"$JS.API.DIRECT.GET.{REGISTRY.name}.{OWN_KEY}", b"", reply=subject)


async def stored(reader: Bus, spec: StreamSpec, last: int) -> None:
    """Wait until a stream has so many messages; a server that reloads answers nothing at first."""

    async def are_there() -> bool:
        try:
            return (await ensure_stream(reader, spec)).state.last_seq >= last
        except NoResponder:
            return False

    await ask_until(are_there, deadline_s=5)


async def test_a_verb_takes_no_message_of_a_deputy(guarded: GuardedNats, attacker: Bus) -> None:
    """Goal: nobody drains, evicts or fills with the rights of JetStream.

    1. A stored message, 2. an answer of the API, 3. an acknowledgement, and 4. a consumer's message
    come to the subject of a verb. 5. Each is counted and none is served; a real request is.
    """
    served: list[bytes] = []

    async def evict(payload: bytes) -> bytes:
        served.append(payload)
        return b"{}"

    target = verb_subject("host-tier", "evict", host="b", instance="0")
    async with guarded.bus("host-tier", host="b") as victim, guarded.bus("metrics") as operator:
        await victim.add_verbs("host-tier", "0", "b", {"evict": evict})
        await sends(attacker, b'{"everything":true}', target)
        await attacker.publish_raw(f"$JS.API.STREAM.INFO.{EVENTS.name}", b"", reply=target)
        await attacker.publish_raw(OWN_KEY, b"{}", reply=target)
        await push(attacker, target, group="0")
        await wait_until(lambda: refused(victim) >= 4)
        assert served == []
        await operator.request(target, b"1", deadline_s=2)
        assert served == [b"1"]


def refused(bus: Bus) -> float:
    """Return how many requests were not served, because their answers would not go to an inbox."""
    return bus.counters.value("kvbm_bus_handler_errors_total", code="no_inbox")


def dropped(bus: Bus) -> float:
    """Return how many offers were dropped, because no client sends such."""
    labels = {"reason": "unexpected", "subject": offers_subject("b")}
    return bus.counters.value("kvbm_bus_dropped_total", **labels)


async def push(attacker: Bus, target: str, *, group: str = "") -> None:
    """Have a consumer of an own stream deliver to a subject, or to a group that hears it."""
    part = f"$KV.{REGISTRY_BUCKET}.services.>"
    config = {
        "name": "push", "deliver_subject": target, "filter_subject": part, "ack_policy": "none",
        "deliver_policy": "last", "deliver_group": group, "mem_storage": True, "num_replicas": 1,
    }  # fmt: skip
    request = {"stream_name": REGISTRY.name, "config": config}
    await call_api(attacker, f"CONSUMER.CREATE.{REGISTRY.name}.push.{part}", request)


async def test_an_offer_of_a_deputy_is_dropped(guarded: GuardedNats, attacker: Bus) -> None:
    """Plain subscriptions take no message with headers or a reply; ours have neither."""
    taken: list[bytes] = []
    async with guarded.bus("host-tier", host="b") as victim:
        await victim.subscribe(offers_subject("b"), lambda _, payload: taken.append(payload))
        await sends(attacker, b"forged", offers_subject("b"))
        await push(attacker, offers_subject("b"))
        await wait_until(lambda: dropped(victim) >= 2)
        async with guarded.bus("consolidator", host="b") as engine_side:
            await engine_side.publish(offers_subject("b"), b"real")
            await wait_until(lambda: taken == [b"real"])


async def first_events(reader: Bus, count: int) -> list[EventMessage]:
    """Return so many events from the stream's beginning."""
    found: list[EventMessage] = []
    async with asyncio.timeout(5), reader.event_subscription() as batches:
        async for batch in batches:
            found += batch
            if len(found) >= count:
                break
    return found


@pytest.mark.parametrize(
    "headers",
    [None, {f"X-{MARK}": EVENTS.name}, {"X": f"1\t{MARK}: {EVENTS.name}"}],
    ids=["none", "another name", "in a value"],
)
async def test_a_forged_event_is_ignored(
    guarded: GuardedNats, attacker: Bus, headers: dict[str, str] | None
) -> None:
    """1. JetStream stores it on the subject of another host's tier. 2. A reader sees that no client
    has published it, keeps its place, and takes nothing of it. 3. A real event is read."""
    async with guarded.bus("index") as reader, guarded.bus("host-tier", host="b") as victim:
        await sends(attacker, b"forged", VICTIM, headers)
        await stored(reader, EVENTS, 1)
        await publish_acknowledged(victim, EVENTS, VICTIM, b"real")
        found = await first_events(reader, 2)
        assert [(one.payload, one.sequence) for one in found] == [(UNMARKED, 1), (b"real", 2)]


@pytest.mark.parametrize("value", [EVENTS.name, f"{REGISTRY.name}\r\n{MARK}: {EVENTS.name}"])
async def test_a_mark_cannot_be_brought_along(
    guarded: GuardedNats, attacker: Bus, value: str
) -> None:
    """The server stores a message with another stream's mark nowhere else.

    What JetStream sends then is that there is no such message: stored, unmarked and ignored.
    """
    await sends(attacker, b"forged", VICTIM, {MARK: value})
    async with guarded.bus("index") as reader:
        await stored(reader, EVENTS, 1)
        [found] = await first_events(reader, 1)
        assert found.payload == UNMARKED


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (f"NATS/1.0\r\n{MARK}: {EVENTS.name}\r\n\r\n", True),
        (f"NATS/1.0\r\nA: b\r\n{MARK}: {EVENTS.name}\r\n\r\n", True),
        (f"NATS/1.0\r\n{MARK}: \r\n{MARK}: {EVENTS.name}\r\n\r\n", False),
        (f"NATS/1.0\r\n{MARK}: {REGISTRY.name}\r\n{MARK}: {EVENTS.name}\r\n\r\n", False),
        (f"NATS/1.0\r\n{MARK}: {EVENTS.name}X\r\n\r\n", False),
        (f"NATS/1.0\r\nX-{MARK}: {EVENTS.name}\r\n\r\n", False),
        (f"NATS/1.0 {MARK}: {EVENTS.name}\r\n\r\n", False),
        (f"NATS/1.0\r\nA: \n{MARK}: {EVENTS.name}\r\n\r\n", False),
        ("", False),
    ],
)
def test_the_first_mark_counts(block: str, expected: bool) -> None:
    """The server lets an empty mark pass, so a second one after it must not do."""
    assert EVENTS.is_marked(block.encode()) is expected


async def test_an_empty_mark_before_a_good_one_does_not_do(guarded: GuardedNats) -> None:
    """The same on the wire, with a raw client: the header twice, the first one empty."""
    async with guarded.bus(ADMIN) as admin, guarded.bus("index") as reader:
        block = f"NATS/1.0\r\n{MARK}: \r\n{MARK}: {EVENTS.name}\r\n\r\n"
        await admin.subscribe_raw("unused", lambda _: None)
        await raw_publish(guarded, OWN_KEY, block, b"forged")
        await stored(admin, REGISTRY, 1)
        subject = f"$JS.API.DIRECT.GET.{REGISTRY.name}.{OWN_KEY}"
        await admin.publish_raw(subject, b"", reply=VICTIM)
        await stored(reader, EVENTS, 1)
        [found] = await first_events(reader, 1)
        assert found.payload == UNMARKED


async def raw_publish(guarded: GuardedNats, subject: str, block: str, payload: bytes) -> None:
    """Publish with headers as they are, which no library would write."""
    guarded.server.more["accounts"]["kvbm"]["users"].append({"user": "raw", "password": "raw"})
    guarded.server.reload()
    whole = block.encode() + payload
    sizes = f"{len(block)} {len(whole)}"
    told = f"HPUB {subject} {sizes}\r\n".encode() + whole + b"\r\n"
    await ask_until(lambda: spoken(guarded.server.port, told))


async def spoken(port: int, told: bytes) -> bool:
    """Say something as the user `raw`; False while the server does not know it yet."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(5):
            await reader.readline()
            writer.write(b'CONNECT {"user":"raw","pass":"raw","headers":true,"verbose":true}\r\n')
            if await reader.readline() != b"+OK\r\n":
                return False
            writer.write(told)
            return await reader.readline() == b"+OK\r\n"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_a_forged_entry_of_the_registry_ends_no_service(
    guarded: GuardedNats, attacker: Bus
) -> None:
    """Goal: no service yields to a later life that it never had, and no peer is made up.

    1. A host tier of `b` is registered, and watched. 2. A record with a later epoch is stored under
    its key, and one of a host tier that is not there. 3. Watchers see neither; the service beats
    on.
    """
    key = f"$KV.{REGISTRY_BUCKET}.services.host-tier.b"
    async with guarded.bus("host-tier", host="b") as victim, guarded.bus("index") as reader:
        registry, watching = (NatsRegistry(bus, ttl_s=HEARTBEATS_S) for bus in (victim, reader))
        entry = await registry.register("host-tier", "b", "0")
        seen: list[RegistryEvent] = []
        watching.watch(seen.append)
        await wait_until(lambda: len(seen) == 1)
        before = (await ensure_stream(reader, REGISTRY)).state.last_seq
        later = forged("b", "0", epoch=entry.epoch + 1_000)
        await sends(attacker, later, f"{key}.0")
        await sends(attacker, forged("b", "7", epoch=1), f"{key}.7")
        await stored(reader, REGISTRY, before + 4)
        await entry.update({"still": "here"})
        await wait_until(lambda: any(one.record.info for one in seen))
        assert not entry.lost.is_set()
        assert {one.record.key for one in seen} == {"host-tier.b.0"}
        assert {one.record.epoch for one in seen} == {entry.epoch}
        await watching.close()
        await registry.close()


def forged(host: str, instance: str, *, epoch: int) -> bytes:
    """Return the record of a host tier, in words that its readers know."""
    record = ServiceRecord(
        kind="host-tier", host=host, instance=instance, epoch=epoch, pid=1, started_ms=0, ttl_s=5.0
    )
    return msgspec.json.encode(record)


async def test_an_own_entry_names_no_other_service(guarded: GuardedNats, attacker: Bus) -> None:
    """A role writes what it likes under its own key; a record of another service is no record."""
    async with guarded.bus("index") as reader:
        watching = NatsRegistry(reader, ttl_s=5.0)
        seen: list[RegistryEvent] = []
        watching.watch(seen.append)
        await publish_acknowledged(attacker, REGISTRY, OWN_KEY, forged("b", "0", epoch=9))
        own = NatsRegistry(attacker, ttl_s=5.0)
        await own.register("disk-tier", "a", "1")
        await wait_until(lambda: seen != [])
        assert [one.record.key for one in seen if isinstance(one, Joined)] == ["disk-tier.a.1"]
        await own.close()
        await watching.close()


async def test_no_role_wipes_the_registry_with_its_own_key(
    guarded: GuardedNats, attacker: Bus
) -> None:
    """A roll-up of everything is refused: streams of last values take none."""
    with pytest.raises(JetStreamError):
        await publish_acknowledged(
            attacker, REGISTRY, OWN_KEY, b"{}", headers={"Nats-Rollup": "all"}
        )


async def test_a_forged_image_of_the_index_is_not_loaded(
    guarded: GuardedNats, attacker: Bus
) -> None:
    """A description that no client has published is a broken object, so the stream is read."""
    async with guarded.bus("index") as index:
        store = ObjectStore(index, IMAGES_BUCKET, bytes_max=IMAGES.bytes_max)
        await store.put("image", b"real", nuid="n1", metadata={})
        info = await store.info("image")
        assert info is not None
        assert await store.get(info, deadline_s=2) == b"real"
        before = (await ensure_stream(index, IMAGES)).state.last_seq
        subject = f"$O.{IMAGES_BUCKET}.M.aW1hZ2U="
        await sends(attacker, msgspec.json.encode(info), subject)
        await stored(index, IMAGES, before + 1)
        with pytest.raises(ObjectBroken):
            await store.info("image")


async def test_a_consumer_copies_events_nowhere(guarded: GuardedNats) -> None:
    """Goal: the role that third parties have cannot write, by any deputy.

    What it can have sent are events, which have the mark of their stream, and answers of the API.
    """
    targets = (f"$KV.{REGISTRY_BUCKET}.services.index.a.0", "kvbm.v1.audit.index.a.0",
               "kvbm.v1.consolidated.a.x.stored", f"$O.{IMAGES_BUCKET}.M.x")  # fmt: skip
    async with guarded.bus(CONSUMER) as consumer, guarded.bus(ADMIN) as admin:
        await publish_acknowledged(admin, EVENTS, VICTIM, b"1")
        part = EVENTS.subjects[0]
        pull = {"name": "pull", "filter_subject": part, "ack_policy": "none", "num_replicas": 1,
                "mem_storage": True}  # fmt: skip
        request = {"stream_name": EVENTS.name, "config": pull}
        await call_api(consumer, f"CONSUMER.CREATE.{EVENTS.name}.pull.{part}", request)
        for target in targets:
            await consumer.publish_raw(
                f"$JS.API.CONSUMER.MSG.NEXT.{EVENTS.name}.pull", b'{"batch":1}', reply=target
            )
        with contextlib.suppress(DeadlineExceeded):
            await consumer.request_raw("$JS.API.INFO", b"", deadline_s=2)
        for name in ("KV_kvbm-registry", "KVBM_AUDIT", "KVBM_CONSOLIDATED", "OBJ_KVBM_INDEX"):
            info = msgspec.json.decode(await call_api(admin, f"STREAM.INFO.{name}"))
            assert info["state"]["messages"] == 0, name


async def test_nobody_answers_in_the_place_of_another(guarded: GuardedNats, attacker: Bus) -> None:
    """Goal: who was asked one question cannot have JetStream answer the next one.

    The end of an inbox is drawn by chance, so what is known of one says nothing of another.
    """
    inboxes: list[str] = []
    async with guarded.bus("metrics") as asker:
        for _ in range(2):
            with contextlib.suppress(KvbmError):
                await asker.request("kvbm.v1.index.match", b"", deadline_s=0.01)
        async with guarded.bus(ADMIN) as admin:
            await admin.subscribe_raw(
                "kvbm.v1.index.match", lambda many: inboxes.extend(one.reply for one in many)
            )
            await admin.request_raw("$JS.API.INFO", b"", deadline_s=2)
            async with asyncio.timeout(10):
                while len(inboxes) < 3:  # On a slow machine some are given up before they go out.
                    with contextlib.suppress(KvbmError):
                        await asker.request("kvbm.v1.index.match", b"", deadline_s=0.05)
    ends = [inbox.rsplit(".", 1)[1] for inbox in inboxes]
    assert len(set(ends)) == len(ends)
    assert all(len(end) >= 12 for end in ends)
    assert not all(end.isdigit() for end in ends), "one of many may be"
