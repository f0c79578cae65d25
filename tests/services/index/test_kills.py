"""Consolidators and replicas are killed at random: the index believes what the engine holds."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvbm_cli.service_process import ServiceProcess
from kvbm_common.identity import SequenceHash
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer

from tests.connectors.consolidator.shell.test_service import Engine, settings_of
from tests.services.index.test_replicas import DEADLINE_S, KILLS, Replica, replicas

CHANGES_MAX = 8
"""Of the engine while somebody dies. It replays all that it has ever said."""


@dataclass
class Truth:
    """What the index is compared with."""

    engine: Engine

    @property
    def name(self) -> str:
        """The source."""
        return self.engine.name

    @property
    def held(self) -> list[SequenceHash]:
        """What the engine holds."""
        return sorted(self.engine.device.truth())


@pytest.mark.parametrize(
    "kills",
    [pytest.param(3), pytest.param(KILLS, marks=[pytest.mark.slow, pytest.mark.timeout(7_200)])],
)
async def test_consolidators_and_replicas_are_killed(
    nats_server: NatsServer, bus: Bus, tmp_path: Path, kills: int
) -> None:
    """1. An engine stores, evicts and clears. 2. The consolidator or one of two replicas dies
    meanwhile, and starts again. 3. Both replicas believe what the engine holds.
    """
    rng = random.Random(kills)
    settings = settings_of(nats_server, tmp_path)
    consolidator = ServiceProcess(
        "consolidator",
        environ=os.environ | settings.as_environ(),
        restart=False,
        log_path=tmp_path / "consolidator.log",
    )
    consolidator.start()
    await consolidator.wait_ready(deadline_s=DEADLINE_S)
    engine = Engine(settings)
    engine.keep_attached()
    try:
        async with replicas(nats_server, tmp_path, 2) as both:
            victims: list[ServiceProcess | Replica] = [consolidator, *both]
            for _ in range(kills):
                going = asyncio.create_task(_change(engine, rng))
                await asyncio.sleep(rng.uniform(0, 0.1))
                victim = rng.choice(victims)
                if isinstance(victim, ServiceProcess):
                    await victim.end(signal.SIGKILL, deadline_s=5)
                    victim.start()
                    await victim.wait_ready(deadline_s=DEADLINE_S)
                else:
                    await victim.kill()
                    await victim.start()
                await going
                for replica in both:
                    await replica.wait_equal(bus, [Truth(engine)])
    finally:
        await engine.close()
        await consolidator.end(signal.SIGKILL, deadline_s=5)


async def _change(engine: Engine, rng: random.Random) -> None:
    device = engine.device
    for _ in range(rng.randint(1, CHANGES_MAX)):
        roll = rng.random()
        if roll < 0.05:
            await engine.publish(device.clear())
        elif roll < 0.4 and device.truth():
            await engine.publish(device.evict(rng.randrange(100)))
        else:
            tokens = tuple(rng.choices((1, 2), k=2 * rng.randint(1, 4)))
            await engine.publish(device.store(tokens, 0))
        await asyncio.sleep(0.005)
