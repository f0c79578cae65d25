"""What the proxies share: workers, how much each has to do, and answers that pass through."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

PATHS = ("/v1/completions", "/v1/chat/completions")
KEPT = ("authorization", "x-request-id")
"""Headers of the client that a worker needs."""
TIMEOUT = httpx.Timeout(None, connect=10)
"""An answer takes as long as it takes; a worker that is gone is noticed when it is connected to."""
IDLE_S = 2.0
"""How long an idle connection is kept. vLLM closes one after 5 s (`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`),
and so does KVBM's API. A request that leaves in that moment fails, though the engine is healthy."""
LIMITS = httpx.Limits(keepalive_expiry=IDLE_S)
NOT_PASSED = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "content-length", "date", "server",
})  # fmt: skip
"""Headers of a worker's answer that are of its connection, or that the proxy says itself."""
CLIENT_LEFT = 499
"""The status that logs show of a request whose client has left; no client reads it."""
RETRY_S = 5.0
"""Long against a refused connection, short against the start of a worker."""


@dataclass(frozen=True)
class Ask:
    """A request for a worker."""

    path: str
    content: bytes
    headers: dict[str, str]


class Refused(Exception):
    """A request that no worker can take."""


class WorkerFailed(Exception):
    """A worker that gave no answer, or one that cannot be used."""


class ClientLeft(Exception):
    """A client that has gone before its answer began; its worker has stopped."""


@dataclass
class Worker:
    """A worker, and what it has to do for us."""

    url: str
    waiting: int = 0
    """Requests that it has not begun to answer."""
    waiting_blocks: float = 0.0
    """What those cost before their first token, where that is known."""
    running: int = 0
    left_alone_until_s: float = 0.0

    @property
    def requests(self) -> int:
        """Every request that it has."""
        return self.waiting + self.running

    @property
    def is_left_alone(self) -> bool:
        """Whether it has lately refused a connection, or said nothing."""
        return time.monotonic() < self.left_alone_until_s


@dataclass
class Taken:
    """A request that a worker has."""

    worker: Worker
    blocks: float
    reply: httpx.Response
    has_begun: bool = False

    def begin(self) -> None:
        """Note that the answer has begun: the prompt is computed."""
        if not self.has_begun:
            self.has_begun = True
            self.worker.waiting -= 1
            self.worker.waiting_blocks -= self.blocks
            self.worker.running += 1


class Workers:
    """The workers of one kind, how many requests each has, and which are left alone."""

    def __init__(
        self, kind: str, urls: Sequence[str], retry_s: float, timeout: httpx.Timeout = TIMEOUT
    ) -> None:
        """Create the list of the workers at these addresses."""
        self.client = httpx.AsyncClient(timeout=timeout, limits=LIMITS, trust_env=False)
        self.all = {url: Worker(url) for url in urls}
        self._kind = kind
        self._retry_s = retry_s
        self._turns = itertools.count()

    @contextlib.asynccontextmanager
    async def reply(
        self, ask: Ask, costs: Mapping[str, float] | None = None
    ) -> AsyncIterator[Taken]:
        """Give the reply of the first worker that takes a connection, its body still to be read.

        `costs` has addresses in the order in which they are tried. A worker that refuses a
        connection has seen nothing of the request, so the next one is tried. A request that a
        worker has begun is not sent twice.
        """
        refusals = []
        # What a worker sends passes through as it is: it is not to compress for the proxy.
        headers = ask.headers | {"accept-encoding": "identity"}
        for worker, blocks in self._order(costs):
            taken: Taken | None = None
            worker.waiting += 1
            worker.waiting_blocks += blocks
            try:
                async with self.client.stream(
                    "POST", worker.url + ask.path, content=ask.content, headers=headers
                ) as reply:
                    taken = Taken(worker, blocks, reply)
                    yield taken
                return
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                self.leave_alone(worker)
                refusals.append(self._no_answer(worker, error))
            except httpx.HTTPError as error:
                if isinstance(error, httpx.TimeoutException):
                    self.leave_alone(worker)
                raise WorkerFailed(self._no_answer(worker, error)) from error
            finally:
                if taken is not None and taken.has_begun:
                    worker.running -= 1
                else:
                    worker.waiting -= 1
                    worker.waiting_blocks -= blocks
        raise WorkerFailed("; ".join(refusals))

    def leave_alone(self, worker: Worker) -> None:
        """Ask a worker that has not answered last, for some seconds."""
        worker.left_alone_until_s = time.monotonic() + self._retry_s

    def by_load(self) -> Iterator[Worker]:
        """Yield each worker once: that with the fewest requests first; equals take turns.

        Workers that are left alone come last: one of them may be back.
        """
        workers = list(self.all.values())
        first = next(self._turns) % len(workers)
        left = workers[first:] + workers[:first]
        while left:
            worker = min(left, key=lambda one: (one.is_left_alone, one.requests))
            left.remove(worker)
            yield worker

    def _order(self, costs: Mapping[str, float] | None) -> Iterator[tuple[Worker, float]]:
        if costs is None:
            yield from ((worker, 0.0) for worker in self.by_load())
            return
        workers = sorted((self.all[url] for url in costs), key=lambda one: one.is_left_alone)
        yield from ((worker, costs[worker.url]) for worker in workers)

    def _no_answer(self, worker: Worker, error: httpx.HTTPError) -> str:
        return (
            f"{self._kind} worker {worker.url} gave no answer: {str(error) or type(error).__name__}"
        )


