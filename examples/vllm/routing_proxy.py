"""A proxy for several engines: each request goes to the one that has most of its prompt.

    python3 routing_proxy.py --port 8000 --engine NAME=URL NAME=URL... --token-file FILE

KVBM's `/v1/route` ranks the engines, by the blocks of the prompt that each can reach and by the
requests that this proxy has given to each. NAME is the engine's name in `kvbm workers`. The reply
passes through as it comes; its header `x-kvbm-engine` names the engine. If KVBM does not answer in
time, or knows no engine, the engine with the fewest requests gets the request. An engine that KVBM
does not rank counts as one that has to compute the whole prompt. An engine that refuses a
connection, or sends nothing, is passed over and left alone for some seconds; what an engine has
begun is never sent again. The proxy needs what vLLM brings: FastAPI, uvicorn and httpx.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastapi
import httpx
import uvicorn
from fastapi.responses import Response
from workers import (
    IDLE_S,
    RETRY_S,
    Ask,
    Workers,
    add_paths,
    encoded,
    kept,
    streamed,
)

KVBM = "http://127.0.0.1:6880"
ROUTE_S = 0.5
"""For KVBM's order; usually it takes milliseconds. Then the request goes without one."""
KVBM_LIMITS = httpx.Limits(
    max_connections=100, max_keepalive_connections=20, keepalive_expiry=IDLE_S
)
TOKENIZE_S = 2.0
"""For a prompt's tokens, which an engine makes of its text."""
SILENCE_S = 600.0
"""An engine that sends nothing for so long is taken for dead: the longest prefill is shorter."""
CONNECT_S = 2.0
RUNNING_BLOCKS = 1.0
"""What a running request costs an engine that KVBM does not rank, as KVBM counts it."""
POLICIES = ("route", "turns", "random")
TOKENIZED = ("model", "prompt", "messages", "tools", "chat_template", "chat_template_kwargs",
             "add_generation_prompt", "continue_final_message", "add_special_tokens")  # fmt: skip
"""What of a request decides its tokens."""

log = logging.getLogger("uvicorn.error")


class NoOrder(Exception):
    """No order of engines can be had, and why."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    engines: Mapping[str, str]
    """Name → address."""
    policy: str = "route"
    kvbm: str = KVBM
    token_file: Path | None = None
    """Holds the token for KVBM's API; it is read again when KVBM refuses it."""
    route_s: float = ROUTE_S
    silence_s: float = SILENCE_S
    retry_s: float = RETRY_S


