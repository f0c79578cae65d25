"""Zones on real NATS servers: the fleet's index knows all zones, and a cut link loses nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_common.errors import KvbmError, NoResponder
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.event_publisher import EventPublisher
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.snapshots import SnapshotPages
from kvbm_common.nats.streams import Partitions
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.service.process import serve
from kvbm_common.wire.events import Cleared, Event, Removed, Run, Stored
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply, SnapshotRequest, verb_subject
from kvbm_index.shell.service import serve_index

from tests.libs.helpers import name as block_name
from tests.waiting import ask_until
from tests.zoned_fleet import CONTROL, Site, ZonedFleet, zoned_fleet

DEADLINE_S = 40.0
"""A link that was cut is tried again within some seconds, and sources within ten more."""
NAMESPACE = "ab" * 32
ROOT = "00" * 16
ZONES: dict[str, Sequence[str]] = {"east": ("e0", "e1"), "west": ("w0",)}
SOURCE = "host-tier-0"


class Tier:
    """A host tier of a zone: it registers, publishes by a random program, and gives snapshots."""

    def __init__(self, bus: Bus, host: str, partitions: Partitions) -> None:
        self.bus, self.host = bus, host
        self.registry = NatsRegistry(bus, ttl_s=2.0)
        self.publisher: EventPublisher = bus.event_publisher(
            f"{host}-{SOURCE}", spec=partitions.events_of(host)
        )
        self.held: dict[str, str] = {}
        """Blocks, each with its parent."""
        self.epoch = self.seq = 0
        self._rng = random.Random(host)

    @classmethod
    @asynccontextmanager
    async def joined(cls, site: Site, host: str) -> AsyncIterator[Tier]:
        """Run one on a host of a zone, while the block runs."""
        partitions = Partitions(int(str(site.more.get("index_partitions", 1))))
        async with site.bus("host-tier", host=host) as bus:
            tier = cls(bus, host, partitions)
            running = asyncio.create_task(tier.publisher.run())
            pages = SnapshotPages(tier.snapshot)

            async def answer(payload: bytes) -> bytes:
                return pages.answer(payload)

            try:
                await bus.add_verbs("host-tier", "0", host, {"snapshot": answer})
                tier.epoch = (await tier.registry.register("host-tier", host, "0")).epoch
                tier.say(Cleared)
                yield tier
            finally:
                running.cancel()
                await tier.registry.close()

    def say(self, kind: type[Event], **what: Any) -> None:
        """Publish an event."""
        self.seq += 1
        self.publisher.publish_event(
            kind(host=self.host, source=SOURCE, tier="host", epoch=self.epoch, seq=self.seq,
                 ts_ms=1, **what)
        )  # fmt: skip

    async def play(self, steps: int) -> None:
        """Store and remove blocks, and wait until the zone's stream has said so."""
        for _ in range(steps):
            one = block_name(self._rng.randrange(1, 200)).hex()
            if one in self.held:
                del self.held[one]
                self.say(Removed, namespace=NAMESPACE, hashes=[one])
            else:
                self.held[one] = ROOT
                run = Run(parent=ROOT, hashes=[one])
                self.say(Stored, namespace=NAMESPACE, runs=[run])
        await self.publisher.flush(deadline_s=DEADLINE_S)

    def snapshot(self, request: SnapshotRequest) -> SnapshotReply:
        """Return what it holds."""
        runs = [Run(parent=parent, hashes=[one]) for one, parent in self.held.items()]
        parts = [SnapshotPart(namespace=NAMESPACE, runs=runs)] if runs else []
        return SnapshotReply(host=self.host, source=SOURCE, tier="host", epoch=self.epoch,
                             seq=self.seq, parts=parts)  # fmt: skip


@asynccontextmanager
async def index(site: Site, *, host: str = CONTROL, partitions: int = 1) -> AsyncIterator[None]:
    """Serve an index, a replica for each partition, at a site."""
    stopping = asyncio.Event()
    own = [
        {"index_partition": number, "instance": str(number)} if partitions > 1 else {}
        for number in range(partitions)
    ]
    lives = [
        asyncio.create_task(
            serve("index", serve_index, site.settings("index", host=host, **one), stopping)
        )
        for one in own
    ]
    try:
        yield
    finally:
        stopping.set()
        assert await asyncio.gather(*lives) == [0] * partitions


async def ask(bus: Bus, verb: str, **request: Any) -> dict[str, Any]:
    """Ask the index that answers here."""
    payload = msgspec.json.encode(request)
    reply = await bus.request(verb_subject("index", verb), payload, deadline_s=5.0)
    answer: dict[str, Any] = msgspec.json.decode(reply)
    return answer


async def known(bus: Bus) -> dict[str, tuple[int, set[str]]]:
    """Return up to which event the index knows each host, and what it holds."""
    dump = await ask(bus, "dump")
    assert "missing" not in dump
    return {one["host"]: (one["seq"], set(one["hashes"])) for one in dump["holders"]}


async def knows(bus: Bus, tiers: Sequence[Tier]) -> None:
    """Wait until the index here knows these tiers and no others, to their last event."""
    wanted = {tier.host: (tier.seq, set(tier.held)) for tier in tiers}

    async def right() -> bool:
        return await known(bus) == wanted

    try:
        await ask_until(right, deadline_s=DEADLINE_S, despite=KvbmError)
    except TimeoutError:
        assert await known(bus) == wanted


