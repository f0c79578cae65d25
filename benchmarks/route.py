"""Routing: a chat load before two sim engines behind `routing_proxy.py`, and what `route` costs."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fastapi
import httpx
import msgspec
import numpy as np
import uvicorn
from fastapi.responses import StreamingResponse
from kvbm_cli.demo.command import DemoOptions
from kvbm_cli.stack import Stack
from kvbm_common.identity import Hasher, Namespace
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.registry.records import ENGINE
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import dying_with_parent, free_port
from kvbm_common.wire.events import Cleared, Event, Run, Stored, event_subject
from kvbm_common.wire.routes import RouteReply, RouteRequest
from kvbm_common.wire.verbs import verb_subject
from kvbm_connectors.sim.control import Finished, Submit
from kvbm_connectors.sim.driver import EngineHandle
from kvbm_connectors.sim.workload import Turn, conversations

from benchmarks.harness import Row, info_row, percentile, time_row

PROXY = Path(__file__).parent.parent / "examples" / "vllm" / "routing_proxy.py"
REQUESTS = 240
CONCURRENCY = 8
"""Four for each engine, as in `kvbm demo`."""
ENGINES = 2
SETTINGS = {"cpu_cache_gb": 0.1, "disk_cache_gb": 0, "peer_pulls": False}
BLOCK_KIB = 64
DEVICE_BLOCKS = 1_024
PREFILL_US_PER_TOKEN = 200.0
"""5,000 tokens a second: the model takes longer than the processes around it."""
HOSTS = {"two hosts": 2, "one host": 1}
"""Engines on two hosts share nothing here; those on one host share its memory."""
FIRST = ("index", "metrics", "consolidator", "host-tier")
OTHERS = ("consolidator", "host-tier")
POLICIES = {"route": "routed", "turns": "round robin", "random": "random"}
ASKED_ENGINES = 8
ASKED_BLOCKS = 512
QUESTIONS = 300
TOKEN = "a-token-to-read"
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}
START_S = 30.0
ANSWER_S = 60.0


def run() -> list[Row]:
    """Each policy over the same load, on a stack of its own; then `route` by itself."""
    rows: list[Row] = []
    for name, hosts in HOSTS.items():
        found = {policy: asyncio.run(_chat(hosts, policy)) for policy in POLICIES}
        rows += _rows(name, found)
    return rows + asyncio.run(_costs())


# --- a chat load through the proxy ------------------------------------------------------------


@dataclass(slots=True)
class Answers:
    """What came back of a load."""

    ttft_ms: list[float] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)

    @property
    def computed(self) -> float:
        """The part of all prompt tokens that was computed."""
        hit = sum(f.device_blocks + f.host_blocks + f.disk_blocks for f in self.finished)
        return 1 - 16 * hit / sum(f.tokens for f in self.finished)

    @property
    def device_hits(self) -> float:
        """The part of all prompt tokens that the engine's own device had."""
        hit = sum(f.device_blocks for f in self.finished)
        return 16 * hit / sum(f.tokens for f in self.finished)


def _rows(name: str, found: dict[str, Answers]) -> list[Row]:
    rows = []
    robin = found["turns"]
    for policy, called in POLICIES.items():
        one, target = found[policy], 1.0 if policy == "route" else None
        figures = (
            ("prompt tokens computed", one.computed * 100, robin.computed * 100, "%"),
            ("time to first token, p50", percentile(one.ttft_ms, 0.5),
             percentile(robin.ttft_ms, 0.5), "ms"),
            ("time to first token, p90", percentile(one.ttft_ms, 0.9),
             percentile(robin.ttft_ms, 0.9), "ms"),
        )  # fmt: skip
        for what, value, reference, unit in figures:
            text = f"{name}: {what}, {called}"
            if target is None:
                rows.append(info_row(text, value, unit=unit))
            else:
                text += " (reference: round robin)"
                rows.append(time_row(text, value, unit=unit, target=target, reference=reference))
        rows.append(info_row(f"{name}: tokens found in the device, {called}",
                             one.device_hits * 100, unit="%"))  # fmt: skip
    return rows


async def _chat(hosts: int, policy: str) -> Answers:
    async with engines_served(hosts) as (stack, fronts):
        url = stack.services["metrics"].description
        with proxy(fronts, url, "--policy", policy) as address:
            return await chat(address, requests=REQUESTS)


