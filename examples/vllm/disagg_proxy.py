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
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import fastapi
import uvicorn
from fastapi.responses import Response
from workers import (
    RETRY_S,
    Ask,
    Refused,
    WorkerFailed,
    Workers,
    add_paths,
    encoded,
    kept,
    streamed,
    while_there,
)

REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
SINGLE = ("n", "best_of")
"""Numbers of answers: a second one would read the prompt's blocks again."""
LENGTHS = ("max_completion_tokens", "min_tokens")
OF_STREAMS = ("stream", "stream_options")


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
        refuse_several(body)
        headers = {"content-type": "application/json"} | kept(request.headers)
        async with while_there(request):
            computed = await prefilled(prefill, Ask(path, encoded(for_prefill(body)), headers))
        if isinstance(computed, Response):
            return computed
        body |= {"kv_transfer_params": computed}
        answer, _ = await streamed(decode, Ask(path, encoded(body), headers), request)
        return answer

    add_paths(app, complete)
    return app


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


def for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request for one token, whose blocks another worker will read."""
    prefill = {name: value for name, value in body.items() if name not in OF_STREAMS}
    prefill |= {name: 1 for name in LENGTHS if name in body} | {"max_tokens": 1}
    return prefill | {"stream": False, "kv_transfer_params": REMOTE_DECODE}


async def prefilled(workers: Workers, ask: Ask) -> dict[str, Any] | Response:
    """Return where a prefill worker keeps the prompt's blocks, or what it refuses."""
    async with workers.reply(ask) as taken:
        reply = taken.reply
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
