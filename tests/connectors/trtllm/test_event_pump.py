"""TensorRT-LLM's pulled events, from its HTTP path to the index."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kvbm_common.identity import request_extras
from kvbm_common.runtime.processes import free_port
from kvbm_connectors.client.zmq_event_publisher import EventPublisher
from kvbm_connectors.trtllm import event_pump
from kvbm_connectors.trtllm.event_pump import EventPump, of_llm, of_server

from tests.connectors.trtllm.engine import BLOCK_TOKENS
from tests.connectors.trtllm.package import args_of
from tests.connectors.trtllm.running import engine_on
from tests.vllm.harness import LiveStack
from tests.waiting import wait_for


class Server(ThreadingHTTPServer):
    """`POST /kv_cache_events` of trtllm-serve: hands each event out once."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.broken = 0
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        assert self.path == "/kv_cache_events"
        taken, self.server.events = self.server.events, []
        status = 200 if not self.server.broken else 500
        self.server.broken = max(0, self.server.broken - 1)
        body = json.dumps(taken).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(5)


def free_pair() -> int:
    """A port for events, with one for replays."""
    return free_port(also_above=1000)


def stored(event_id: int, tokens: list[int], salt: str | None = None) -> dict[str, Any]:
    """One `stored` event of a chain from the beginning."""
    blocks = [
        {
            "type": "stored_block", "block_hash": 1000 * event_id + start, "cache_level": 0,
            "tokens": [
                {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                for token in tokens[start : start + BLOCK_TOKENS]
            ],
            "priority": 35, "mm_keys": [], "cache_salt": salt,
        }
        for start in range(0, len(tokens), BLOCK_TOKENS)
    ]  # fmt: skip
    data = {"type": "stored", "parent_hash": None, "blocks": blocks}
    return {"event_id": event_id, "data": data, "window_size": 4096}


@pytest.mark.slow
def test_pulled_events_reach_the_index_under_our_names(
    stack: LiveStack, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The server is out of order at first, and asked again. 2. Two prompts are stored, one under
    a salt: the index has them on the device, under the names that the leader gives. 3. Events of
    another layout clear what was said, and what comes after is there.
    """
    monkeypatch.setattr(event_pump, "RETRY_S", 0.05)
    port = free_pair()
    server.broken = 1
    pump = EventPump(of_server(server.url), block_tokens=BLOCK_TOKENS, port=port)
    pump.start()
    variables = {"DYN_KVBM_TRTLLM_ZMQ_PORT": str(port)}
    with engine_on(stack, monkeypatch, variables=variables) as engine:
        namer, name = engine.hasher, engine.name
        plain, salted = list(range(10, 18)), list(range(20, 28))
        names = [*namer.chain(plain), *namer.chain(salted, extras=request_extras(salt="t"))]
        server.events += [stored(0, plain), stored(1, salted, "t")]

        def on_device() -> set[str]:
            found = stack.indexed()
            return next((found[one] for one in found if name in one), set())

        wait_for(lambda: on_device() == {name.hex() for name in names}, "the index has them not")
        server.events += [{"event_id": 2, "data": {"type": "stored"}, "window_size": 4096}]
        wait_for(lambda: not on_device(), "the index keeps what is unknown")
        server.events += [stored(3, plain)]
        wait_for(lambda: on_device() == {name.hex() for name in names[:2]}, "nothing came after")
        assert pump.counts["pulls_failed"] == pump.counts["pulls_malformed"] == 1
    pump.close()


def test_an_engine_in_the_same_process_is_pulled_from() -> None:
    class Llm:
        def __init__(self) -> None:
            self.asked: list[float | None] = []

        def get_kv_cache_events(self, timeout: float | None) -> list[dict[str, Any]]:
            self.asked.append(timeout)
            return [stored(0, [1, 2, 3, 4])]

    llm = Llm()
    assert of_llm(llm)() == [stored(0, [1, 2, 3, 4])]
    assert llm.asked == [event_pump.PULL_S]


def as_documented() -> dict[str, str]:
    """The variables that docs/trtllm.md sets."""
    return os.environ | {"DYN_KVBM_TRTLLM_ZMQ_PORT": str(free_pair()), "KVBM_ENGINES_OPEN": "true"}


@pytest.mark.slow
def test_the_command_publishes_until_it_is_told_to_stop(server: Server) -> None:
    """As docs/trtllm.md shows it; without a port, or consent, it says what is missing."""
    command = [sys.executable, "-m", "kvbm_connectors.trtllm.event_pump", "--url", server.url,
               "--block-tokens", str(args_of().kv_cache_config.tokens_per_block)]  # fmt: skip
    for variable in ("DYN_KVBM_TRTLLM_ZMQ_PORT", "KVBM_ENGINES_OPEN"):
        environ = {name: value for name, value in as_documented().items() if name != variable}
        failed = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False, env=environ
        )
        assert failed.returncode == 2
        assert variable in failed.stderr
    server.events += [stored(0, [1, 2, 3, 4])]
    with subprocess.Popen(command, env=as_documented()) as pump:
        wait_for(lambda: not server.events, "nobody has pulled")
        pump.send_signal(signal.SIGTERM)
        assert pump.wait(10) == 0


def test_a_signal_that_comes_before_it_is_waited_for_ends_it_too(server: Server) -> None:
    """numpy's threads were there before any signal was blocked: one of them took it, and died."""
    script = (
        "import os, signal, sys\n"
        "from kvbm_connectors.trtllm import event_pump\n"
        "start = event_pump.EventPump.start\n"
        "def start_and_be_told(pump):\n"
        "    start(pump)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "event_pump.EventPump.start = start_and_be_told\n"
        f"sys.exit(event_pump.main(['--url', {server.url!r}, '--block-tokens', '4']))\n"
    )
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=as_documented(), timeout=30, check=False)
    assert ended.returncode == 0


def test_an_address_is_checked() -> None:
    with pytest.raises(ValueError, match="not the address"):
        of_server("file:///etc/passwd")


def test_a_pump_that_is_closed_while_it_publishes_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: no socket is closed under the thread that uses it.

    1. Replays take long. 2. The pump is closed, and waits for a while. 3. The replays are over, and
    the thread ends without an error: pytest would report one.
    """
    began, goes_on = threading.Event(), threading.Event()
    answer_replays = EventPublisher.answer_replays

    def slow(publisher: EventPublisher) -> None:
        began.set()
        assert goes_on.wait(10)
        answer_replays(publisher)

    monkeypatch.setattr(EventPublisher, "answer_replays", slow)
    monkeypatch.setattr(event_pump, "RETRY_S", 0.05)
    pump = EventPump(list, block_tokens=4, port=free_port())
    pump.start()
    assert began.wait(10)
    pump.close()
    goes_on.set()
    wait_for(
        lambda: not any(one.name == "kvbm-events-publish" for one in threading.enumerate()),
        deadline_s=10, poll_s=0.01,
    )  # fmt: skip
