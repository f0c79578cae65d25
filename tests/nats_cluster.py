"""Three nats-servers that are one cluster, with JetStream, on this machine."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.runtime.processes import free_port

from tests.wire import Wire


class NatsCluster:
    """Each server has a store of its own; a stream with three replicas outlives any of them.

    Servers reach each other by wires, one for each pair and direction: a server that is cut off
    from the others still answers its clients.
    """

    def __init__(self, directory: Path, *, size: int = 3) -> None:
        self._ports = [free_port() for _ in range(size)]
        self._wires = {
            (near, far): Wire() for near in range(size) for far in range(size) if near != far
        }
        self._cleanup = AsyncExitStack()
        self.servers = [NatsServer(directory / str(number)) for number in range(size)]

    @property
    def url(self) -> str:
        """All servers: a client takes one that answers."""
        return ",".join(server.url for server in self.servers)

    async def __aenter__(self) -> Self:
        for (_, far), wire in self._wires.items():
            await self._cleanup.enter_async_context(wire)
            wire.lead_to(self._ports[far])
        for number, server in enumerate(self.servers):
            routes = [wire.port for (near, _), wire in self._wires.items() if near == number]
            server.more["cluster"] = {
                "name": "kvbm",
                "listen": f"127.0.0.1:{self._ports[number]}",
                "routes": [f"nats://127.0.0.1:{port}" for port in routes],
                "no_advertise": True,  # Else they would find ways beside the wires.
            }
        await asyncio.gather(*(server.start() for server in self.servers))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(server.stop(deadline_s=2.0) for server in self.servers))
        await self._cleanup.aclose()

    def led_by(self, name: str) -> NatsServer:
        """The server of this name, as NATS calls a leader."""
        return next(server for server in self.servers if server.name == name)

    def cut_off(self, server: NatsServer) -> None:
        """Keep a server from the others, in both directions."""
        for wire in self._wires_of(server):
            wire.cut()

    def rejoin(self, server: NatsServer) -> None:
        """Let it reach the others again."""
        for wire in self._wires_of(server):
            wire.heal()

    def _wires_of(self, server: NatsServer) -> list[Wire]:
        number = self.servers.index(server)
        return [wire for pair, wire in self._wires.items() if number in pair]
