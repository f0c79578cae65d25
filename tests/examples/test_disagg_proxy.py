"""The proxy of `examples/vllm` as a process, before HTTP servers that answer as vLLM does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
ODD_REPLIES: dict[str, object] = {
    "no blocks": {"kv_transfer_params": None},
    "a list": (1,),
    "a string": {"kv_transfer_params": "abc"},
    "not a number": {"kv_transfer_params": {"remote_block_ids": float("nan")}},
}
"""What a prefill worker answers to these prompts."""
PIECES = ["data: one\n\n", "data: two\n\n"]


class Worker:
    """A worker: an HTTP server that notes what it is asked, and answers with `answer`."""

    def __init__(
        self, answer: Callable[[Worker, dict[str, Any]], tuple[int, object]], port: int = 0
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.go_on = threading.Event()
        self.more_headers: dict[str, str] = {}
        """Set: an answer in pieces goes on after the first one."""
        self.breaks = False
        self.connections: list[socket.socket] = []
        self.answer = answer
        handler = type("Handler", (Handler,), {"worker": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def answer_get(self) -> object:
        """What a request without a body is answered."""
        return {}

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            with suppress(OSError):  # The proxy has closed it.
                connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    """One request to a worker."""

    protocol_version = "HTTP/1.1"
    worker: Worker

    def setup(self) -> None:
        super().setup()
        self.worker.connections.append(self.connection)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.worker.asked.append(body | {"path": self.path})
        self.worker.headers.append(dict(self.headers.items()))
        status, answer = self.worker.answer(self.worker, body)
        self.send_response(status)
        if isinstance(answer, list):
            self._send_pieces(answer)
            return
        self._send_json(answer)

    def _send_json(self, answer: object) -> None:
        text = json.dumps(answer).encode()
        self.send_header("content-type", "application/json")
        for name, value in self.worker.more_headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.send_response(200)
        self._send_json(self.worker.answer_get())

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
    prompt = body.get("prompt", "a")
    if prompt == "too long":
        return 400, {"error": {"message": "this prompt is too long"}}
    odd = ODD_REPLIES.get(prompt) if isinstance(prompt, str) else None
    return 200, {"kv_transfer_params": PLACE} if odd is None else odd


def hung_up(_: Worker, body: dict[str, Any]) -> tuple[int, object]:
    raise ConnectionAbortedError


def decoded(_: Worker, body: dict[str, Any]) -> tuple[int, object]:
    return (200, PIECES) if body.get("stream") else (200, {"choices": [{"text": "four"}]})


@contextmanager
def four_workers() -> Iterator[list[Worker]]:
    """Run two workers for prefill, and two for decode."""
    with ExitStack() as stack:
        made = [Worker(answer) for answer in (prefilled, prefilled, decoded, decoded)]
        for worker in made:
            stack.callback(worker.close)
        yield made


@contextmanager
def proxy_before(workers: list[Worker], *options: str) -> Iterator[str]:
    """Run the proxy before two workers for prefill and two for decode; give its address."""
    port = free_port()
    urls = [worker.url for worker in workers]
    command = [sys.executable, str(PROXY), "--port", str(port), "--prefill", *urls[:2],
               "--decode", *urls[2:], *options]  # fmt: skip
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


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    """Two for prefill, two for decode."""
    with four_workers() as made:
        yield made


@pytest.fixture
def proxy(workers: list[Worker]) -> Iterator[str]:
    """The address of the proxy before them."""
    with proxy_before(workers) as url:
        yield url


@pytest.fixture(scope="module")
def standing() -> Iterator[tuple[str, list[Worker]]]:
    """A proxy and its workers for all tests that only look at replies: a start takes seconds."""
    with four_workers() as made, proxy_before(made) as url:
        yield url, made


@pytest.fixture
def standing_proxy(standing: tuple[str, list[Worker]]) -> str:
    """The address of that proxy; its workers have forgotten what they were asked."""
    for worker in standing[1]:
        worker.asked.clear()
    return standing[0]


def ask(url: str, prompt: str = "a", **more: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4} | more
    return httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": "Bearer k"})


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_vllm_refuses_the_client_hears(workers: list[Worker], proxy: str) -> None:
    """Goal: the status and the words of a worker; decode is not bothered."""
    reply = ask(proxy, "too long")
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "this prompt is too long")
    assert workers[2].asked == workers[3].asked == []
    reply = ask(proxy, "no blocks")
    assert reply.status_code == 502
    assert "NixlConnector" in reply.json()["error"]["message"]
    assert httpx.post(f"{proxy}/v1/completions", json=[1]).status_code == 422


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": ["first", "second"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": "a", "prompt_embeds": "b"},
        {"prompt": None, "prompt_embeds": ["b", "c"]},
        {"n": 2},
        {"n": "2"},
        {"best_of": 2},
    ],
)
def test_what_needs_several_transfers_is_refused(
    standing: tuple[str, list[Worker]], standing_proxy: str, more: dict[str, object]
) -> None:
    """Goal: no worker decodes with the blocks of another prompt, and none reads blocks twice."""
    reply = httpx.post(f"{standing_proxy}/v1/completions", json={"prompt": "a"} | more)
    assert reply.status_code == 400
    assert "one prompt" in reply.json()["error"]["message"]
    assert not any(worker.asked for worker in standing[1])


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2, 3], [[1, 2, 3]], [1]])
def test_one_prompt_passes_in_each_of_its_shapes(standing_proxy: str, prompt: object) -> None:
    """Goal: a text, a list of tokens, and a list with one of either; one answer, said or not."""
    body = {"prompt": prompt, "n": 1, "best_of": None}
    assert httpx.post(f"{standing_proxy}/v1/completions", json=body).is_success
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    assert httpx.post(f"{standing_proxy}/v1/chat/completions", json=chat).is_success


@pytest.mark.parametrize(
    ("content", "headers", "word"),
    [
        (b'{"prompt":"a","temperature":NaN}', {}, "body"),
        (b'{"prompt":"a","temperature":1e999}', {}, "body"),
        (b'{"prompt":"a","stream_options":{"a":NaN}}', {}, "body"),
        (b'{"prompt":"\\ud800"}', {}, "body"),
        (b'{"prompt":"a"}', {b"x-request-id": "é".encode("latin-1")}, "x-request-id"),
        (b'{"prompt":"a"}', {b"authorization": "é".encode()}, "authorization"),
    ],
)
def test_what_cannot_be_passed_on_is_refused(
    standing_proxy: str, content: bytes, headers: dict[bytes, bytes], word: str
) -> None:
    """Goal: a sentence for the client instead of a traceback in the proxy's log."""
    headers |= {b"content-type": b"application/json"}
    reply = httpx.post(f"{standing_proxy}/v1/completions", content=content, headers=headers)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert word in reply.json()["error"]["message"]


