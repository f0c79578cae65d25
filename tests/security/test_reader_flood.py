"""A consumer's credential against the streams: more readers than a stream may have.

The server is a real one with the configuration that `kvbm nats-config` writes. A limit of the test
is smaller than KVBM's, or shorter, where the test would otherwise take minutes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_cli.creds.embedded import authorization_of
from kvbm_common.access import nkeys
from kvbm_common.access.nats_access import nats_access
from kvbm_common.access.roles import ADMIN, CONSUMER
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.direct_client import DirectClient
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.jetstream import JetStreamError, call_api, publish_acknowledged
from kvbm_common.nats.stream_setup import set_up_streams
from kvbm_common.nats.streams import (
    CONSUMER_IDLE_S,
    CONSUMERS_MAX,
    EVENTS,
    REGISTRY,
    STREAMS,
    StreamSpec,
)
from kvbm_common.service.process import serve
from kvbm_common.tier.announcer import Announcer
from kvbm_common.wire.events import Event, event_codec, event_subject
from kvbm_common.wire.verbs import StatsReply, verb_subject
from kvbm_index.shell.service import serve_index

from tests.libs.helpers import block
from tests.security.guarded_nats import GuardedNats, guarded_nats
from tests.waiting import ask_until

FLOOD = 1_100
"""Durable consumers that the attacker makes, or tries to."""
AT_ONCE = 100
DEADLINE_S = 15.0
REFUSED = {"stream": EVENTS.name, "code": "jetstream_error"}
PARTS = {EVENTS.name: "kvbm.v1.events.>", REGISTRY.name: "$KV.kvbm-registry.services.>"}


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[GuardedNats]:
    """A server with credentials for one host."""
    async with guarded_nats(tmp_path, hosts=("a",)) as running:
        yield running


@pytest.fixture
async def admin(guarded: GuardedNats) -> AsyncIterator[Bus]:
    """An operator."""
    async with guarded.bus(ADMIN) as bus:
        yield bus


@pytest.fixture
async def attacker(guarded: GuardedNats) -> AsyncIterator[Bus]:
    """A dashboard of a third party, in other hands."""
    async with guarded.bus(CONSUMER) as bus:
        yield bus


async def change(admin: Bus, spec: StreamSpec, **changes: object) -> None:
    """Give a stream other limits."""
    described = json.loads(await call_api(admin, f"STREAM.INFO.{spec.name}"))["config"]
    await call_api(admin, f"STREAM.UPDATE.{spec.name}", described | changes)


async def durable(attacker: Bus, spec: StreamSpec, name: str, **more: object) -> int:
    """Make a durable consumer; returns the error code of the server, 0 where it is made."""
    part = PARTS[spec.name]
    config = {"name": name, "durable_name": name, "filter_subject": part, "ack_policy": "none"}
    request = {"stream_name": spec.name, "config": config | more}
    try:
        await call_api(attacker, f"CONSUMER.CREATE.{spec.name}.{name}.{part}", request)
    except JetStreamError as error:
        return error.server_code
    return 0


async def flood(attacker: Bus, spec: StreamSpec) -> list[int]:
    """Make durable consumers; returns what the server has answered."""
    answers: list[int] = []
    for first in range(0, FLOOD, AT_ONCE):
        names = [f"x{number}" for number in range(first, first + AT_ONCE)]
        answers += await asyncio.gather(*(durable(attacker, spec, name) for name in names))
    return answers


async def consumers(admin: Bus, spec: StreamSpec) -> int:
    """Return how many consumers a stream has that count."""
    return int(json.loads(await call_api(admin, f"CONSUMER.NAMES.{spec.name}"))["total"])


@asynccontextmanager
async def an_index(guarded: GuardedNats) -> AsyncIterator[None]:
    """An index in this event loop."""
    stopping = asyncio.Event()
    settings = guarded.settings("index")
    life = asyncio.create_task(serve("index", serve_index, settings, stopping))
    try:
        yield
    finally:
        stopping.set()
        assert await life == 0


async def stats_of(admin: Bus) -> StatsReply:
    """Return what an index says of itself."""
    payload = await admin.request("kvbm.v1.index.a.0.stats", b"{}", deadline_s=2)
    return msgspec.json.decode(payload, type=StatsReply)


async def announce(admin: Bus, source: str) -> None:
    """Publish that a tier begins, and has block 1."""
    tier = Announcer(host="a", source=source, tier="host", epoch=1)
    events: list[Event] = [tier.cleared("start"), *tier.stored([block(1)])]
    for event in events:
        await publish_acknowledged(admin, EVENTS, event_subject(event), event_codec.encode(event))


async def knows(admin: Bus, source: str) -> bool:
    """Tell whether an index has heard that a tier has block 1."""
    try:
        question = json.dumps({"hashes": [block(1).hash.hex()]}).encode()
        answer = await admin.request(verb_subject("index", "match"), question, deadline_s=2)
    except KvbmError:
        return False
    return any(one["source"] == source for one in json.loads(answer)["matches"])


async def refused_readers(admin: Bus) -> set[str]:
    """Return the streams that an index has counted as refused."""
    payload = await admin.request("kvbm.v1.index.a.0.metrics", b"{}", deadline_s=2)
    families = {family["name"]: family for family in json.loads(payload)["families"]}
    samples = families["kvbm_bus_readers_refused_total"]["samples"]
    return {one["labels"]["stream"] for one in samples if one["value"] > 0}


async def read_one(guarded: GuardedNats) -> dict[str, Any]:
    """Return the first event, as the example of docs/events.md reads it."""
    access = guarded.access(CONSUMER)
    client = DirectClient(access)
    await client.connect(list(access.servers), inbox_prefix=access.inbox)
    try:
        events = await client.jetstream().subscribe("kvbm.v1.events.>", ordered_consumer=True)
        message = await events.next_msg(timeout=DEADLINE_S)
        event: dict[str, Any] = json.loads(message.data)
        return event
    finally:
        await client.close()


@pytest.mark.slow
async def test_an_index_reads_a_stream_that_others_have_used_up(
    guarded: GuardedNats, admin: Bus, attacker: Bus
) -> None:
    """Goal: no reader locks a service out, of the events or of the registry.

    1. The attacker makes durable consumers until the server takes no more. 2. An index starts, and
    hears of an event that came before it, and of one after. 3. It has counted the refusals.
    """
    for spec in (EVENTS, REGISTRY):
        await change(admin, spec, max_consumers=FLOOD - AT_ONCE)
        assert set(await flood(attacker, spec)) == {0, 10026}
    await announce(admin, "host-tier-0")
    async with an_index(guarded):
        await ask_until(lambda: knows(admin, "host-tier-0"), deadline_s=DEADLINE_S)
        await announce(admin, "host-tier-1")
        await ask_until(lambda: knows(admin, "host-tier-1"), deadline_s=DEADLINE_S)
        assert await refused_readers(admin) == {EVENTS.name, REGISTRY.name}


@pytest.mark.slow
async def test_a_thousand_durable_readers_leave_room_for_others(
    guarded: GuardedNats, admin: Bus, attacker: Bus
) -> None:
    """With KVBM's own limits: the attacker makes all of them, and the documented reader reads."""
    assert set(await flood(attacker, EVENTS)) == {0}
    await announce(admin, "host-tier-0")
    assert (await read_one(guarded))["source"] == "host-tier-0"


