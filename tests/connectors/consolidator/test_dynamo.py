"""Dynamo's own indexer, from its PyPI wheel, on our ZMQ output: it holds what our index holds."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.identity import SequenceHash
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.runtime.processes import free_port
from kvbm_common.service.process import serve
from kvbm_connectors.consolidator.core.router_stream import short_hash
from kvbm_connectors.consolidator.shell.service import serve_consolidator
from kvbm_index.shell.service import serve_index

from tests.connectors.consolidator.model import NAMESPACE, chain
from tests.connectors.consolidator.shell.test_service import (
    Engine,
    held_by_index,
    running,
    settings_of,
    wait_for,
)
from tests.connectors.consolidator.test_router import HostTier, host_tier
from tests.dynamo_env import dynamo_python
from tests.waiting import ask_until

pytestmark = pytest.mark.slow
WORKER = 7
STEPS = 400


class Dynamo:
    """`python -m dynamo.indexer`, and its HTTP API."""

    def __init__(self, python: Path, settings: Settings, log: Path) -> None:
        self._url = f"http://127.0.0.1:{free_port()}"
        port = self._url.rsplit(":", 1)[1]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [python, "-m", "dynamo.indexer", "--port", port],
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._registration = {
            "instance_id": WORKER, "model_name": "model", "dp_rank": 0,
            "block_size": NAMESPACE.block_tokens, "endpoint": settings.router_endpoint,
            "replay_endpoint": settings.router_replay_endpoint,
        }  # fmt: skip

    async def register(self) -> None:
        """Make it listen to us, as soon as it answers."""

        async def registered() -> bool:
            await asyncio.to_thread(self._post, "register", self._registration)
            return True

        await ask_until(registered, deadline_s=20, poll_s=0.05, despite=OSError)

    def _post(self, path: str, body: object) -> Any:
        request = urllib.request.Request(
            f"{self._url}/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=5.0) as reply:
            return json.load(reply)

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{path}", timeout=5.0) as reply:
            return json.load(reply)

    async def held(self) -> set[int]:
        """The hashes of all blocks in its index."""
        dump = await asyncio.to_thread(self._get, "dump")
        return {
            block["block_hash"] % 2**64
            for event in dump["model:default"]["events"]
            for block in event["event"]["data"]["stored"]["blocks"]
        }

    async def matched(self, tokens: tuple[int, ...], salt: str | None = None) -> dict[str, int]:
        """What it says of a prompt: tokens matched, per tier and the tiers above it."""
        query = {"model_name": "model", "token_ids": tokens, "cache_salt": salt}
        reply = await asyncio.to_thread(self._post, "query", query)
        found: dict[str, int] = reply["instances"].get(str(WORKER), {})
        return found

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(10.0)


@pytest.fixture(scope="module")
def python() -> Path:
    """Its environment, which may take a minute: nothing of ours stands still meanwhile."""
    return dynamo_python()


@pytest.fixture(params=["dedup", "passthrough"])
def settings(
    python: Path, nats_server: NatsServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Settings:
    return Settings.load(
        settings_of(nats_server, tmp_path).as_environ(),
        {
            "router_endpoint": f"tcp://127.0.0.1:{free_port()}",
            "router_replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
            "consolidator_mode": request.param,
            "registry_ttl_s": 5.0,
        },
    )


@pytest.fixture
async def services(settings: Settings) -> AsyncIterator[None]:
    stopping = asyncio.Event()
    async with running(
        serve("consolidator", serve_consolidator, settings, stopping),
        serve("index", serve_index, settings, stopping),
        stopping=stopping,
    ):
        yield


@pytest.fixture
def dynamo(python: Path, settings: Settings, tmp_path: Path) -> Iterator[Dynamo]:
    dynamo = Dynamo(python, settings, tmp_path / "dynamo.log")
    yield dynamo
    dynamo.close()


@pytest.fixture
async def engine(settings: Settings, services: None) -> AsyncIterator[Engine]:
    engine = Engine(settings)
    await engine.attach()
    engine.keep_attached()
    yield engine
    await engine.close()


async def work(engine: Engine, host: HostTier, rng: random.Random, steps: int) -> None:
    """An engine computes and evicts; the host tier takes what is on the device, and evicts."""
    for _ in range(steps):
        length = 2 * rng.randint(1, 6)
        prompt = tuple(token for _ in range(length // 2) for token in (rng.randint(0, 2),) * 2)
        device = engine.device
        start = max(e for e in range(0, length, 2) if not e or device.copies[prompt[:e]])
        if not device.copies[prompt]:
            await engine.publish(device.store(prompt, start // 2))
        elif rng.random() < 0.7:
            await engine.publish(device.evict(rng.randrange(100)))
        blocks = chain(prompt)
        if rng.random() < 0.3 and host.held.keys().isdisjoint(blocks):
            host.store(*blocks)
        elif rng.random() < 0.1 and host.held:
            host.remove(rng.choice(sorted(host.held)))


async def test_dynamo_s_indexer_holds_what_our_index_holds(
    engine: Engine, bus: Bus, dynamo: Dynamo
) -> None:
    """1. Half of the work is done before Dynamo listens: it asks for a replay. 2. The other half
    live. 3. Both hold the same blocks; a prompt that is held matches in full."""
    rng = random.Random(5)
    async with host_tier(bus) as host:
        await work(engine, host, rng, STEPS)
        await dynamo.register()
        await work(engine, host, rng, STEPS)

        async def in_our_index() -> set[SequenceHash]:
            return await held_by_index(bus, "sim-0") | await held_by_index(bus, "host-tier-0")

        await wait_for(in_our_index, engine.device.truth() | set(host.held))
        wanted = {short_hash(block) for block in await in_our_index()}
        assert len(wanted) > 100
        await wait_for(dynamo.held, wanted)
        longest = max(+engine.device.copies, key=len)
        matched = await dynamo.matched(longest)
        assert matched["longest_matched"] == len(longest), "in tokens"


async def test_dynamo_s_indexer_tells_salts_apart(engine: Engine, dynamo: Dynamo) -> None:
    """The pages of a salted prompt, of which SGLang says the salt, are found with the salt alone;
    those of another prompt without one as before."""
    salted, plain = (1, 1, 2, 2, 3, 3), (4, 4, 5, 5)
    await dynamo.register()
    head, tail = engine.device.store(salted[:4], 0), engine.device.store(salted, 2)
    for stored in (head, tail):
        await engine.publish(msgspec.structs.replace(stored, cache_salt="s"))
    await engine.publish(engine.device.store(plain, 0))

    async def found() -> list[int]:
        asked = [(salted, "s"), (salted, "t"), (salted, None), (plain, None)]
        return [(await dynamo.matched(*one)).get("longest_matched", 0) for one in asked]

    await wait_for(found, [len(salted), 0, 0, len(plain)])
