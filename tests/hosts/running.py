"""Several hosts with the same stack each, one NATS, one index, and a sim engine on every host."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from kvbm_cli.demo.check import StackView, Verdict, check_stack, wait_until
from kvbm_cli.demo.command import DemoOptions
from kvbm_cli.stack import Stack
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import free_port
from kvbm_common.wire.verbs import DoorRequest, verb_subject
from kvbm_connectors.sim.control import Finished
from kvbm_connectors.sim.driver import EngineHandle, run_turns
from kvbm_connectors.sim.workload import Turn

from tests import waiting
from tests.hosts.network import Network

HOST_SERVICES = ("consolidator", "host-tier", "disk-tier")
BLOCK_KIB = 64
BLOCK_TOKENS = 16
PROMPT_BLOCKS = 64


@dataclass(slots=True)
class OneHost:
    """A host, its engine, and what can be asked of it."""

    name: str
    stack: Stack
    engine: EngineHandle
    view: StackView
    bus: Bus

    async def figure(self, name: str) -> float:
        """A figure of the host tier."""
        return (await self.view.stats("host-tier")).figures.get(name, 0.0)

    async def run(self, prompt: int, *, request: str) -> Finished:
        """One request, with one of the prompts."""
        finished: list[Finished] = []
        await run_turns(
            [self.engine], [turn(prompt)], concurrency=1, prefix=request,
            on_finished=lambda _, one: finished.append(one),
        )  # fmt: skip
        [only] = finished
        assert only.mismatches == 0, "bytes of another block"
        assert only.error == ""
        return only

    async def has_open_door(self) -> bool:
        """Can other hosts read here?"""
        subject = verb_subject("host-tier", "door", host=self.name, instance="0")
        request = msgspec.json.encode(DoorRequest(any_size=True))
        await self.bus.request(subject, request, deadline_s=1)  # Refused while it is closed.
        return True

    async def forget(self) -> None:
        """The engine's own cache is emptied: it will look up again."""

        async def emptied() -> bool:
            return await self.engine.reset()

        await wait_until(emptied, "the engine is busy")

    async def check(self) -> Verdict:
        """Wait for a quiet point; nothing may have leaked, and the index knows what there is."""
        return await check_stack(self.view, [self.engine], with_disk=True)


@dataclass(slots=True)
class Hosts:
    """All of them."""

    network: Network
    all: list[OneHost]

    def __iter__(self) -> Iterator[OneHost]:
        return iter(self.all)

    async def restart_host_tier(self, host: OneHost) -> None:
        """Kill a host tier, and start it again on its host."""
        await host.stack.kill("host-tier")
        with _interpreter(self.network.python(host.name)):
            await host.stack.start("host-tier")
            await host.stack.wait_ready("host-tier")


def turn(prompt: int) -> Turn:
    """A prompt of its own: PROMPT_BLOCKS blocks that no other prompt has."""
    generator = np.random.default_rng(prompt)
    tokens = generator.integers(0, 30_000, PROMPT_BLOCKS * BLOCK_TOKENS + 1, dtype=np.uint32)
    return Turn(prompt, tokens, generator.integers(0, 30_000, 4, dtype=np.uint32))


@asynccontextmanager
async def running(count: int, **overrides: object) -> AsyncIterator[Hosts]:
    """Start everything; ends it in order."""
    names = [f"h{number}" for number in range(1, count + 1)]
    async with AsyncExitStack() as cleanup:
        directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-hosts-")))
        network = cleanup.enter_context(Network(names, directory))
        await network.wait_wires()
        nats_url = await cleanup.enter_async_context(_hub(directory / "hub", network.address))
        hosts = [
            await _host(cleanup, network, name, directory, nats_url, overrides) for name in names
        ]
        yield Hosts(network, hosts)


@asynccontextmanager
async def _hub(directory: Path, address: str) -> AsyncIterator[str]:
    """A NATS that all hosts reach without credentials, and the index; yields the server's URL."""
    own: dict[str, object] = {"host": "hub", "runtime_dir": directory / "run", "nats_open": True}
    async with (
        NatsServer(directory / "nats", address=address, port=free_port(address)) as server,
        Stack(own, state_dir=directory / "state", services=("index",), nats_url=server.url,
              log_dir=_logs(directory)),
    ):  # fmt: skip
        yield server.url


async def _host(
    cleanup: AsyncExitStack, network: Network, name: str, directory: Path, nats_url: str,
    overrides: dict[str, object],
) -> OneHost:  # fmt: skip
    home = directory / name
    for part in ("disk", "shm"):
        (home / part).mkdir(parents=True)
    own: dict[str, object] = {
        "host": name,
        "nats_open": True,
        "runtime_dir": home / "run",
        "disk_cache_dirs": home / "disk",
        "shm_dir": home / "shm",
        "router_endpoint": "off",
        "router_replay_endpoint": "off",
        "cpu_cache_gb": 0.05,
        "disk_cache_gb": 0.05,
        "registry_ttl_s": 2.0,
    }
    with _interpreter(network.python(name)):
        stack = await cleanup.enter_async_context(
            Stack(own | overrides, state_dir=home / "state", services=HOST_SERVICES,
                  nats_url=nats_url, log_dir=_logs(home))
        )  # fmt: skip
        bus = await Bus.connect(nats_url, f"test-{name}", counters=Metrics(), deadline_s=5)
        cleanup.push_async_callback(bus.close)
        config = DemoOptions(engines=1, block_kib=BLOCK_KIB).engine_config(
            0, stack.settings, name=f"sim-{name}"
        )
        engine = EngineHandle(config, log_path=home / "engine.log")
        cleanup.push_async_callback(engine.stop)
        assert await engine.start()
    return OneHost(name, stack, engine, StackView(bus, stack.settings), bus)


def _logs(directory: Path) -> Path:
    path = directory / "logs"
    path.mkdir(parents=True)
    return path


@contextmanager
def _interpreter(path: Path) -> Iterator[None]:
    """What is started meanwhile runs on a host."""
    ours, sys.executable = sys.executable, str(path)
    try:
        yield
    finally:
        sys.executable = ours


async def wait_indexed(host: OneHost, count: int) -> None:
    """Until the index knows of so many blocks in the host's memory."""

    async def indexed() -> bool:
        held = [one for one in await host.view.dump() if one.tier == "host"]
        return sum(len(one.hashes) for one in held) >= count

    await wait_until(indexed, "the index does not know the blocks")


async def wait_peers(hosts: Hosts) -> None:
    """Until every host knows the others."""

    async def met() -> bool:
        figures = [await host.figure("peers") for host in hosts]
        return all(figure == len(hosts.all) - 1 for figure in figures)

    await wait_until(met, "the hosts do not know each other")
    for host in hosts:
        await wait_until(host.has_open_door, f"{host.name} cannot be read")


async def wait_sent(network: Network, host: str, size: int) -> None:
    """Until the host has sent so many more bytes."""
    start = network.sent_bytes(host)
    await waiting.wait_until(lambda: network.sent_bytes(host) >= start + size)