@pytest.mark.slow
async def test_a_flood_of_readers_at_a_stack_of_one_machine(tmp_path: Path) -> None:
    """The server of `kvbm up`, whose users are no account: an index reads all the same, and so
    does one more reader. Without a limit of ours the server has one of 1,000 for each stream."""
    users = authorization_of(tmp_path / "creds", host="a", instances=["0"])
    async with NatsServer(tmp_path / "nats", more={"authorization": users}) as server:
        given = {"nats_url": server.url, "host": "a", "creds_dir": tmp_path / "creds"}
        roles = (ADMIN, CONSUMER, "index")
        buses = [
            await Bus.connect(nats_access(Settings.load({}, given), role), role) for role in roles
        ]
        admin, attacker, index = buses
        await set_up_streams(admin)
        assert set(await flood(attacker, EVENTS)) == {0}
        await announce(admin, "host-tier-0")
        for reader in (index, attacker):
            async with asyncio.timeout(DEADLINE_S), reader.event_subscription() as events:
                assert len(await anext(events)) > 0
            assert reader.counters.value("kvbm_bus_readers_refused_total", **REFUSED) == 0
        for bus in buses:
            await bus.close()


@pytest.mark.slow
async def test_a_durable_reader_without_a_listener_ends(
    guarded: GuardedNats, admin: Bus, attacker: Bus
) -> None:
    """Goal: what a flood has left goes away, and then anyone reads again.

    1. A stream is used up. 2. The attacker goes. 3. Its consumers end; the documented reader reads.
    """
    await change(admin, EVENTS, max_consumers=50, consumer_limits={"inactive_threshold": 10**9})
    assert [await durable(attacker, EVENTS, f"x{n}") for n in range(51)] == [0] * 50 + [10026]

    async def are_gone() -> bool:
        return await consumers(admin, EVENTS) == 0

    await ask_until(are_gone, deadline_s=DEADLINE_S)
    await announce(admin, "host-tier-0")
    assert (await read_one(guarded))["source"] == "host-tier-0"