@pytest.mark.parametrize("prompt", ODD_REPLIES)
def test_a_prefill_worker_that_hands_no_blocks_over_is_named(
    standing_proxy: str, prompt: str
) -> None:
    """Goal: an error 502 with the worker's address, whatever it answered instead."""
    reply = ask(standing_proxy, prompt)
    assert reply.status_code == 502
    assert "hands no blocks over" in reply.json()["error"]["message"]


@pytest.mark.slow
def test_a_worker_that_is_gone_is_passed_over(workers: list[Worker]) -> None:
    """Goal: one dead worker of each kind fails no request, and is left alone as long as another
    one answers; with none left the error names each."""
    with proxy_before(workers, "--retry-s", "600") as proxy:
        for worker in workers[::2]:
            worker.close()
        assert all(ask(proxy).is_success for _ in range(4))
        back = Worker(decoded, workers[2].port)
        try:
            assert all(ask(proxy).is_success for _ in range(4))
            assert back.asked == []
            workers[3].close()
            assert ask(proxy).is_success
            assert len(back.asked) == 1
        finally:
            back.close()
        failed = ask(proxy)
    assert failed.status_code == 502
    for worker in workers[2:]:
        message = failed.json()["error"]["message"]
        assert f"decode worker {worker.url} gave no answer" in message


@pytest.mark.slow
def test_a_worker_that_is_back_is_asked_after_some_time(workers: list[Worker]) -> None:
    """Goal: a worker that was restarted has its share of the requests."""
    with proxy_before(workers, "--retry-s", "0.1") as proxy:
        workers[2].close()
        assert all(ask(proxy).is_success for _ in range(2))
        back = Worker(decoded, workers[2].port)
        try:
            wait_for(lambda: ask(proxy).is_success and back.asked, "it is not asked")
        finally:
            back.close()


@pytest.mark.slow
def test_a_worker_that_breaks_off_is_not_replaced(workers: list[Worker], proxy: str) -> None:
    """Goal: what a worker has begun is not sent to another one: the blocks may be gone."""
    for worker in workers[2:]:
        worker.answer = hung_up
    failed = ask(proxy)
    assert failed.status_code == 502
    assert "gave no answer" in failed.json()["error"]["message"]
    assert sorted(len(worker.asked) for worker in workers[2:]) == [0, 1]


@pytest.mark.slow
def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(
    workers: list[Worker], proxy: str
) -> None:
    """Goal: a client sees that a worker has died in the middle of an answer."""
    for worker in workers:
        worker.breaks = True
        worker.go_on.set()
    with pytest.raises(httpx.RemoteProtocolError):
        ask(proxy, stream=True)
