"""A server whose answers to S3's requests are whatever a test wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from email.utils import formatdate
from urllib.parse import parse_qs, urlsplit

from kvbm_disk_tier.objects.shell.s3_client import BucketOptions

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
BUCKET = "odd"


def http(
    body: str | bytes, *, status: str = "200 OK", date: str | None = None, length: int | None = None
) -> bytes:
    """Return an answer; its `length` may lie."""
    data = body.encode() if isinstance(body, str) else body
    head = [
        f"HTTP/1.1 {status}",
        f"Date: {formatdate(usegmt=True) if date is None else date}",
        f"Content-Length: {len(data) if length is None else length}",
        "Connection: close",
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def listing(
    *names: str,
    prefix: str,
    truncated: str = "false",
    stored: str = "2026-11-24T10:00:00.000Z",
    size: str = "5000",
) -> str:
    """Return the XML of a listing."""
    entries = "".join(
        f"<Contents><Key>{name}</Key><LastModified>{stored}</LastModified>"
        f"<Size>{size}</Size></Contents>"
        for name in names
    )
    return (
        f'<?xml version="1.0"?><ListBucketResult xmlns="{NAMESPACE}"><Name>{BUCKET}</Name>'
        f"<Prefix>{prefix}</Prefix><KeyCount>{len(names)}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>{truncated}</IsTruncated>{entries}</ListBucketResult>"
    )


Answer = Callable[[str, dict[str, str]], bytes]
"""Method and query to the bytes of an answer."""


class OddServer:
    """Answers with `answer`, or drips."""

    def __init__(self) -> None:
        self.answer: Answer = lambda _method, query: http(listing(prefix=query.get("prefix", "")))
        self.drips = False
        """A byte of each answer at a time, until the client has gone."""
        self.cut_off = 0
        """Dripping connections that the client has cut."""
        self.requests: list[tuple[str, dict[str, str]]] = []
        self._streams: set[asyncio.StreamWriter] = set()
        self._port = 0

    async def serve(self) -> asyncio.Server:
        """Listen on a free port."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        return server

    @property
    def options(self) -> BucketOptions:
        """How the product is told of it."""
        return BucketOptions(
            bucket=BUCKET, endpoint=f"http://127.0.0.1:{self._port}", access_key="key",
            secret_key="secret",
        )  # fmt: skip

    def drop(self) -> None:
        """Cut every connection."""
        for stream in self._streams:
            stream.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._streams.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, target, _ = head.split("\r\n", 1)[0].split(" ")
            url = urlsplit(target)
            query = {key: values[0] for key, values in parse_qs(url.query, True).items()}
            lengths = [line for line in head.lower().split("\r\n") if "content-length" in line]
            if lengths:
                await reader.readexactly(int(lengths[0].split(":")[1]))
            self.requests.append((method, query))
            answer = self.answer(method, query)
            if self.drips:
                await self._drip(writer, answer)
            else:
                writer.write(answer)
                await writer.drain()
        self._streams.discard(writer)
        writer.close()

    async def _drip(self, writer: asyncio.StreamWriter, answer: bytes) -> None:
        try:
            for at in range(10_000):
                writer.write(answer[at : at + 1] if at < 40 else b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        except ConnectionError:
            self.cut_off += 1
            raise
