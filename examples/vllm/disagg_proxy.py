"""A proxy for disaggregated serving: each request is prefilled by one worker, decoded by another.

    python3 disagg_proxy.py --port 8000 --prefill URL... --decode URL...

A request goes to the prefill worker with the fewest requests, as one for a single token. Its reply
says where the KV blocks are (`kv_transfer_params`). With that the request goes to the decode worker
with the fewest requests, whose reply the client gets as it comes. It needs what vLLM brings:
FastAPI, uvicorn and httpx.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fastapi
import httpx
import uvicorn
from fastapi.responses import JSONResponse, Response, StreamingResponse

PATHS = ("/v1/completions", "/v1/chat/completions")
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
KEPT = ("authorization", "x-request-id")
"""Headers of the client that a worker needs."""
LENGTHS = ("max_completion_tokens", "min_tokens")
OF_STREAMS = ("stream", "stream_options")
TIMEOUT = httpx.Timeout(None, connect=10)
"""An answer takes as long as it takes; a worker that is gone is noticed when it is connected to."""


@dataclass(frozen=True)
class Ask:
    """A request for a worker."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]


class WorkerFailed(Exception):
    """A worker that gave no answer, or one that cannot be used."""


class Workers:
    """The workers of one kind, and how many requests each has."""

    def __init__(self, kind: str, urls: Sequence[str]) -> None:
        """Create the list of the workers at these addresses."""
        self.client = httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(), trust_env=False)
        self._kind = kind
        self._urls = list(urls)
        self._requests: Counter[str] = Counter()
        self._turns = itertools.count()

    @contextlib.contextmanager
    def one(self) -> Iterator[str]:
        """Give the address of the worker with the fewest requests; among equals they take turns."""
        first = next(self._turns) % len(self._urls)
        url = min(self._urls[first:] + self._urls[:first], key=lambda url: self._requests[url])
        self._requests[url] += 1
        try:
            yield url
        finally:
            self._requests[url] -= 1

    async def send(self, url: str, ask: Ask, *, stream: bool) -> httpx.Response:
        """Send a request to a worker; the body of a stream is still to be read."""
        request = self.client.build_request(
            "POST", url + ask.path, json=ask.body, headers=ask.headers
        )
        try:
            return await self.client.send(request, stream=stream)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise WorkerFailed(f"{self._kind} worker {url} gave no answer: {reason}") from error


def make_app(prefill_urls: Sequence[str], decode_urls: Sequence[str]) -> fastapi.FastAPI:
    """Make the application for these workers."""
    prefill, decode = Workers("prefill", prefill_urls), Workers("decode", decode_urls)

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        async with prefill.client, decode.client:
            yield

    app = fastapi.FastAPI(title="vLLM, disaggregated", lifespan=lifespan)

    async def complete(request: fastapi.Request, body: dict[str, Any]) -> Response:
        headers = {name: request.headers[name] for name in KEPT if name in request.headers}
        try:
            computed = await prefilled(prefill, Ask(request.url.path, body, headers))
            if isinstance(computed, Response):
                return computed
            body |= {"kv_transfer_params": computed}
            return await decoded(decode, Ask(request.url.path, body, headers))
        except WorkerFailed as error:
            message = {"message": str(error), "type": "worker_failed", "code": 502}
            return JSONResponse({"error": message}, status_code=502)

    for path in PATHS:
        app.add_api_route(path, complete, methods=["POST"])
    app.add_api_route("/health", lambda: {"status": "ok"})
    return app


async def prefilled(workers: Workers, ask: Ask) -> dict[str, Any] | Response:
    """Return where a prefill worker keeps the prompt's blocks, or what it refuses."""
    body = {name: value for name, value in ask.body.items() if name not in OF_STREAMS}
    body |= {name: 1 for name in LENGTHS if name in body} | {"max_tokens": 1}
    body |= {"stream": False, "kv_transfer_params": REMOTE_DECODE}
    with workers.one() as url:
        reply = await workers.send(url, Ask(ask.path, body, ask.headers), stream=False)
    if reply.is_error:
        return Response(reply.content, reply.status_code, media_type="application/json")
    found = reply.json().get("kv_transfer_params")
    if not found:
        raise WorkerFailed(f"prefill worker {url} hands no blocks over: has it the NixlConnector?")
    return dict(found)


async def decoded(workers: Workers, ask: Ask) -> Response:
    """Return a decode worker's answer, which passes through while it comes."""

    async def answer() -> AsyncIterator[Any]:
        """Yield the reply, then the pieces of its body."""
        with workers.one() as url:
            reply = await workers.send(url, ask, stream=True)
            try:
                yield reply
                async for piece in reply.aiter_raw():
                    yield piece
            finally:
                await reply.aclose()  # Where the client has gone, the worker stops, too.

    pieces = answer()
    reply = await anext(pieces)  # Begun here, so that its end comes even if nothing is read.
    kind = reply.headers.get("content-type")
    return StreamingResponse(pieces, reply.status_code, media_type=kind)


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    arguments = parser.parse_args()
    app = make_app(arguments.prefill, arguments.decode)
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="info")


if __name__ == "__main__":
    main()