@contextlib.asynccontextmanager
async def engines_served(hosts: int) -> AsyncIterator[tuple[Stack, dict[str, str]]]:
    """Run the services of so many hosts, and two sim engines with an HTTP front each.

    Gives the stack with the HTTP API, and names and addresses of the engines.
    """
    options = DemoOptions(engines=ENGINES, block_kib=BLOCK_KIB)
    settings = SETTINGS | {"admin_read_token": TOKEN}
    async with contextlib.AsyncExitStack() as cleanup:
        directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        server = NatsServer(directory / "nats", port=free_port())
        await cleanup.enter_async_context(server)
        stacks = [
            await cleanup.enter_async_context(
                Stack.private(settings, services=services, nats_url=server.url)
            )
            for services in (FIRST, OTHERS)[:hosts]
        ]
        fronts: dict[str, str] = {}
        for number in range(ENGINES):
            stack = stacks[number % hosts]
            config = msgspec.structs.replace(
                options.engine_config(number, stack.settings),
                block_count=DEVICE_BLOCKS,
                prefill_us_per_token=PREFILL_US_PER_TOKEN,
            )
            assert stack.log_dir is not None
            engine = EngineHandle(config, log_path=stack.log_dir / f"{config.name}.log")
            cleanup.push_async_callback(engine.stop)
            assert await engine.start(), f"{config.name} has not attached"
            fronts[config.name] = await cleanup.enter_async_context(front(engine))
        await _wait_ranked(stacks[0], set(fronts))
        yield stacks[0], fronts


@contextlib.asynccontextmanager
async def front(engine: EngineHandle) -> AsyncIterator[str]:
    """Serve a sim engine over HTTP as vLLM would: completions of token ids, streamed."""
    app = fastapi.FastAPI()

    @app.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> StreamingResponse:
        submit = Submit(
            request=body["request_id"],
            prompt=np.array(body["prompt"], dtype="<u4").tobytes(),
            outputs=np.array(body["outputs"], dtype="<u4").tobytes(),
        )

        async def answer() -> AsyncIterator[bytes]:
            yield msgspec.json.encode(await engine.request(submit))

        return StreamingResponse(answer(), media_type="text/event-stream")

    port = free_port()
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())  # Without its signal handlers.
    url = f"http://127.0.0.1:{port}"
    try:
        await _wait_answer(f"{url}/openapi.json")
        yield url
    finally:
        server.should_exit = True
        await serving


@contextlib.contextmanager
def proxy(fronts: dict[str, str], kvbm: str, *words: str) -> Iterator[str]:
    """Run the example before the engines; gives its address."""
    port = free_port()
    with tempfile.TemporaryFile() as errors, tempfile.NamedTemporaryFile("w") as token:
        token.write(TOKEN)
        token.flush()
        process = subprocess.Popen(
            [sys.executable, str(PROXY), "--port", str(port), "--kvbm", kvbm,
             "--token-file", token.name,
             *words, "--engine",
             *(f"{name}={url}" for name, url in fronts.items())],
            stdout=errors, stderr=errors, preexec_fn=dying_with_parent(),
        )  # fmt: skip
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(START_S)


async def chat(address: str, *, requests: int, seed: int = 0) -> Answers:
    """Send the turns of conversations, each in order, so many at a time."""
    await _wait_answer(f"{address}/health")
    answers, slots = Answers(), asyncio.Semaphore(CONCURRENCY)
    last: dict[int, asyncio.Task[None]] = {}
    async with (
        httpx.AsyncClient(base_url=address, timeout=ANSWER_S) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for number, turn in enumerate(conversations(requests=requests, seed=seed)):
            before = last.get(turn.conversation)
            sending = _send(client, turn, f"r{number}", before, slots, answers)
            last[turn.conversation] = tasks.create_task(sending)
    assert len(answers.finished) == requests, len(answers.finished)
    return answers


async def _send(
    client: httpx.AsyncClient,
    turn: Turn,
    request: str,
    before: asyncio.Task[None] | None,
    slots: asyncio.Semaphore,
    answers: Answers,
) -> None:
    if before is not None:
        await asyncio.wait([before])
    body = {"prompt": turn.prompt.tolist(), "outputs": turn.outputs.tolist(), "request_id": request}
    async with slots:
        started = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            reply.raise_for_status()
            content = b"".join([piece async for piece in reply.aiter_raw()])
        answers.ttft_ms.append((time.perf_counter() - started) * 1e3)
    finished = msgspec.json.decode(content, type=Finished)
    assert not finished.error, finished.error
    answers.finished.append(finished)


async def _wait_answer(url: str) -> None:
    give_up_s = time.monotonic() + START_S
    async with httpx.AsyncClient() as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                (await client.get(url)).raise_for_status()
                return
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{url} does not answer")
            await asyncio.sleep(0.05)


async def _wait_ranked(stack: Stack, names: set[str]) -> None:
    """Wait until the index ranks these engines."""
    give_up_s = time.monotonic() + START_S
    url = stack.services["metrics"].description
    async with httpx.AsyncClient(base_url=url, headers=AUTHORIZED) as client:
        while True:
            reply = await client.post("/v1/route", json={"hashes": []})
            if reply.is_success and names <= {one["source"] for one in reply.json()["engines"]}:
                return
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"not ranked: {reply.text}")
            await asyncio.sleep(0.05)