async def stored(bus: Bus, partitions: int) -> Counter[tuple[str, str]]:
    """Return how often each message is in the streams of events, by subject and payload."""
    found: Counter[tuple[str, str]] = Counter()
    for number in range(partitions):
        name = Partitions(partitions).events(number).name
        state = msgspec.json.decode(await call_api(bus, f"STREAM.INFO.{name}"))["state"]
        for seq in range(max(1, state["first_seq"]), state["last_seq"] + 1):
            got = await call_api(bus, f"STREAM.MSG.GET.{name}", {"seq": seq})
            message = msgspec.json.decode(got)["message"]
            found[message["subject"], message.get("data", "")] += 1
    return found


async def same_messages(zoned: ZonedFleet, partitions: int) -> None:
    """Wait until the fleet's streams have all that the zones' have; assert each message is once."""
    of_zones: Counter[tuple[str, str]] = Counter()
    for site in zoned.zones.values():
        async with site.bus() as admin:
            of_zones += await stored(admin, partitions)
    async with zoned.fleet.bus() as admin:

        async def all_there() -> bool:
            return not of_zones - await stored(admin, partitions)

        await ask_until(all_there, deadline_s=DEADLINE_S)
        assert await stored(admin, partitions) == of_zones
    assert set(of_zones.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize(("guarded", "partitions"), [(False, 1), (False, 2), (True, 1), (True, 2)])
async def test_a_cut_link_loses_nothing(tmp_path: Path, guarded: bool, partitions: int) -> None:
    """Goal: the fleet's index knows all zones; what a zone says while it is cut off comes later.

    1. Sources in two zones publish: the fleet knows all of them, and its router all of their hosts.
    2. A link is cut, and both zones go on. The fleet knows the other zone, and forgets this one.
    3. It is back: the fleet knows everything. Its streams have each message once.
    """
    async with (
        zoned_fleet(tmp_path, ZONES, guarded=guarded, partitions=partitions) as zoned,
        index(zoned.fleet, partitions=partitions),
        AsyncExitStack() as stack,
    ):
        asker = await stack.enter_async_context(zoned.fleet.bus("consumer"))
        tiers = [
            await stack.enter_async_context(Tier.joined(zoned.zones[zone], host))
            for zone, hosts in ZONES.items()
            for host in hosts
        ]
        for tier in tiers:
            await tier.play(60)
        await knows(asker, tiers)
        await same_messages(zoned, partitions)
        zoned.cut("east")
        for _ in range(5):
            for tier in tiers:
                await tier.play(40)
        await knows(asker, [tier for tier in tiers if tier.host in ZONES["west"]])
        zoned.heal("east")
        await stack.enter_async_context(zoned.followed())
        for tier in tiers:
            await tier.play(10)
        await knows(asker, tiers)
        await same_messages(zoned, partitions)


@pytest.mark.slow
async def test_a_zone_alone_goes_on(tmp_path: Path) -> None:
    """Goal: a zone needs no fleet, and each index answers on its own side of a link.

    1. One zone has an index, the other none. The fleet's and the zone's are asked many times.
    2. Links are cut: the zone with an index goes on, and its registry has its hosts.
    3. They are back: the fleet knows everything, and asks tiers in zones for snapshots.
    """
    async with AsyncExitStack() as stack:
        zoned = await stack.enter_async_context(zoned_fleet(tmp_path, ZONES))
        east, west = zoned.zones["east"], zoned.zones["west"]
        await stack.enter_async_context(index(zoned.fleet))
        await stack.enter_async_context(index(east, host="e-ctl"))
        of_east = [await stack.enter_async_context(Tier.joined(east, host))
                   for host in ZONES["east"]]  # fmt: skip
        of_west = await stack.enter_async_context(Tier.joined(west, "w0"))
        of_fleet, in_east, in_west = [
            await stack.enter_async_context(site.bus("consumer", host="asker"))
            for site in (zoned.fleet, east, west)
        ]
        for tier in (*of_east, of_west):
            await tier.play(30)
        for bus, tiers in ((of_fleet, (*of_east, of_west)), (in_east, of_east)):
            await knows(bus, tiers)
            for _ in range(20):
                assert set(await known(bus)) == {tier.host for tier in tiers}
        with pytest.raises(NoResponder):
            await known(in_west)
        for host in ("e0", "w0"):
            subject = verb_subject("host-tier", "snapshot", host=host, instance="0")
            request = msgspec.json.encode(SnapshotRequest(source=SOURCE))
            assert await of_fleet.request(subject, request, deadline_s=5.0)
        zoned.cut("east")
        zoned.cut("west")
        for tier in (*of_east, of_west):
            await tier.play(30)
        await knows(in_east, of_east)
        listed = {record.host for record in await of_east[0].registry.list("host-tier")}
        assert listed == set(ZONES["east"])
        await knows(of_fleet, ())
        zoned.heal("east")
        zoned.heal("west")
        await stack.enter_async_context(zoned.followed())
        await knows(of_fleet, (*of_east, of_west))
        await same_messages(zoned, 1)


@pytest.mark.slow
async def test_the_fleet_begins_again_while_zones_go_on(tmp_path: Path) -> None:
    """Goal: the fleet's NATS is killed; what zones say meanwhile comes later, in order, once."""
    async with (
        zoned_fleet(tmp_path, ZONES) as zoned,
        index(zoned.fleet),
        Tier.joined(zoned.zones["east"], "e0") as tier,
        zoned.fleet.bus("consumer") as asker,
    ):
        await tier.play(50)
        await knows(asker, [tier])
        zoned.fleet.server.kill()
        await tier.play(50)
        await zoned.fleet.server.start()
        await ask_until(lambda: zoned.is_linked("east"), deadline_s=DEADLINE_S)
        async with zoned.followed():
            await knows(asker, [tier])
            await same_messages(zoned, 1)
