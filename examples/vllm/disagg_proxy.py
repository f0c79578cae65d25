"""A proxy for disaggregated serving: each request is prefilled by one worker, decoded by another.

    python3 disagg_proxy.py --port 8000 --prefill URL... --decode URL...

A request goes to the prefill worker with the fewest requests, as one for a single token. Its reply
says where the KV blocks are (`kv_transfer_params`). With that the request goes to the decode worker
with the fewest requests, whose reply the client gets as it comes. A request has one prompt and one
answer. A worker that refuses a connection is left alone for some seconds. The proxy needs what vLLM
brings: FastAPI, uvicorn and httpx.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
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
SINGLE = ("n", "best_of")
"""Numbers of answers: a second one would read the prompt's blocks again."""
LENGTHS = ("max_completion_tokens", "min_tokens")
OF_STREAMS = ("stream", "stream_options")
TIMEOUT = httpx.Timeout(None, connect=10)
"""An answer takes as long as it takes; a worker that is gone is noticed when it is connected to."""
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


class Workers:
    """The workers of one kind, how many requests each has, and which are left alone."""

    def __init__(self, kind: str, urls: Sequence[str], retry_s: float) -> None:
        """Create the list of the workers at these addresses."""
        self.client = httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(), trust_env=False)
        self._kind = kind
        self._urls = list(urls)
        self._retry_s = retry_s
        self._requests: Counter[str] = Counter()
        self._left_alone_until_s: dict[str, float] = {}
        self._turns = itertools.count()

    @contextlib.asynccontextmanager
    async def reply(self, ask: Ask) -> AsyncIterator[httpx.Response]:
        """Give the reply of the first worker that takes a connection, its body still to be read.

        A worker that refuses it has seen nothing of the request, so the next one is tried. A
        request that a worker has begun is not sent twice.
        """
        refusals = []
        for url in self._candidates():
            self._requests[url] += 1
            try:
                async with self.client.stream(
                    "POST", url + ask.path, content=ask.content, headers=ask.headers
                ) as reply:
                    yield reply
                return
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                self._left_alone_until_s[url] = time.monotonic() + self._retry_s
                refusals.append(self._no_answer(url, error))
            except httpx.HTTPError as error:
                raise WorkerFailed(self._no_answer(url, error)) from error
            finally:
                self._requests[url] -= 1
        raise WorkerFailed("; ".join(refusals))

    def _candidates(self) -> Iterator[str]:
        """Yield each address once: that with the fewest requests first; equals take turns.

        Workers that are left alone come last: one of them may be back.
        """
        first = next(self._turns) % len(self._urls)
        left = self._urls[first:] + self._urls[:first]
        while left:
            url = min(left, key=self._burden)
            left.remove(url)
            yield url

    def _burden(self, url: str) -> tuple[bool, int]:
        left_alone = time.monotonic() < self._left_alone_until_s.get(url, 0)
        return left_alone, self._requests[url]

    def _no_answer(self, url: str, error: httpx.HTTPError) -> str:
        return f"{self._kind} worker {url} gave no answer: {error or type(error).__name__}"


def make_app(
    prefill_urls: Sequence[str], decode_urls: Sequence[str], retry_s: float = RETRY_S
) -> fastapi.FastAPI:
    """Make the application for these workers."""
    prefill = Workers("prefill", prefill_urls, retry_s)
    decode = Workers("decode", decode_urls, retry_s)

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        async with prefill.client, decode.client:
            yield

    app = fastapi.FastAPI(title="vLLM, disaggregated", lifespan=lifespan)

    async def complete(request: fastapi.Request, body: dict[str, Any]) -> Response:
        path = request.url.path
        try:
            refuse_several(body)
            headers = {"content-type": "application/json"} | kept(request.headers)
            computed = await prefilled(prefill, Ask(path, encoded(for_prefill(body)), headers))
            if isinstance(computed, Response):
                return computed
            body |= {"kv_transfer_params": computed}
            return await decoded(decode, Ask(path, encoded(body), headers))
        except Refused as error:
            return error_reply(400, "invalid_request_error", str(error))
        except WorkerFailed as error:
            return error_reply(502, "worker_failed", str(error))

    for path in PATHS:
        app.add_api_route(path, complete, methods=["POST"])
    app.add_api_route("/health", lambda: {"status": "ok"})
    return app


def error_reply(status: int, kind: str, message: str) -> Response:
    """Return an error as vLLM has it."""
    return JSONResponse(
        {"error": {"message": message, "type": kind, "code": status}}, status_code=status
    )


def refuse_several(body: dict[str, Any]) -> None:
    """Raise Refused unless the request has one prompt and one answer.

    A prefill worker says where the blocks of the first prompt are, and they can be read once.
    """
    prompt, embeds = body.get("prompt"), body.get("prompt_embeds")
    tokens = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    count = sum(
        len(given) if isinstance(given, list) else given is not None
        for given in ([prompt] if tokens else prompt, embeds)
    )
    if count > 1:
        raise Refused(f"the proxy takes one prompt in a request, not {count}")
    for name in SINGLE:
        if body.get(name) not in (None, 1):
            raise Refused(f"the proxy takes one prompt with one answer: {name} has to be 1")


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


def for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request for one token, whose blocks another worker will read."""
    prefill = {name: value for name, value in body.items() if name not in OF_STREAMS}
    prefill |= {name: 1 for name in LENGTHS if name in body} | {"max_tokens": 1}
    return prefill | {"stream": False, "kv_transfer_params": REMOTE_DECODE}


async def prefilled(workers: Workers, ask: Ask) -> dict[str, Any] | Response:
    """Return where a prefill worker keeps the prompt's blocks, or what it refuses."""
    async with workers.reply(ask) as reply:
        content = await reply.aread()
    if reply.is_error:
        return Response(content, reply.status_code, media_type="application/json")
    try:
        found = json.loads(content)["kv_transfer_params"]
        if found and encoded(found) and isinstance(found, dict):
            return found
    except (ValueError, RecursionError, LookupError, TypeError, Refused):
        pass  # What it answers is no JSON, or has other parts.
    url = str(reply.url).removesuffix(ask.path)
    raise WorkerFailed(f"prefill worker {url} hands no blocks over: has it the NixlConnector?")


async def decoded(workers: Workers, ask: Ask) -> Response:
    """Return a decode worker's answer, which passes through while it comes."""

    async def answer() -> AsyncIterator[Any]:
        """Yield the reply, then the pieces of its body."""
        async with workers.reply(ask) as reply:  # Where the client has gone, the worker stops, too.
            yield reply
            async for piece in reply.aiter_raw():
                yield piece

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
    left_alone = "how long a worker that refuses a connection is left alone"
    parser.add_argument("--retry-s", type=float, default=RETRY_S, metavar="S", help=left_alone)
    arguments = parser.parse_args()
    app = make_app(arguments.prefill, arguments.decode, arguments.retry_s)
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="info")


if __name__ == "__main__":
    main()
