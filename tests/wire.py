"""A wire between two servers of one machine, which can be cut and healed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

CHUNK_BYTES = 65_536


class Wire:
    """Listens on a free port of loopback, and hands on what comes to a port there and back.

    While it is cut, connections stay open and hear nothing, as across a network that drops every
    packet. When it is healed, these end, for what was on its way is lost.
    """

    def __init__(self) -> None:
        self.port = 0
        """Known inside `async with`."""
        self._target = 0
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[object]] = set()
        self._whole = asyncio.Event()
        self._whole.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def lead_to(self, port: int) -> None:
        """Connections from now on lead to this port."""
        self._target = port

    def cut(self) -> None:
        """Nothing comes through."""
        self._whole.clear()

    def heal(self) -> None:
        """New connections come through."""
        self._whole.set()

    async def _serve(self, near: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            with contextlib.suppress(OSError):
                await self._whole.wait()
                await self._join(near, answer)
        finally:
            answer.close()

    async def _join(self, near: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        far, ask = await asyncio.open_connection("127.0.0.1", self._target)
        ways = [
            asyncio.create_task(self._carry(near, ask)),
            asyncio.create_task(self._carry(far, answer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ask.close()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Hand on until an end, or until the wire was cut and is healed."""
        while data := await source.read(CHUNK_BYTES):
            if not self._whole.is_set():
                await self._whole.wait()
                return
            sink.write(data)
            await sink.drain()
