"""Links of zones, as `kvbm nats-config` writes them: what a zone cannot do to its fleet."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from kvbm_cli.creds.zone_config import ZONES as KEYS
from kvbm_common.access.nats_access import nats_access
from kvbm_common.access.roles import CONSUMER
from kvbm_common.errors import BusUnavailable, KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.jetstream import JetStreamError, call_api, publish_acknowledged
from kvbm_common.nats.streams import AUDIT, EVENTS, IMAGES, REGISTRY
from kvbm_common.wire.verbs import verb_subject

from tests.waiting import ask_until
from tests.zoned_fleet import CONTROL, zoned_fleet

ZONES = {"east": ("e0",)}
INTO_STREAMS = (
    "kvbm.v1.events.e0.engine-0.stored",
    "kvbm.v1.partition.2.0.e0.engine-0.stored",
    "kvbm.v1.audit.index.e0.0",
    "$KV.kvbm-registry.services.index.ctl.0",
    "$O.KVBM_INDEX.C.x",
)
SUBJECT = "kvbm.v1.events.e0.host-tier-0.stored"


async def count(bus: Bus, stream: str) -> int:
    """Return how many messages a stream has had."""
    described = await call_api(bus, f"STREAM.INFO.{stream}")
    last: int = msgspec.json.decode(described)["state"]["last_seq"]
    return last


@pytest.mark.slow
async def test_a_zone_that_denies_nothing_reaches_no_stream_of_the_fleet(tmp_path: Path) -> None:
    """Goal: the fleet's own configuration keeps a zone's messages out of its streams.

    1. A zone's server carries everything. 2. What it sends to subjects of streams, or as an index,
    stays there. A verb after it comes through, so the link was there, and what is in the zone's
    stream comes as from a source: once.
    """
    async with zoned_fleet(tmp_path, ZONES, guarded=True) as zoned:
        east = zoned.zones["east"]
        for remote in east.server.more["leafnodes"]["remotes"]:
            remote["deny_exports"] = remote["deny_imports"] = []
        await east.server.stop()
        await east.server.start()
        await ask_until(lambda: zoned.is_linked("east"))
        async with zoned.fleet.bus() as fleet, east.bus() as zone:
            arrived: list[bytes] = []

            async def answer(payload: bytes) -> bytes:
                arrived.append(payload)
                return b"{}"

            await fleet.add_verbs("index", "0", CONTROL, {"match": answer}, shared=True)
            own = verb_subject("index", "match", host=CONTROL, instance="0")

            async def asked() -> bool:
                return await zone.request(own, b"own", deadline_s=5.0) == b"{}"

            await ask_until(asked, despite=KvbmError)
            for subject in INTO_STREAMS:
                await zone.publish(subject, b"x")
            await zone.publish(verb_subject("index", "match"), b"shared")
            await publish_acknowledged(zone, EVENTS, SUBJECT, b"{}")
            assert await asked()
            assert set(arrived) == {b"own"}

            async def sourced() -> bool:
                pairs = [
                    (await count(fleet, spec.name), await count(zone, spec.name))
                    for spec in (EVENTS, REGISTRY, AUDIT)
                ]
                return pairs == [(2, 2), (1, 1), (1, 1)]

            await ask_until(sourced, deadline_s=60.0)
            assert (await count(fleet, IMAGES.name), await count(zone, IMAGES.name)) == (0, 1)


async def test_no_client_says_that_its_message_comes_from_a_zone(tmp_path: Path) -> None:
    """Goal: the header by which readers know a zone's messages is refused, there and here."""
    header = {"Nats-Stream-Source": f"{EVENTS.name}:l8bOND2P 1 > > {SUBJECT} x"}
    async with zoned_fleet(tmp_path, ZONES, guarded=True) as zoned:
        for site in (zoned.fleet, zoned.zones["east"]):
            async with site.bus() as bus:
                with pytest.raises(JetStreamError, match="source header is not allowed"):
                    await publish_acknowledged(bus, EVENTS, SUBJECT, b"{}", headers=header)


@pytest.mark.slow
async def test_the_key_of_a_zone_is_good_for_its_link_only(tmp_path: Path) -> None:
    """Goal: who has it cannot connect as a client."""
    async with zoned_fleet(tmp_path, ZONES, guarded=True) as zoned:
        assert zoned.fleet.guarded is not None
        key = zoned.fleet.guarded.directory / KEYS / "east" / "kvbm.seed"
        settings = zoned.fleet.settings(CONSUMER, nats_creds_file=key)
        with pytest.raises(BusUnavailable):
            await Bus.connect(nats_access(settings, CONSUMER), "thief", deadline_s=1.0)
