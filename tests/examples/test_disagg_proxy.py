"""The proxy of `examples/vllm` as a process, before HTTP servers that answer as vLLM does."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvbm_common.runtime.processes import dying_with_parent, free_port

from tests.waiting import wait_for

PROXY = Path(__file__).parents[2] / "examples" / "vllm" / "disagg_proxy.py"
START_DEADLINE_S = 30.0
PLACE = {"remote_engine_id": "e", "remote_block_ids": [[1]]}
"""Where a prefill worker says that its blocks are."""
PIECES = ["data: one\n\n", "data: two\n\n"]


class Worker:
    """A worker: an HTTP server that notes what it is asked, and answers with `answer`."""

    def __init__(self, answer: Callable[[Worker, dict[str, Any]], tuple[int, object]]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.go_on = threading.Event()
        """Set: an answer in pieces goes on behind the first one."""
        self.breaks = False
        self.answer = answer
        handler = type("Handler", (Handler,), {"worker": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()


class Handler(BaseHTTPRequestHandler):
    """One request to a worker."""

    protocol_version = "HTTP/1.1"
    worker: Worker

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.worker.asked.append(body | {"path": self.path})
        self.worker.headers.append(dict(self.headers.items()))
        status, answer = self.worker.answer(self.worker, body)
        self.send_response(status)
        if isinstance(answer, list):
            self._send_pieces(answer)
            return
        text = json.dumps(answer).encode()
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _send_pieces(self, pieces: list[str]) -> None:
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece.encode()))
            self.wfile.flush()
            self.worker.go_on.wait()
            if self.worker.breaks:
                self.close_connection = True
                return
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def prefilled(_: Worker, body: dict[str, Any]) -> tuple[int, object]:
    if body["prompt"] == "too long":
        return 400, {"error": {"message": "this prompt is too long"}}
    return 200, {"kv_transfer_params": None if body["prompt"] == "no blocks" else PLACE}


def decoded(_: Worker, body: dict[str, Any]) -> tuple[int, object]:
    return (200, PIECES) if body.get("stream") else (200, {"choices": [{"text": "four"}]})


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    """Two for prefill, two for decode."""
    with ExitStack() as stack:
        made = [Worker(answer) for answer in (prefilled, prefilled, decoded, decoded)]
        for worker in made:
            stack.callback(worker.close)
        yield made


@pytest.fixture
def proxy(workers: list[Worker]) -> Iterator[str]:
    """The address of the proxy before them."""
    port = free_port()
    urls = [worker.url for worker in workers]
    command = [sys.executable, str(PROXY), "--port", str(port), "--prefill", *urls[:2],
               "--decode", *urls[2:]]  # fmt: skip
    process = subprocess.Popen(command, preexec_fn=dying_with_parent())
    url = f"http://127.0.0.1:{port}"

    def serves() -> bool:
        try:
            return httpx.get(f"{url}/health").is_success
        except httpx.TransportError:
            return False

    try:
        wait_for(serves, "the proxy does not start", deadline_s=START_DEADLINE_S, poll_s=0.05)
        yield url
    finally:
        process.terminate()
        assert process.wait(10) in (0, -15)


def ask(url: str, prompt: str = "a", **more: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4} | more
    return httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": "Bearer k"})


def test_a_request_is_prefilled_and_then_decoded(workers: list[Worker], proxy: str) -> None:
    """Goal: prefill computes one token, and decode is told where its blocks are."""
    reply = ask(proxy, min_tokens=2, stream_options={"include_usage": True})
    assert (reply.status_code, reply.json()) == (200, {"choices": [{"text": "four"}]})
    [prefill], [decode] = workers[0].asked, workers[2].asked
    assert prefill == {
        "path": "/v1/completions", "prompt": "a", "max_tokens": 1, "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }  # fmt: skip
    assert decode["max_tokens"] == 4
    assert decode["kv_transfer_params"] == PLACE
    assert [worker.headers[0]["authorization"] for worker in (workers[0], workers[2])] == [
        "Bearer k"
    ] * 2


def test_requests_are_spread_over_the_workers(workers: list[Worker], proxy: str) -> None:
    """Goal: workers take turns, and one with a request is passed over as long as it has it."""
    for _ in range(4):
        assert ask(proxy).is_success
    assert [len(worker.asked) for worker in workers] == [2] * 4
    with httpx.stream("POST", f"{proxy}/v1/completions", json={"prompt": "a", "stream": True}):
        wait_for(lambda: sum(len(worker.asked) for worker in workers[2:]) == 5)
        busy = max(workers[2:], key=lambda worker: len(worker.asked))
        for _ in range(4):
            assert ask(proxy).is_success
        assert len(busy.asked) == 3
        busy.go_on.set()


def test_a_stream_passes_while_it_comes(workers: list[Worker], proxy: str) -> None:
    """Goal: the first piece is with the client before the worker has made the second."""
    body = {"prompt": "a", "stream": True}
    with httpx.stream("POST", f"{proxy}/v1/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        pieces = reply.iter_text()
        assert next(pieces) == PIECES[0]
        for worker in workers:
            worker.go_on.set()
        assert "".join(pieces) == PIECES[1]


def test_what_vllm_refuses_the_client_hears(workers: list[Worker], proxy: str) -> None:
    """Goal: the status and the words of a worker; decode is not bothered."""
    reply = ask(proxy, "too long")
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "this prompt is too long")
    assert workers[2].asked == workers[3].asked == []
    reply = ask(proxy, "no blocks")
    assert reply.status_code == 502
    assert "NixlConnector" in reply.json()["error"]["message"]
    assert httpx.post(f"{proxy}/v1/completions", json=[1]).status_code == 422


def test_a_worker_that_is_gone_is_named(workers: list[Worker], proxy: str) -> None:
    """Goal: an HTTP error that says which worker gave no answer; the others go on."""
    workers[2].close()
    failed, good = ask(proxy), ask(proxy)
    assert failed.status_code == 502
    assert f"decode worker {workers[2].url} gave no answer" in failed.json()["error"]["message"]
    assert good.is_success


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(
    workers: list[Worker], proxy: str
) -> None:
    """Goal: a client sees that a worker has died in the middle of an answer."""
    for worker in workers:
        worker.breaks = True
        worker.go_on.set()
    with pytest.raises(httpx.RemoteProtocolError):
        ask(proxy, stream=True)