async def streamed(
    workers: Workers, ask: Ask, client: Request, costs: Mapping[str, float] | None = None
) -> tuple[Response, Worker]:
    """Return a worker's answer, which passes through while it comes, and the worker.

    Raises ClientLeft if the client goes before the answer begins.
    """

    async def answer() -> AsyncIterator[Any]:
        """Yield what a worker has taken, then the pieces of its body."""
        async with workers.reply(ask, costs) as taken:  # If the client goes, the worker stops, too.
            yield taken
            async for piece in taken.reply.aiter_raw():
                taken.begin()
                yield piece

    pieces = answer()
    async with while_there(client):
        taken = await anext(pieces)  # Begun here, so that its end comes even if nothing is read.
    response = StreamingResponse(pieces, taken.reply.status_code)
    response.raw_headers = passed_headers(taken.reply.headers)
    return response, taken.worker


@contextlib.asynccontextmanager
async def while_there(client: Request) -> AsyncIterator[None]:
    """Do what a client waits for, whose body was read; cancel it, and raise ClientLeft, if the
    client goes."""
    with anyio.CancelScope() as scope:
        watch = asyncio.create_task(_cancel_without(client, scope))
        try:
            yield
        finally:
            watch.cancel()
    if scope.cancelled_caught:
        raise ClientLeft


async def _cancel_without(client: Request, scope: anyio.CancelScope) -> None:
    while (await client.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def passed_headers(headers: httpx.Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers of a worker's answer that are for the client."""
    named = {one.strip().lower() for one in headers.get("connection", "").split(",")}
    return [
        (name.lower(), value)
        for name, value in headers.raw
        if name.decode("latin-1").lower() not in NOT_PASSED | named
    ]


def add_paths(
    app: FastAPI, complete: Callable[[Request, dict[str, Any]], Awaitable[Response]]
) -> None:
    """Serve OpenAI's paths with `complete`, whose errors become replies, and `/health`."""

    async def answer(request: Request, body: dict[str, Any]) -> Response:
        try:
            return await complete(request, body)
        except Refused as error:
            return error_reply(400, "invalid_request_error", str(error))
        except WorkerFailed as error:
            return error_reply(502, "worker_failed", str(error))
        except ClientLeft:
            return Response(status_code=CLIENT_LEFT)

    for path in PATHS:
        app.add_api_route(path, answer, methods=["POST"])
    app.add_api_route("/health", lambda: {"status": "ok"})


def error_reply(status: int, kind: str, message: str) -> Response:
    """Return an error as vLLM has it."""
    return JSONResponse(
        {"error": {"message": message, "type": kind, "code": status}}, status_code=status
    )


def kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what a worker needs of a client's headers; raises Refused."""
    found = {name: headers[name] for name in KEPT if name in headers}
    for name, value in found.items():
        if not (value.isascii() and value.isprintable()):
            raise Refused(f"the header {name} has characters other than printable ASCII")
    return found


def encoded(body: dict[str, Any]) -> bytes:
    """Return a body as JSON; raises Refused for what Python reads and JSON has not."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body cannot be passed on as JSON: {error}") from error
