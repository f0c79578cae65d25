"""Sources of a fleet's streams: how they are set up, and what is done where one hangs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_common.access.nats_access import of_url
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.jetstream import StreamInfo, call_api, ensure_stream, publish_acknowledged
from kvbm_common.nats.marked_messages import UNMARKED, checked, is_sourced
from kvbm_common.nats.raw_messages import RawMessage
from kvbm_common.nats.stream_setup import set_up_streams
from kvbm_common.nats.streams import AUDIT, CONSOLIDATED, EVENTS, REGISTRY, StreamLimits
from kvbm_common.nats.zone_sources import HangingSources

from tests.waiting import ask_until
from tests.zoned_fleet import Site, zoned_fleet

DEADLINE_S = 60.0
SUBJECT = "kvbm.v1.events.e0.engine-0.stored"
ZONES = {"east": ("e0",)}


async def described(bus: Bus) -> StreamInfo:
    """Return the fleet's stream of events."""
    return msgspec.json.decode(await call_api(bus, f"STREAM.INFO.{EVENTS.name}"), type=StreamInfo)


async def say(site: Site, *numbers: int) -> None:
    """Publish these messages in a zone."""
    async with site.bus() as bus:
        await ensure_stream(bus, EVENTS)
        for number in numbers:
            headers = {"Nats-Msg-Id": f"e0:{number}"}
            await publish_acknowledged(bus, EVENTS, SUBJECT, b"%d" % number, headers=headers)


async def payloads(bus: Bus) -> list[int]:
    """Return what the fleet's stream has, in order."""
    found = []
    for seq in range(1, (await described(bus)).state.last_seq + 1):
        got = await call_api(bus, f"STREAM.MSG.GET.{EVENTS.name}", {"seq": seq})
        message: dict[str, Any] = msgspec.json.decode(got)["message"]
        found.append(int(msgspec.json.decode(b'"%s"' % message["data"].encode(), type=bytes)))
    return found


async def test_zones_are_set_on_streams_that_are_there(bus: Bus) -> None:
    """1. A zone that is named becomes a source of all streams but the images. 2. A service without
    the setting leaves it. 3. Another list replaces the first."""
    await set_up_streams(bus)
    for zones in (("east",), ("east", "west")):
        limits = StreamLimits(zones=zones)
        operator = await Bus.connect(
            replace(of_url(bus.access.servers[0]), streams=limits), "admin"
        )
        try:
            wanted = {spec.name for spec in (EVENTS, CONSOLIDATED, AUDIT, REGISTRY)}
            assert set(await set_up_streams(operator)) == wanted
            assert await set_up_streams(operator) == []
            assert await set_up_streams(bus) == []
            assert {source.zone for source in (await described(bus)).sources} == {*zones}
        finally:
            await operator.close()


@pytest.mark.slow
async def test_a_source_that_hangs_is_tried_as_soon_as_its_zone_answers(tmp_path: Path) -> None:
    """Goal: a zone's events come when its link is back; NATS itself asks half a minute later.

    1. The link is cut, and the fleet's stream is made: NATS asks the zone, and hears nothing. A try
       of ours is not made. 2. It is back: one try brings everything, in order and once.
    """
    async with zoned_fleet(tmp_path, ZONES) as zoned, zoned.fleet.bus() as bus:
        zoned.cut("east")
        await say(zoned.zones["east"], *range(20))
        await call_api(bus, f"STREAM.DELETE.{EVENTS.name}")
        await set_up_streams(bus)
        sources = HangingSources(bus)
        woken: list[str] = []

        async def back() -> bool:
            woken.extend(await sources.wake())
            return await has(bus, 20)

        async def due() -> bool:
            await back()
            return EVENTS.name in {stream for stream, _ in sources.absent}

        await ask_until(due, deadline_s=DEADLINE_S)
        assert woken == []
        zoned.heal("east")
        await ask_until(back, deadline_s=DEADLINE_S)
        assert await payloads(bus) == list(range(20))
        assert woken.count(f"{EVENTS.name}@east") == 1


@pytest.mark.slow
async def test_a_zone_that_lost_its_store_is_read_from_its_beginning(tmp_path: Path) -> None:
    """Goal: positions that begin again are not taken for those of before."""
    async with zoned_fleet(tmp_path, ZONES) as zoned, zoned.followed(), zoned.fleet.bus() as bus:
        east = zoned.zones["east"]
        await say(east, *range(9))
        await ask_until(lambda: has(bus, 9), deadline_s=DEADLINE_S)
        east.server.kill()
        shutil.rmtree(east.server.directory / "jetstream")
        await east.server.start()
        await say(east, 100, 101)
        await ask_until(lambda: has(bus, 11), deadline_s=DEADLINE_S)
        assert await payloads(bus) == [*range(9), 100, 101]


async def has(bus: Bus, count: int) -> bool:
    """Tell whether the fleet has so many messages."""
    return (await described(bus)).state.last_seq >= count


async def silent(bus: Bus) -> bool:
    """Tell whether a source of the fleet's events is silent."""
    return any(source.is_silent for source in (await described(bus)).sources)


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ("Nats-Stream-Source: KVBM_EVENTS:l8bOND2P 1 > > s x", True),
        ("Nats-Msg-Id: 1\r\nNats-Stream-Source: KVBM_EVENTS:l8bOND2P 1 > > s x", True),
        ("Nats-Stream-Source: KV_kvbm-registry:l8bOND2P 1 > > s x", False),
        ("Nats-Stream-Source: KVBM_EVENTS 1 > > s x", False),
        ("Nats-Stream-Source:\r\nNats-Stream-Source: KVBM_EVENTS:l8bOND2P 1", False),
        ("Other: Nats-Stream-Source: KVBM_EVENTS:l8bOND2P 1", False),
        ("Nats-Msg-Id: 1", False),
    ],
)
async def test_what_comes_from_a_zone(bus: Bus, headers: str, taken: bool) -> None:
    """Goal: on a guarded bus a zone's stream of the same name counts, where zones are named."""
    block = f"NATS/1.0\r\n{headers}\r\n\r\n".encode()
    assert is_sourced(EVENTS, block) == taken
    message = RawMessage(SUBJECT, b"{}", "$JS.ACK.KVBM_EVENTS.c.1.1.1.1.0", block)
    for zones in ((), ("east",)):
        link = Guarded(StreamLimits(zones=zones))
        [found] = checked(link, EVENTS, [message])  # type: ignore[arg-type]
        assert (found.payload != UNMARKED) == (taken and bool(zones))


class Guarded:
    """The part of a link that a check needs."""

    guarded = True

    def __init__(self, limits: StreamLimits) -> None:
        self.limits = limits
