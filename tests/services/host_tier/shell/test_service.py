"""The host tier on real NATS, ZMQ and NIXL: the way in and out, and bad input at every door."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.errors import RequestFailed
from kvbm_common.identity import Namespace
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.streams import EVENTS
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.kv_groups import GROUPS_MAX
from kvbm_common.wire.codec import MESSAGE_BYTES_MAX, SOCKET_BYTES_MAX
from kvbm_common.wire.events import Run, Stored
from kvbm_common.wire.local import Beat, Release, to_host_tier
from kvbm_common.wire.verbs import (
    ArenaReply,
    LeaseReply,
    LeaseRequest,
    OfferRun,
    ReleaseReply,
    offers_subject,
)

from tests.services.host_tier.engine import BLOCK_BYTES, RealEngine
from tests.services.host_tier.helpers import NAMESPACE, hello, incarnation, name, on_disk
from tests.services.host_tier.running import (
    ARENA_GB,
    TTL_S,
    ask,
    counted,
    held,
    replace,
    stats_of,
    wait_stats,
)

# --- the way in and out -------------------------------------------------------------------------


async def test_blocks_go_in_and_come_back(engine: RealEngine, bus: Bus) -> None:
    """1. Three blocks are pulled, confirmed and held. 2. Found, leased, loaded elsewhere: equal.

    3. The lease goes back.
    """
    await engine.store(bus, 1, 2, 3)
    found = await engine.found(1, 2, 3)
    assert (found.block_bytes, found.reason) == (BLOCK_BYTES, "")
    assert (await stats_of(bus)).leases == 1
    result = await engine.load(found, 11, 12, 13)
    assert result.intact == (True, True, True)
    assert np.array_equal(engine.memory[11:14], engine.memory[1:4])
    await engine.release(found)
    await wait_stats(bus, lambda stats: stats.leases == 0)
    assert await held(bus) == {1, 2, 3}


@pytest.mark.slow
async def test_a_lower_tier_is_asked_again_when_the_stream_has_lost_events(
    host: None, bus: Bus
) -> None:
    """1. A disk tier joins, and is asked what it holds. 2. The stream is replaced by another one.
    3. The disk tier says nothing, and what it holds by now is known."""
    registry = NatsRegistry(bus, ttl_s=TTL_S)
    life = await registry.register("disk-tier", "h", "0")
    source = Announcer(host="h", source="disk-tier-0", tier="disk", epoch=life.epoch)
    blocks: list[Block] = []

    async def snapshot(_payload: bytes) -> bytes:
        return msgspec.json.encode(source.snapshot(blocks))

    def says(*numbers: int) -> None:
        """Hold more blocks; the events are lost."""
        new = [on_disk(number) for number in numbers]
        source.stored(new)
        blocks.extend(new)

    source.cleared("start")
    says(1)
    await bus.add_verbs("disk-tier", "0", "h", {"snapshot": snapshot})
    await wait_stats(bus, lambda stats: stats.figures["known_on_disk"] == 1)
    says(2, 3)
    await call_api(bus, f"STREAM.DELETE.{EVENTS.name}")
    await wait_stats(bus, lambda stats: stats.figures["known_on_disk"] == 3)
    await registry.close()


async def test_the_disk_tiers_verbs(engine: RealEngine, bus: Bus) -> None:
    """Where the arena is; a lease on what is there; and its end, once."""
    await engine.store(bus, 1, 2)
    await engine.release(await engine.found(1, 2))
    arena = msgspec.json.decode(await ask(bus, "arena"), type=ArenaReply)
    assert os.path.getsize(arena.path) == arena.bytes == int(ARENA_GB * 1e9)  # noqa: ASYNC240
    hashes = [name(number).hex() for number in (2, 9, 1)]
    request = LeaseRequest(owner="disk-tier-0", epoch=arena.epoch, hashes=hashes, lease_ms=5_000)
    lease = msgspec.json.decode(await ask(bus, "lease", request), type=LeaseReply)
    assert [int(slot.hash, 16) for slot in lease.slots] == [2, 1]
    view = np.memmap(arena.path, dtype=np.uint8, mode="r")
    for slot, block in zip(lease.slots, (2, 1), strict=True):
        start = slot.slot * arena.slot_bytes
        assert np.array_equal(view[start : start + slot.bytes], engine.memory[block])
    for valid in (True, False):
        payload = await ask(bus, "release", {"lease": lease.lease})
        assert msgspec.json.decode(payload, type=ReleaseReply).valid is valid


@pytest.mark.parametrize("verb", ["arena", "door"])
async def test_who_knows_slots_of_one_size_only_is_refused(
    engine: RealEngine, bus: Bus, verb: str
) -> None:
    """A tier of a release before would look for blocks in wrong places: it is told to upgrade."""
    await engine.store(bus, 1)
    for request in (b"{}", b'{"v":1}'):
        with pytest.raises(RequestFailed, match="upgrade it") as refused:
            await ask(bus, verb, request)
        assert refused.value.code == "one_size"


# --- bad input on the socket --------------------------------------------------------------------

BEAT = to_host_tier.encode(Beat(engine="ada", incarnation=incarnation(1)))


async def test_bad_messages_are_refused_counted_and_harm_nothing(
    engine: RealEngine, bus: Bus
) -> None:
    """Each is answered with a typed error; then the engine goes on as if nothing had been."""
    version = BEAT.replace(b"\xa1v\x01", b"\xa1v\x09")
    assert version != BEAT
    for frames in (
        (b"",), (b"garbage",), (b"\xc1",), (BEAT[:-1],), (BEAT, BEAT),
        (BEAT.replace(b"beat", b"boat"),), (version,), (bytes(MESSAGE_BYTES_MAX + 1),),
    ):  # fmt: skip
        refused = await engine.refused(*frames)
        assert (refused.about, refused.code) == ("message", "bad_message"), frames
    dropped = await counted(bus, "kvbm_local_messages_dropped_total")
    assert dropped == {"malformed": 6.0, "version": 1.0, "oversized": 1.0}
    await engine.store(bus, 1)
    assert len((await engine.found(1)).slots) == 1
    assert await held(bus) == {1}


async def test_what_a_strict_decoder_cannot_see_is_refused_by_the_core(
    engine: RealEngine, bus: Bus
) -> None:
    """A lookup with half a hash, a block twice, a short namespace; a stranger; a foreign lease."""
    await engine.store(bus, 1)
    found = await engine.found(1)
    good = engine.lookup([name(1)])
    for bad in (
        replace(good, hashes=b"x" * 17),
        replace(good, hashes=bytes(name(1)) * 2),
        replace(good, namespace=b"short"),
    ):
        assert (await engine.refused(bad)).about == "lookup"
    assert (await engine.refused(replace(good, incarnation=incarnation(9)))).code == (
        "unknown_engine"
    )
    await engine.say(
        Release(engine="ada", incarnation=incarnation(1), lease=found.lease + 1, corrupt=[0, 99])
    )
    await engine.alive()
    stats = await stats_of(bus)
    assert (stats.leases, stats.figures["released_late"]) == (1, 1)
    assert await held(bus) == {1}


async def test_a_message_beyond_all_bounds_costs_its_sender_the_connection_only(
    engine: RealEngine, settings: Settings, bus: Bus
) -> None:
    await engine.store(bus, 1)
    another = RealEngine(settings, engine="bob")
    await another.say(bytes(SOCKET_BYTES_MAX + 1))
    assert len((await engine.found(1)).slots) == 1
    another.close()


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"namespace": Namespace(model="other", block_tokens=4)}, "namespace", "namespace"),
        ({"world_size": 2}, "world_size", "world_size"),
        ({"rank": 1}, "rank", "rank"),
        ({"regions": []}, "regions", "regions"),
        ({"agent": b""}, "regions", "regions"),
        ({"agent": b"garbage", "engine": "bob"}, "agent", "agent"),
    ],
)
async def test_a_half_that_does_not_fit_is_refused(
    engine: RealEngine, bus: Bus, change: dict[str, Any], code: str, field: str
) -> None:
    """It is told which field; the engine that is there goes on."""
    refused = await engine.refused(replace(hello(piece_bytes=BLOCK_BYTES), **change))
    assert (refused.about, refused.code, refused.field) == ("hello", code, field)
    assert (await stats_of(bus)).figures[f"refused.{code}"] == 1
    await engine.store(bus, 1)


async def test_a_hello_with_too_many_groups_is_refused_by_field(
    engine: RealEngine, bus: Bus
) -> None:
    """The engine reads which field to change; the engine that is there goes on."""
    large = replace(hello(engine="bob"), group_namespaces=[NAMESPACE] * GROUPS_MAX)
    refused = await engine.refused(large)
    assert (refused.code, refused.field) == ("bad_message", "group_namespaces")
    assert "<= 63" in refused.message
    await engine.store(bus, 1)


async def test_a_block_size_that_does_not_fit_is_refused(
    engine: RealEngine, bus: Bus, settings: Settings
) -> None:
    """Larger than the slabs that the first engine had the arena cut into."""
    large = hello(engine="bob", piece_bytes=int(ARENA_GB * 1e9) // 2)
    refused = await engine.refused(large)
    assert (refused.code, refused.field) == ("block_size", "regions")
    assert "slabs of this arena" in refused.message
    await engine.store(bus, 1)


async def test_blocks_larger_than_the_arena_are_refused(host: None, settings: Settings) -> None:
    """The very first engine's; the next one's may fit."""
    engine = RealEngine(settings)
    refused = await engine.refused(hello(piece_bytes=int(ARENA_GB * 1e9) + 1))
    assert refused.code == "block_size"
    await engine.attach()
    engine.close()


# --- bad input on NATS --------------------------------------------------------------------------


async def test_bad_offers_are_counted_and_store_nothing(engine: RealEngine, bus: Bus) -> None:
    """Garbage is dropped; what names its engine is answered. Then a good one goes through."""
    good = engine.offer(1, 2)
    raw = msgspec.json.encode(good)
    for payload in (b"", b"garbage", raw[:-2], raw.replace(b'"v":1', b'"v":9'), b"[]",
                    raw.replace(b'"offer":1', b'"offer":-1')):  # fmt: skip
        await bus.publish(offers_subject("h"), payload)
    run = good.runs[0]
    for bad, reason in (
        (replace(good, namespace="0" * 64), "namespace"),
        (replace(good, runs=[replace(run, blocks=[1])]), "malformed"),
        (replace(good, runs=[replace(run, blocks=[1, 16])]), "block_id"),
    ):
        pulled = await engine.publish(bus, bad)
        assert (pulled.pulled, pulled.failed, pulled.reason) == (0, 2, reason)
    await bus.publish(
        offers_subject("h"),
        msgspec.json.encode(replace(good, runs=[OfferRun(parent=run.parent, hashes=["xyz"],
                                                         blocks=[1])])),
    )  # fmt: skip
    await bus.publish(offers_subject("h"), msgspec.json.encode(replace(good, engine="eve")))
    await engine.store(bus, 3)
    await engine.found(3)
    assert await held(bus) == {3}
    assert (await counted(bus, "kvbm_bus_handler_errors_total", "code"))["bad_message"] == 6
    figures = (await stats_of(bus)).figures
    assert figures["dropped.malformed"] == 1
    assert figures["dropped.offer_unknown_engine"] == 2


@pytest.mark.parametrize(
    ("verb", "request_", "code"),
    [
        ("lease", b"", "bad_message"),
        ("lease", b"garbage", "bad_message"),
        ("lease", {"owner": "x"}, "bad_message"),
        ("lease", {"v": 9, "owner": "x", "epoch": 1, "hashes": [], "lease_ms": 1}, "bad_message"),
        ("lease", {"owner": "x", "epoch": 1, "hashes": [], "lease_ms": 1}, "stale_epoch"),
        ("release", b"garbage", "bad_message"),
        ("release", {"lease": -1}, "bad_message"),
    ],
)
async def test_bad_requests_get_a_typed_error(
    host: None, bus: Bus, verb: str, request_: object, code: str
) -> None:
    with pytest.raises(RequestFailed) as caught:
        await ask(bus, verb, request_)
    assert caught.value.code == code
    assert (await stats_of(bus)).leases == 0


async def test_a_lease_on_a_hash_that_is_none_is_refused_whole(
    engine: RealEngine, bus: Bus
) -> None:
    """What was pinned before the bad one must not stay pinned."""
    await engine.store(bus, 1)
    await engine.release(await engine.found(1))
    epoch = (await stats_of(bus)).epoch
    request = {"owner": "x", "epoch": epoch, "hashes": [name(1).hex(), "xyz"], "lease_ms": 9}
    with pytest.raises(RequestFailed) as caught:
        await ask(bus, "lease", request)
    assert caught.value.code == "bad_identity"
    stats = await wait_stats(bus, lambda stats: stats.leases == 0)
    assert stats.slots["active"] == 0


async def test_bad_events_of_a_disk_tier_are_counted_and_believed_by_nobody(
    engine: RealEngine, bus: Bus
) -> None:
    """Garbage, another version, another source's subject; then a good one is."""
    run = Run(parent=name(0).hex(), hashes=[name(1).hex()])
    good = Stored(host="h", source="disk-tier-0", tier="disk", epoch=1, seq=1, ts_ms=0,
                  namespace=NAMESPACE.digest.hex(), runs=[run])  # fmt: skip
    raw = msgspec.json.encode(good)
    subject = "kvbm.v1.events.h.disk-tier-0.stored"
    for payload in (b"", b"garbage", raw[:-2], raw.replace(b'"v":1', b'"v":9')):
        await bus.publish(subject, payload)
    await bus.publish("kvbm.v1.events.h.disk-tier-1.stored", raw)
    await bus.publish("kvbm.v1.events.h.somebody.stored", raw)
    await bus.publish(subject, raw)
    stats = await wait_stats(bus, lambda stats: stats.figures["known_on_disk"])
    assert stats.figures["known_on_disk"] == 1
    assert await counted(bus, "kvbm_bus_messages_dropped_total") == {
        "malformed": 3.0, "version": 1.0, "wrong_subject": 1.0,
    }  # fmt: skip