@pytest.mark.parametrize("spec", [EVENTS, REGISTRY], ids=lambda spec: spec.name)
async def test_no_reader_asks_for_a_longer_life(attacker: Bus, spec: StreamSpec) -> None:
    """The longest time without a listener is the stream's; a longer one is refused."""
    longest = int(CONSUMER_IDLE_S * 1e9)
    assert await durable(attacker, spec, "x", inactive_threshold=longest) == 0
    assert await durable(attacker, spec, "y", inactive_threshold=longest + 1) == 10153


async def limits_of(admin: Bus, spec: StreamSpec) -> tuple[int, dict[str, int]]:
    """Return how many consumers a stream may have, and what they may ask for."""
    described = json.loads(await call_api(admin, f"STREAM.INFO.{spec.name}"))["config"]
    return described["max_consumers"], described["consumer_limits"]


async def test_streams_that_are_there_get_the_limits(admin: Bus) -> None:
    """A release without them has made the streams: `kvbm nats-streams` and `kvbm up` add them."""
    for spec in STREAMS:
        await change(admin, spec, max_consumers=-1, consumer_limits={})
    assert await set_up_streams(admin) == [spec.name for spec in STREAMS]
    for spec in STREAMS:
        idle = {"inactive_threshold": int(CONSUMER_IDLE_S * 1e9)}
        assert await limits_of(admin, spec) == (CONSUMERS_MAX, idle)
    assert await set_up_streams(admin) == []


async def test_a_reader_that_has_asked_for_more_hinders_no_start(
    admin: Bus, attacker: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """It was made before there was a limit. The log names it; the stream gets its other limit."""
    await change(admin, EVENTS, max_consumers=-1, consumer_limits={})
    year = int(365 * 24 * 3600 * 1e9)
    assert await durable(attacker, EVENTS, "greedy", inactive_threshold=year) == 0
    await set_up_streams(admin)
    assert await limits_of(admin, EVENTS) == (CONSUMERS_MAX, {})
    assert "KVBM_EVENTS keeps its consumer_limits" in caplog.text
    assert "greedy" in caplog.text


async def test_a_refused_index_says_so_and_heals(
    guarded: GuardedNats, admin: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: an index that NATS does not let read is not ready, says why, and needs no restart.

    1. The server takes the right to read the events. 2. An index starts: not ready, with the
    server's reason, a warning and a count. 3. The right comes back: ready.
    """
    permissions = permissions_of(guarded, "index")
    permissions["deny"] = [f"$JS.API.CONSUMER.CREATE.{EVENTS.name}.>"]
    guarded.server.reload()

    async def is_told() -> bool:
        try:
            reasons = (await stats_of(admin)).reasons
        except KvbmError:
            return False
        return any("refused" in reason for reason in reasons)

    async with an_index(guarded):
        await ask_until(is_told, deadline_s=DEADLINE_S)
        stats = await stats_of(admin)
        assert not stats.ready
        [reason] = [one for one in stats.reasons if "refused" in one]
        assert "does not let this role publish on $js.api.consumer.create.kvbm_events" in reason
        assert "KVBM_EVENTS cannot be read as usual" in caplog.text
        assert await refused_readers(admin) == {EVENTS.name}
        del permissions["deny"]
        guarded.server.reload()

        async def is_ready() -> bool:
            try:
                return (await stats_of(admin)).ready
            except KvbmError:
                return False

        await ask_until(is_ready, deadline_s=DEADLINE_S)


def permissions_of(guarded: GuardedNats, role: str) -> dict[str, list[str]]:
    """Return what a role may publish, as the server reads it."""
    key = nkeys.public_of(guarded.creds_of(role).read_text().strip())
    [user] = [u for u in guarded.server.more["accounts"]["kvbm"]["users"] if u["nkey"] == key]
    publish: dict[str, list[str]] = user["permissions"]["publish"]
    return publish