# --- what a question costs --------------------------------------------------------------------


async def _costs() -> list[Row]:
    """Ask for 512 blocks, of which eight engines have 64, 128, … each."""
    namespace = Namespace(model="m", block_tokens=16)
    tokens = np.random.default_rng(0).integers(0, 32_000, ASKED_BLOCKS * 16, dtype=np.uint32)
    names = [name.hex() for name in Hasher(namespace).chain(tokens)]
    async with contextlib.AsyncExitStack() as cleanup:
        stack = await cleanup.enter_async_context(
            Stack.private({"admin_read_token": TOKEN}, services=("index", "metrics"))
        )
        bus = await Bus.connect(stack.admin, "bench", counters=Metrics(), deadline_s=5)
        cleanup.push_async_callback(bus.close)
        registry = NatsRegistry(bus, ttl_s=stack.settings.registry_ttl_s)
        cleanup.push_async_callback(registry.close)
        for number in range(ASKED_ENGINES):
            part = names[: ASKED_BLOCKS // ASKED_ENGINES * (number + 1)]
            await _enter(bus, registry, namespace, f"e{number}", part)
        await _wait_ranked(stack, {f"e{number}" for number in range(ASKED_ENGINES)})
        by_hashes = RouteRequest(hashes=names)
        by_tokens = RouteRequest(tokens=tokens.tolist(), namespace=namespace)
        url = stack.services["metrics"].description
        async with httpx.AsyncClient(base_url=url, headers=AUTHORIZED) as client:
            rows = []
            for what, request in (("hashes", by_hashes), ("tokens", by_tokens)):
                rows += _percentiles(f"`route` on NATS, {what}", await _on_nats(bus, request), 5.0)
            body = {"tokens": tokens.tolist(), "namespace": msgspec.to_builtins(namespace)}
            return rows + _percentiles("`POST /v1/route`, tokens", await _over_http(client, body))


async def _enter(
    bus: Bus, registry: NatsRegistry, namespace: Namespace, name: str, blocks: Sequence[str]
) -> None:
    life = await registry.register(ENGINE, "h", name, {"namespaces": namespace.digest.hex()})
    publisher = bus.event_publisher(name)
    publishing = asyncio.create_task(publisher.run())
    about: dict[str, Any] = {"host": "h", "source": name, "tier": "device", "epoch": life.epoch,
                             "ts_ms": 0}  # fmt: skip
    run = Run(parent=namespace.root.hex(), hashes=list(blocks))
    events: list[Event] = [
        Cleared(**about, seq=1),
        Stored(**about, seq=2, namespace=namespace.digest.hex(), runs=[run]),
    ]
    for event in events:
        payload = msgspec.json.encode(event)
        publisher.publish(event_subject(event), payload, epoch=event.epoch, seq=event.seq)
    await publisher.flush(deadline_s=START_S)
    publishing.cancel()


async def _on_nats(bus: Bus, request: RouteRequest) -> list[float]:
    seconds = []
    for _ in range(QUESTIONS):
        started = time.perf_counter()
        payload = msgspec.json.encode(request)
        reply = await bus.request(verb_subject("index", "route"), payload, deadline_s=5)
        found = msgspec.json.decode(reply, type=RouteReply).engines
        seconds.append(time.perf_counter() - started)
        assert [one.source for one in found] == [f"e{n}" for n in reversed(range(ASKED_ENGINES))]
    return seconds


async def _over_http(client: httpx.AsyncClient, body: dict[str, Any]) -> list[float]:
    seconds = []
    for _ in range(QUESTIONS):
        started = time.perf_counter()
        reply = await client.post("/v1/route", json=body)
        seconds.append(time.perf_counter() - started)
        assert reply.json()["engines"][0]["source"] == f"e{ASKED_ENGINES - 1}", reply.text
    return seconds


def _percentiles(what: str, seconds: Sequence[float], target: float | None = None) -> list[Row]:
    text = f"{what}: {ASKED_BLOCKS} blocks, {ASKED_ENGINES} engines"
    p99 = percentile(seconds, 0.99) * 1e3
    return [
        info_row(f"{text}, p50", percentile(seconds, 0.5) * 1e3, unit="ms"),
        time_row(f"{text}, p99", p99, unit="ms", target=target)
        if target is not None
        else info_row(f"{text}, p99", p99, unit="ms"),
    ]
