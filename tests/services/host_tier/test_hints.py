"""Hints of agents on a real host tier: a pinned session resumes after ten noisy ones."""

from __future__ import annotations

from kvbm_common.identity import pack_hashes
from kvbm_common.nats.bus import Bus
from kvbm_common.wire.local import Confirm
from kvbm_common.wire.session_hint import SessionHint
from kvbm_common.wire.verbs import OfferRun

from tests.services.host_tier.engine import DEVICE_BLOCKS, RealEngine
from tests.services.host_tier.helpers import name
from tests.services.host_tier.running import replace, wait_stats

NOISY, TURN_BLOCKS = 10, 14
"""Together more than the arena's 122 slots."""


async def store(engine: RealEngine, bus: Bus, first: int, count: int) -> None:
    """Offload a chain whose names are these, from whatever device blocks."""
    numbers = range(first, first + count)
    run = OfferRun(
        parent=name(first - 1).hex(),
        hashes=[name(number).hex() for number in numbers],
        blocks=[number % DEVICE_BLOCKS for number in numbers],
    )
    pulled = await engine.publish(bus, replace(engine.offer(1), runs=[run]))
    assert pulled.pulled == count, pulled
    await engine.say(
        Confirm(engine=engine.engine, incarnation=engine.incarnation, offer=pulled.offer, held=True)
    )


async def make_noise(engine: RealEngine, bus: Bus, first: int) -> None:
    """Ten other sessions take a turn."""
    for number in range(NOISY):
        await store(engine, bus, first + number * TURN_BLOCKS, TURN_BLOCKS)


async def pin(engine: RealEngine, *numbers: int, ttl_ms: int) -> None:
    """A request of session s ends, and its agent waits for a tool."""
    await engine.say(
        SessionHint(
            engine=engine.engine, incarnation=engine.incarnation, session="s", action="pin",
            namespace=engine.namespace.digest, ttl_ms=ttl_ms,
            hashes=pack_hashes([name(number) for number in numbers]),
        )
    )  # fmt: skip


async def test_a_pinned_session_resumes_in_host_memory_until_its_pin_ends(
    engine: RealEngine, bus: Bus
) -> None:
    """1. Pinned before its blocks are there. 2. Noise: all there. 3. Unpinned, noise: gone."""
    await pin(engine, 1, 2, 3, ttl_ms=60_000)
    await store(engine, bus, 1, 3)
    await make_noise(engine, bus, 1_000)
    found = await engine.look_up(1, 2, 3)
    assert (len(found.slots), found.disk_blocks, found.remote_blocks) == (3, [], [])
    await engine.release(found)
    await pin(engine, ttl_ms=0)
    await make_noise(engine, bus, 2_000)
    await wait_stats(bus, lambda stats: stats.figures["hint_pinned_bytes"] == 0)
    assert (await engine.look_up(1, 2, 3)).slots == []


async def test_a_session_pins_no_more_than_its_part(engine: RealEngine, bus: Bus) -> None:
    """40 % of 122 slots are 48: of 56 blocks eight stay ordinary, and are counted."""
    numbers = list(range(1, 57))
    for first in range(1, 57, TURN_BLOCKS):
        await store(engine, bus, first, TURN_BLOCKS)
    await pin(engine, *numbers, ttl_ms=60_000)
    stats = await wait_stats(bus, lambda stats: stats.figures.get("hint_blocks_refused", 0) > 0)
    assert stats.slots["active"] == stats.figures["hint_blocks_pinned"] == 48
    assert stats.figures["hint_blocks_refused"] == 8


async def test_a_pin_ends_when_its_time_has_passed(engine: RealEngine, bus: Bus) -> None:
    """A tool that takes too long finds ordinary blocks."""
    await store(engine, bus, 1, 3)
    await pin(engine, 1, 2, 3, ttl_ms=300)
    await wait_stats(bus, lambda stats: stats.figures.get("hint_pins_expired", 0) == 1)
    await wait_stats(bus, lambda stats: stats.slots["active"] == 0)
