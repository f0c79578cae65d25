"""The host tier on real parts when engines, NATS or it itself are killed."""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from kvbm_cli.service_process import ServiceProcess
from kvbm_common.config.settings import Settings
from kvbm_common.memory.arena import Arena
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.wire.events import Run, Stored
from kvbm_common.wire.local import Bye

from tests.services.host_tier.engine import DEADLINE_S, RealEngine
from tests.services.host_tier.helpers import NAMESPACE, incarnation, name
from tests.services.host_tier.running import (
    held,
    living,
    stats_of,
    wait_ready,
    wait_stats,
)
from tests.waiting import wait_until


@pytest.mark.slow
async def test_what_a_killed_engine_leased_comes_back(
    host: None, settings: Settings, bus: Bus
) -> None:
    """It says no good-bye: its lease ends by its deadline, and it is forgotten after a while."""
    async with RealEngine.living(settings) as engine:
        await engine.store(bus, 1)
        await engine.release(await engine.found(1))
        await engine.look_up(1, lease_ms=300)
        assert (await stats_of(bus)).leases == 1
    stats = await wait_stats(bus, lambda stats: stats.leases == 0)
    assert stats.figures["leases_expired"] == 1
    assert stats.slots["active"] == 0
    stats = await wait_stats(bus, lambda stats: not stats.workers)
    assert stats.figures["engines_lost"] == 1
    assert await held(bus) == {1}


async def test_an_engine_that_leaves_gives_everything_back_at_once(
    engine: RealEngine, bus: Bus
) -> None:
    await engine.store(bus, 1)
    await engine.found(1)
    await engine.say(Bye(engine="ada", incarnation=incarnation(1)))
    stats = await wait_stats(bus, lambda stats: stats.leases == 0)
    assert "leases_expired" not in stats.figures or stats.figures["leases_expired"] == 0


async def test_an_outage_of_nats_does_not_use_up_the_arena(
    engine: RealEngine, nats_server: NatsServer, bus: Bus
) -> None:
    """1. Forty blocks are on a disk. 2. NATS dies: lookups are answered with what is here, and

    no slot stays lent to a disk tier that was never asked. 3. NATS is back: all as before.
    """
    await engine.store(bus, 1)
    runs = [Run(parent=name(1).hex(), hashes=[name(number).hex() for number in range(2, 42)])]
    event = Stored(host="h", source="disk-tier-0", tier="disk", epoch=1, seq=1, ts_ms=0,
                   namespace=NAMESPACE.digest.hex(), runs=runs)  # fmt: skip
    await bus.publish("kvbm.v1.events.h.disk-tier-0.stored", msgspec.json.encode(event))
    await wait_stats(bus, lambda stats: stats.figures["known_on_disk"] == 40)
    nats_server.kill()
    await wait_until(lambda: not bus.connected)
    found = await engine.look_up(*range(1, 42))
    assert len(found.slots) == 1
    assert found.reason == "bus_unavailable"
    await nats_server.start()
    await wait_until(lambda: bus.connected)
    await wait_ready(bus)
    assert (await stats_of(bus)).slots["staged"] == 0
    assert await held(bus) == {1}


@pytest.mark.slow
async def test_kill_9_and_another_life(settings: Settings, bus: Bus, tmp_path: Path) -> None:
    """1. Blocks are held; kill -9. 2. The engine is not known to the next life, says hello again,

    and works under a larger epoch. 3. One arena is left in shared memory, and none at the end.
    """
    environ = os.environ | settings.as_environ()
    process = ServiceProcess("host-tier", environ=environ, restart=True, log_path=tmp_path / "log")
    process.start()
    await process.wait_ready(deadline_s=DEADLINE_S)
    engine = RealEngine(settings)
    before = await engine.attach()
    await engine.store(bus, 1, 2)
    stale = await engine.found(1, 2)
    dead = process.pid
    os.kill(dead, signal.SIGKILL)
    await wait_until(lambda: process.pid not in (0, dead))
    await process.wait_ready(deadline_s=DEADLINE_S)
    assert (await engine.refused(engine.lookup([name(1)]))).code == "unknown_engine"
    await wait_until(lambda: engine.worker.epoch > before.epoch)
    after = await engine.greet()
    assert after.epoch > before.epoch
    assert (await engine.load(stale, 11, 12)).reason == "arena_changed"
    assert (await engine.look_up(1, 2)).slots == []
    await engine.release(stale)
    await engine.store(bus, 3)
    result = await engine.load(await engine.found(3), 13)
    assert result.intact == (True,)
    files = sorted(str(path) for path in settings.shm_dir.iterdir())
    beside = [f"{after.arena_path}-names-1", f"{after.arena_path}-roster"]
    assert files == [after.arena_path, *beside]
    engine.close()
    await process.end(signal.SIGTERM, deadline_s=4.0)
    assert list(settings.shm_dir.iterdir()) == []
    assert "host-tier.sock" not in os.listdir(tmp_path)


async def test_a_start_removes_what_was_killed_under_other_names(
    settings: Settings, bus: Bus
) -> None:
    """1. An arena of another host and instance is left, and one is in use. 2. A host tier starts:
    what was left is gone."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        left = Path(place) / "kvbm-old-3-7-arena"
        left.write_bytes(b"1" * 4096)
        with Arena.create(place, "kvbm-other-0-7-arena", 4096) as used:
            async with living(replace(settings, shm_dir=Path(place))):
                await wait_ready(bus)
                assert not left.exists()
                assert used.path.exists()
