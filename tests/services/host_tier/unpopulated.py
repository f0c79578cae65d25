"""A host tier, or an engine, that has not mapped its arena's pages yet: as if the arena were large.

    python -m tests.services.host_tier.unpopulated host
    python -m tests.services.host_tier.unpopulated engine

Each is a process of its own, because a hole in a full file system ends the process that reads it.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Future

from kvbm_common.config.settings import Settings
from kvbm_common.memory.arena import Arena
from kvbm_common.nats.bus import Bus
from kvbm_common.runtime.metrics import Metrics
from kvbm_host_tier.shell import service

from tests.services.host_tier.engine import RealEngine

BLOCKS = range(1, 11)


async def engine() -> None:
    """Store blocks, probe the arena, load the blocks elsewhere, and say whether they are equal."""
    settings = Settings.load()
    bus = await Bus.connect(settings.nats_url, "engine", counters=Metrics(), deadline_s=5.0)
    async with RealEngine.living(settings) as ada:
        for number in BLOCKS:
            await ada.store(bus, number)
            result = await ada.load(await ada.found(number), 0)
            assert result.intact == (True,), result
            assert bytes(ada.memory[0]) == bytes(ada.memory[number])
    await bus.close()
    print("loaded", flush=True)


def main() -> None:
    """Run the side that is named."""
    Arena.populate = lambda self: Future()  # type: ignore[method-assign]
    if sys.argv[1] == "host":
        service.main()
    else:
        asyncio.run(engine())


if __name__ == "__main__":
    main()
