"""Three nats-servers that are one cluster, with JetStream, on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.runtime.processes import free_port


class NatsCluster:
    """Each server has a store of its own; a stream with three replicas outlives any of them."""

    def __init__(self, directory: Path, *, size: int = 3) -> None:
        routes = [free_port() for _ in range(size)]
        self.servers = [
            NatsServer(
                directory / str(number),
                more={
                    "cluster": {
                        "name": "kvbm",
                        "listen": f"127.0.0.1:{own}",
                        "routes": [f"nats://127.0.0.1:{route}" for route in routes if route != own],
                    }
                },
            )
            for number, own in enumerate(routes)
        ]

    @property
    def url(self) -> str:
        """All servers: a client takes one that answers."""
        return ",".join(server.url for server in self.servers)

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(server.start() for server in self.servers))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(server.stop(deadline_s=2.0) for server in self.servers))

    def led_by(self, name: str) -> NatsServer:
        """The server of this name, as NATS calls a leader."""
        return next(server for server in self.servers if server.name == name)
