"""The scrubber on the real service: rotten memory is found without a load, and at what cost."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.nats.bus import Bus
from kvbm_common.tier.blocks import Block
from kvbm_common.wire.verbs import ArenaReply, StatsReply
from kvbm_host_tier.core.scrub_messages import ScrubFailed, ScrubSlots
from kvbm_host_tier.shell.scrub_reader import ScrubReader

from tests.services.host_tier.engine import RealEngine
from tests.services.host_tier.helpers import NAMESPACE, name
from tests.services.host_tier.running import ask, held, living, wait_ready, wait_stats


def at_least(figure: str, count: float) -> Any:
    """A condition on the statistics."""

    def holds(stats: StatsReply) -> bool:
        return stats.figures.get(figure, 0.0) >= count

    return holds


async def test_a_flipped_byte_is_found_without_a_load(
    settings: Settings, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """1. Three idle blocks are read, and are right. 2. A bit of the arena's file flips: that block
    is discarded and said, the others stay."""
    async with living(replace(settings, scrub_cpu_percent=100.0, scrub_round_s=0.0)):
        await wait_ready(bus)
        async with RealEngine.living(settings) as engine:
            await engine.store(bus, 1, 2, 3)
            found = await engine.found(1, 2, 3)
            await engine.release(found)
            await wait_stats(bus, at_least("scrub_rounds", 2))
            assert await held(bus) == {1, 2, 3}
            arena = msgspec.json.decode(await ask(bus, "arena"), type=ArenaReply)
            memory = np.memmap(arena.path, dtype=np.uint8, mode="r+")
            memory[found.slots[1] * arena.slot_bytes + 77] ^= 1
            stats = await wait_stats(bus, at_least("scrub_corrupt_blocks", 1))
            assert await held(bus) == {1, 3}
            assert stats.figures["evictions.corrupt"] == 1
            assert "the scrubber found 1 blocks of host memory changed" in caplog.text


@pytest.mark.slow
async def test_it_costs_what_it_may(settings: Settings, bus: Bus) -> None:
    """Goal: at 2 % its thread takes no more of a core, counted by processor time."""
    async with living(replace(settings, scrub_cpu_percent=2.0, scrub_round_s=0.0)):
        await wait_ready(bus)
        async with RealEngine.living(settings) as engine:
            await engine.store(bus, *range(1, 16))
            await engine.release(await engine.found(1, 2, 3))
            began = await wait_stats(bus, at_least("scrub_cpu_us", 1))
            began_s = time.monotonic()
            ended = await wait_stats(bus, at_least("scrub_rounds", 14))
            spent_us = ended.figures["scrub_cpu_us"] - began.figures["scrub_cpu_us"]
            one_more_us = spent_us / 4  # The pause after the last batch was not watched.
            assert 0 < spent_us <= 0.02 * 1e6 * (time.monotonic() - began_s) + one_more_us


async def test_an_arena_that_is_not_there_is_a_failure_that_is_said() -> None:
    """Nothing is taken for wrong."""
    reader = ScrubReader()
    block = Block(name(1), name(0), NAMESPACE.digest, 1, 64)
    assert await reader.read(ScrubSlots("/dev/shm/kvbm-no-such", (0,), (block,))) == (
        ScrubFailed("arena_unavailable")
    )
    reader.close()
