"""Streams as the role admin sets them up, on one server and on a cluster of three."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_common.access.nats_access import of_url
from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.jetstream import JetStreamError, call_api, publish_acknowledged
from kvbm_common.nats.stream_setup import set_up_streams
from kvbm_common.nats.streams import AUDIT, EVENTS, IMAGES, REGISTRY, STREAMS, StreamLimits

from tests.nats_cluster import NatsCluster
from tests.waiting import ask_until

DEADLINE_S = 20.0


async def connect(url: str, limits: StreamLimits) -> Bus:
    """A connection of an operator who has said these limits."""
    return await Bus.connect(replace(of_url(url), streams=limits), "admin")


async def described(bus: Bus, stream: str) -> dict[str, Any]:
    """A stream, as its server describes it."""
    found: dict[str, Any] = msgspec.json.decode(await call_api(bus, f"STREAM.INFO.{stream}"))
    return found


async def test_limits_that_are_named_are_set_on_streams_that_are_there(bus: Bus) -> None:
    """1. Streams are made. 2. An operator makes one larger by hand: it stays. 3. A setting names
    another limit: that one is set, and no other."""
    assert await set_up_streams(bus) == []
    config = (await described(bus, EVENTS.name))["config"]
    await call_api(
        bus,
        f"STREAM.UPDATE.{EVENTS.name}",
        config | {"max_age": 77 * 10**9, "duplicate_window": 7 * 10**9},
    )
    assert await set_up_streams(bus) == []
    operator = await connect(bus.access.servers[0], StreamLimits(events_gb=0.5, images_gb=0.1))
    try:
        assert EVENTS.name in await set_up_streams(operator)
        config = (await described(operator, EVENTS.name))["config"]
        assert (config["max_bytes"], config["max_age"]) == (500_000_000, 77 * 10**9)
        assert (await described(operator, IMAGES.name))["config"]["max_bytes"] == 100_000_000
        assert await set_up_streams(operator) == []
    finally:
        await operator.close()


async def test_duplicates_are_known_no_longer_than_events_are_kept(bus: Bus) -> None:
    """Someone has made the age 60 s by hand; a setting names a memory of 100 s."""
    await set_up_streams(bus)
    config = (await described(bus, EVENTS.name))["config"]
    short = {"max_age": 60 * 10**9, "duplicate_window": 7 * 10**9}
    await call_api(bus, f"STREAM.UPDATE.{EVENTS.name}", config | short)
    operator = await connect(bus.access.servers[0], StreamLimits(duplicate_window_s=100))
    try:
        assert EVENTS.name in await set_up_streams(operator)
        config = (await described(operator, EVENTS.name))["config"]
        assert (config["max_age"], config["duplicate_window"]) == (60 * 10**9, 60 * 10**9)
    finally:
        await operator.close()


async def test_streams_of_earlier_releases_are_bounded_and_keep_what_fits(bus: Bus) -> None:
    """1. Audit and registry as releases before made them, with larger messages than the bound.
    2. They get the bounds. 3. What is there stays. 4. A stream that someone has made larger stays
    so."""
    for spec in (AUDIT, REGISTRY):
        unbounded = replace(spec, message_max=-1, refuses=False)
        await call_api(bus, f"STREAM.CREATE.{spec.name}", unbounded.as_config())
        subject = spec.subjects[0][:-1]
        await publish_acknowledged(bus, spec, f"{subject}large", b"x" * (1 << 20))
        for _ in range(201):
            await publish_acknowledged(bus, spec, f"{subject}many", b"x")
    assert set(await set_up_streams(bus)) == {AUDIT.name, REGISTRY.name}
    for spec, held in ((AUDIT, 202), (REGISTRY, 2)):
        found = await described(bus, spec.name)
        assert found["state"]["messages"] == held, spec.name
        wanted = spec.as_config()
        for name in ("discard", "max_msg_size"):
            assert found["config"][name] == wanted[name], (spec.name, name)
        with pytest.raises(JetStreamError, match="size"):
            await publish_acknowledged(bus, spec, f"{spec.subjects[0][:-1]}x", b"x" * (1 << 20))
    config = (await described(bus, AUDIT.name))["config"]
    await call_api(bus, f"STREAM.UPDATE.{AUDIT.name}", config | {"max_bytes": 1 << 30})
    assert await set_up_streams(bus) == []


async def test_one_server_cannot_keep_three_replicas(bus: Bus) -> None:
    operator = await connect(bus.access.servers[0], StreamLimits(replicas=3))
    try:
        with pytest.raises(JetStreamError, match=r"KVBM_EVENTS: .*; set KVBM_STREAM_REPLICAS=1"):
            await set_up_streams(operator)
    finally:
        await operator.close()


@pytest.mark.slow
async def test_events_outlive_the_server_that_leads_their_stream(tmp_path: Path) -> None:
    """1. Each stream has three replicas. 2. The leader of the events is killed in the midst of
    them. 3. What was acknowledged is there, once, and more is taken."""
    async with NatsCluster(tmp_path) as cluster:
        bus = await connect(cluster.url, StreamLimits(replicas=3))
        try:
            # A cluster that has just begun elects its leaders first.
            await ask_until(lambda: _names(bus), deadline_s=DEADLINE_S, despite=KvbmError)
            for spec in STREAMS:
                assert (await described(bus, spec.name))["config"]["num_replicas"] == 3, spec.name
            for number in range(20):
                await _publish(bus, number)
            leader = (await described(bus, EVENTS.name))["cluster"]["leader"]
            cluster.led_by(leader).kill()
            for number in range(20, 40):
                await _publish(bus, number)
            found = await ask_until(
                lambda: described(bus, EVENTS.name), deadline_s=DEADLINE_S, despite=KvbmError
            )
            assert found["state"]["messages"] == 40
        finally:
            await bus.close()


async def _names(bus: Bus) -> list[str]:
    """Set the streams up, and return their names."""
    await set_up_streams(bus)
    return [spec.name for spec in STREAMS]


async def _publish(bus: Bus, number: int) -> None:
    """Publish one message until it is acknowledged, as a publisher of events does."""
    subject, headers = f"{EVENTS.subjects[0][:-1]}h.s.stored", {"Nats-Msg-Id": str(number)}
    await ask_until(
        lambda: publish_acknowledged(bus, EVENTS, subject, b"{}", headers=headers),
        deadline_s=DEADLINE_S, despite=KvbmError,
    )  # fmt: skip