class Router:
    """Asks KVBM which engine should take a request."""

    def __init__(self, options: Options, workers: Workers) -> None:
        self.client = httpx.AsyncClient(
            base_url=options.kvbm, timeout=options.route_s, limits=KVBM_LIMITS, trust_env=False
        )
        self._options = options
        self._read_token()
        self._workers = workers
        self._turns = itertools.count()
        self._namespace: dict[str, Any] | None = None
        self._left_alone_until_s = 0.0

    async def costs(self, tokens: list[int] | None, salt: object) -> dict[str, float]:
        """Return addresses with the blocks that each has to compute, the best engine first."""
        urls = list(self._workers.all)
        if self._options.policy == "random":
            return dict.fromkeys(random.sample(urls, len(urls)), 0.0)
        if self._options.policy == "turns":
            first = next(self._turns) % len(urls)
            return dict.fromkeys(urls[first:] + urls[:first], 0.0)
        ranked: dict[str, float] = {}
        if tokens is not None and time.monotonic() >= self._left_alone_until_s:
            try:
                ranked = await self._ranked(tokens, salt)
            except NoOrder as error:
                log.warning("the engine with the fewest requests is taken: %s", error)
        return ranked | {one.url: 0.0 for one in self._workers.by_load() if one.url not in ranked}

    async def tokens(self, ask: Ask, body: dict[str, Any]) -> list[int] | None:
        """Return the tokens of a prompt, which an engine makes of a text; None: it has not."""
        prompt = body.get("prompt")
        if self._options.policy != "route":
            return None
        if isinstance(prompt, list) and all(isinstance(one, int) for one in prompt):
            return prompt
        content = encoded({name: body[name] for name in TOKENIZED if name in body})
        worker = next(self._workers.by_load())
        try:
            reply = await self._workers.client.post(
                f"{worker.url}/tokenize", content=content, headers=ask.headers, timeout=TOKENIZE_S
            )
            tokens = reply.raise_for_status().json()["tokens"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            if isinstance(error, httpx.TimeoutException | httpx.ConnectError):
                self._workers.leave_alone(worker)
            log.warning("%s has not tokenized a prompt: %r", worker.url, error)
            return None
        return tokens if isinstance(tokens, list) else None

    async def _ranked(self, tokens: list[int], salt: object) -> dict[str, float]:
        """Return what KVBM says; raises NoOrder."""
        if self._namespace is None:
            self._namespace = await self._ask("GET", "/v1/workers", self._namespace_of)
        question = {
            "tokens": tokens,
            "namespace": self._namespace,
            "salt": salt,
            "engines": [self._load(name) for name in self._options.engines],
        }
        before = {one.url: one.waiting_blocks for one in self._workers.all.values()}
        asked, ranked = await self._ask("POST", "/v1/route", self._costs_of, question)
        if not ranked:  # The engines may have another model now.
            self._namespace = None
            raise NoOrder("KVBM ranks no engine")

        for url, worker in self._workers.all.items():
            if url not in ranked:  # What KVBM does not know has nothing of the prompt.
                queue = before[url] + worker.running * RUNNING_BLOCKS
                ranked[url] = (asked + queue, asked)

        def cost_now(url: str) -> float:
            """Return the whole cost, with what the engine has been given meanwhile."""
            given = self._workers.all[url].waiting_blocks - before[url]
            return float(ranked[url][0]) + given

        return {url: ranked[url][1] for url in sorted(ranked, key=cost_now)}

    def _load(self, name: str) -> dict[str, Any]:
        worker = self._workers.all[self._options.engines[name]]
        return {
            "source": name,
            "running": worker.running,
            "waiting": worker.waiting,
            "waiting_blocks": max(0.0, worker.waiting_blocks),
        }

    def _namespace_of(self, workers: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the namespace of the first engine that KVBM knows; all are to have one model."""
        found = (one for one in workers if one["engine"] in self._options.engines)
        fields = next((one["namespace_fields"] for one in found), None)
        if fields is None:
            raise NoOrder(f"no engine is attached of {', '.join(self._options.engines)}")
        return dict(fields)

    def _costs_of(self, reply: dict[str, Any]) -> tuple[float, dict[str, tuple[float, float]]]:
        """Return the blocks of the prompt, then by engine the whole cost, and the part that is of
        this request alone."""
        costs: dict[str, tuple[float, float]] = {}
        for one in reply["engines"]:
            # The first rank of an engine is its best one.
            url = self._options.engines[one["source"]]
            costs.setdefault(url, (one["cost"], one["compute"] + one["load"]))
        return float(reply["asked"]), costs

    def _read_token(self) -> None:
        """Send the token that the file holds now from here on; raises OSError."""
        path = self._options.token_file
        if path is not None and (token := path.read_text().strip()):
            self.client.headers["authorization"] = f"Bearer {token}"

    async def _request(
        self, method: str, path: str, question: dict[str, Any] | None
    ) -> httpx.Response:
        """Return KVBM's answer; a token that was replaced is read once more."""
        reply = await self.client.request(method, path, json=question)
        if reply.status_code != httpx.codes.UNAUTHORIZED:
            return reply
        try:
            self._read_token()
        except OSError as error:
            raise NoOrder(f"the token cannot be read: {error}") from error
        # Another request may have read the new one first.
        if self.client.headers.get("authorization") == reply.request.headers.get("authorization"):
            return reply
        return await self.client.request(method, path, json=question)

    async def _ask(
        self, method: str, path: str, read: Any, question: dict[str, Any] | None = None
    ) -> Any:
        try:
            reply = await self._request(method, path, question)
            return read(reply.raise_for_status().json())
        except httpx.HTTPStatusError as error:
            answer = error.response
            raise NoOrder(f"{path}: status {answer.status_code}: {answer.text}") from error
        except httpx.HTTPError as error:
            self._left_alone_until_s = time.monotonic() + self._options.retry_s
            raise NoOrder(f"{path}: {error!r}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise NoOrder(f"{path} has another form: {error!r}") from error


def make_app(options: Options) -> fastapi.FastAPI:
    """Make the application for these engines."""
    timeout = httpx.Timeout(options.silence_s, connect=CONNECT_S)
    workers = Workers("vLLM", list(options.engines.values()), options.retry_s, timeout)
    router = Router(options, workers)
    name_of = {url: name for name, url in options.engines.items()}

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        async with workers.client, router.client:
            yield

    app = fastapi.FastAPI(title="vLLM, routed", lifespan=lifespan)

    async def complete(request: fastapi.Request, body: dict[str, Any]) -> Response:
        headers = {"content-type": "application/json"} | kept(request.headers)
        ask = Ask(request.url.path, encoded(body), headers)
        tokens = await router.tokens(ask, body)
        costs = await router.costs(tokens, body.get("cache_salt"))
        # No other task runs before the request counts: `streamed` waits for its answer only.
        answer, worker = await streamed(workers, ask, request, costs)
        answer.headers["x-kvbm-engine"] = name_of[worker.url]
        return answer

    add_paths(app, complete)
    return app


def engine_of(text: str) -> tuple[str, str]:
    """Read NAME=URL; raises ValueError, which argparse reports."""
    name, _, url = text.partition("=")
    if not (name and url.startswith(("http://", "https://"))):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL, as vllm-0=http://host:8000")
    return name, url.rstrip("/")


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--engine", nargs="+", type=engine_of, required=True, metavar="NAME=URL")
    parser.add_argument("--policy", choices=POLICIES, default="route",
                        help="how an engine is chosen: by KVBM, in turn, or by lot")  # fmt: skip
    parser.add_argument("--kvbm", default=KVBM, metavar="URL", help="KVBM's HTTP API")
    parser.add_argument("--token-file", type=Path, metavar="FILE",
                        help="a token, as the one of `kvbm creds admin-token`")  # fmt: skip
    parser.add_argument("--route-s", type=float, default=ROUTE_S, metavar="S",
                        help="how long KVBM may take for an order")  # fmt: skip
    parser.add_argument("--silence-s", type=float, default=SILENCE_S, metavar="S",
                        help="how long an engine may send nothing")  # fmt: skip
    parser.add_argument("--retry-s", type=float, default=RETRY_S, metavar="S",
                        help="how long what refuses a connection is left alone")  # fmt: skip
    arguments = parser.parse_args()
    options = Options(
        engines=dict(arguments.engine),
        policy=arguments.policy,
        kvbm=arguments.kvbm,
        token_file=arguments.token_file,
        route_s=arguments.route_s,
        silence_s=arguments.silence_s,
        retry_s=arguments.retry_s,
    )
    uvicorn.run(make_app(options), host=arguments.host, port=arguments.port, log_level="info")


if __name__ == "__main__":
    main()
