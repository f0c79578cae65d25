"""A host tier that begins a new life: the tiers below it fill its first lookup."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from kvbm_cli.demo.check import wait_until
from kvbm_connectors.sim.control import Submit
from kvbm_connectors.sim.driver import EngineHandle

from tests.integration.running import Running, running

BLOCKS = 16
PROMPT = np.arange(BLOCKS * 16 + 1, dtype=np.uint32).tobytes()
"""A token more than the blocks have: an engine computes the last one itself."""


def tiers(kind: str, path: Path) -> dict[str, object]:
    """A host cache, and a disk or a shared directory for everything."""
    host: dict[str, object] = {"cpu_cache_gb": 0.1}
    if kind == "disk-tier":
        return host | {"disk_cache_gb": 0.5, "disable_disk_offload_filter": True}
    path.mkdir()
    return host | {"object_url": f"file://{path}", "disable_object_offload_filter": True}


async def stored(run: Running, kind: str) -> int:
    """Blocks that the lower tier would read."""
    slots = (await run.view.stats(kind)).slots
    return slots["inactive"] + slots["active"]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["disk-tier", "object-tier"])
async def test_the_first_lookup_of_a_new_life_is_filled(kind: str, tmp_path: Path) -> None:
    """Goal: no block is computed again because the host tier was started again.

    1. A prompt is computed, and all its blocks are stored below the host tier.
    2. The engine ends. The host tier is killed and started again.
    3. Another engine attaches, for which the new arena is cut, and asks for the prompt at once.
    """
    async with running(tiers(kind, tmp_path / "shared"), engines=1) as run:
        [first] = run.engines
        await first.request(Submit(request="first", prompt=PROMPT))

        async def all_stored() -> bool:
            return await stored(run, kind) == BLOCKS

        await wait_until(all_stored, "not all blocks are stored")
        await first.stop()
        await run.stack.kill("host-tier")
        await run.stack.start("host-tier")
        await run.stack.wait_ready("host-tier")
        second = EngineHandle(msgspec.structs.replace(first.config, name="second"))
        run.engines[:] = [second]
        try:
            assert await second.start()
            found = await second.request(Submit(request="second", prompt=PROMPT))
            figures = (await run.view.stats("host-tier")).figures
            assert found.disk_blocks == BLOCKS, figures
            assert found.mismatches == 0
        finally:
            await second.stop()
