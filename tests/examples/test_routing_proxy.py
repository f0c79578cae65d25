"""The routing proxy of `examples/vllm` as a process, before HTTP servers that answer as vLLM and
KVBM do. `tests/integration/test_routing.py` has it before sim engines and the whole stack."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvbm_common.runtime.processes import dying_with_parent, free_port

from tests.examples.test_disagg_proxy import PIECES, START_DEADLINE_S, Worker, decoded, hung_up
from tests.waiting import wait_for

PROXY = Path(__file__).parents[2] / "examples" / "vllm" / "routing_proxy.py"
FIELDS = {"model": "m", "block_tokens": 4}


class Kvbm(Worker):
    """KVBM's API: it ranks in the order of `best`, and leaves the others out. An engine's cost
    grows with what waits there, as KVBM's does."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.best = ["a", "b"]
        self.status = 200
        self.token = ""
        """Set: a ranking needs it."""

    def answer_get(self) -> object:
        return [{"engine": "other", "namespace_fields": {}},
                {"engine": "a", "namespace_fields": FIELDS}]  # fmt: skip

    def _answer(self, _: Worker, body: dict[str, Any]) -> tuple[int, object]:
        if self.token and self.headers[-1].get("authorization") != f"Bearer {self.token}":
            return 401, {"error": "wrong token"}
        waiting = {one["source"]: one["waiting_blocks"] for one in body["engines"]}
        ranked = [
            {"source": name, "cost": place + 1.5 + waiting[name], "compute": place + 1, "load": 0.5}
            for place, name in enumerate(self.best)
        ]
        return self.status, {"asked": 3, "engines": ranked, "left_out": []}


def engine(_: Worker, body: dict[str, Any]) -> tuple[int, object]:
    """A vLLM that tokenizes, streams, and completes."""
    if "max_tokens" not in body:
        return 200, {"tokens": [7, 8, 9], "count": 3}
    return decoded(_, body)


class World:
    """Two engines, KVBM, and the proxy before them."""

    def __init__(self) -> None:
        self.kvbm = Kvbm()
        self.engines = [Worker(engine), Worker(engine)]
        self.url = ""

    def ask(self, prompt: object = (1, 2, 3), **more: object) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 4} | more
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=START_DEADLINE_S)

    def taken_by(self, count: int = 1) -> list[str]:
        """Which engines have taken so many requests."""
        return [self.ask().headers["x-kvbm-engine"] for _ in range(count)]

    def counts(self) -> list[int]:
        """How many completions each engine was asked for."""
        return [sum("max_tokens" in asked for asked in worker.asked) for worker in self.engines]

    def questions(self) -> list[dict[str, Any]]:
        """What KVBM was asked."""
        return [asked for asked in self.kvbm.asked if asked["path"] == "/v1/route"]


@contextmanager
def proxied(*options: str) -> Iterator[World]:
    """Run the proxy with these options."""
    with ExitStack() as stack:
        world = World()
        for one in (world.kvbm, *world.engines):
            stack.callback(one.close)
        port = free_port()
        named = [f"{name}={one.url}" for name, one in zip("ab", world.engines, strict=True)]
        process = subprocess.Popen(
            [sys.executable, str(PROXY), "--port", str(port), "--kvbm", world.kvbm.url,
             "--engine", *named, *options],
            preexec_fn=dying_with_parent(),
        )  # fmt: skip
        world.url = f"http://127.0.0.1:{port}"

        def serves() -> bool:
            try:
                return httpx.get(f"{world.url}/health").is_success
            except httpx.TransportError:
                return False

        try:
            wait_for(serves, "the proxy does not start", deadline_s=START_DEADLINE_S, poll_s=0.05)
            yield world
        finally:
            process.terminate()
            assert process.wait(10) in (0, -15)


@pytest.fixture
def world() -> Iterator[World]:
    """The proxy with its defaults."""
    with proxied() as made:
        yield made


@pytest.mark.slow
def test_the_best_engine_gets_the_request(world: World) -> None:
    """Goal: KVBM's order decides, and it is asked for these engines with the engines' namespace."""
    assert world.taken_by(2) == ["a", "a"]
    world.kvbm.best = ["b", "a"]
    assert world.taken_by(2) == ["b", "b"]
    first = world.questions()[0]
    assert (first["tokens"], first["namespace"], first["salt"]) == ([1, 2, 3], FIELDS, None)
    assert world.ask(cache_salt="pepper").is_success
    assert world.questions()[-1]["salt"] == "pepper", "blocks of a salted prompt have other names"
    assert first["engines"] == [
        {"source": name, "running": 0, "waiting": 0, "waiting_blocks": 0.0} for name in "ab"
    ]


@pytest.mark.slow
def test_a_text_is_tokenized_by_an_engine(world: World) -> None:
    assert world.ask("some words").is_success
    assert world.questions()[0]["tokens"] == [7, 8, 9]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    assert httpx.post(f"{world.url}/v1/chat/completions", json=chat).is_success
    assert len(world.questions()) == 2


@pytest.mark.slow
def test_load_is_what_the_proxy_has_given(world: World) -> None:
    """Goal: a request waits until its first piece, then it runs; KVBM hears of both.

    1. One stream has begun: it runs. 2. When it has ended, there is none.
    """
    body = {"prompt": [1], "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{world.url}/v1/completions", json=body) as reply:
        pieces = reply.iter_text()
        assert next(pieces) == PIECES[0], "it passes while it comes"
        assert world.ask().is_success
        busy = world.questions()[-1]["engines"][0]
        assert (busy["running"], busy["waiting"], busy["waiting_blocks"]) == (1, 0, 0.0)
        world.engines[0].go_on.set()
        assert "".join(pieces) == PIECES[1]
    assert world.ask().is_success
    assert world.questions()[-1]["engines"][0]["running"] == 0


@pytest.mark.slow
def test_requests_that_come_together_know_of_each_other(world: World) -> None:
    """Goal: an order that was asked for before other requests counted is corrected.

    1. KVBM ranks `a` first by one block, and answers when it has four questions.
    2. The first request goes to `a`. The second one finds that this has cost `a` more than the
       difference: it goes to `b`. By then `a` is the better one for two more.
    """
    answers = world.kvbm.answer
    together = threading.Barrier(4)

    def when_all_ask(worker: Worker, body: dict[str, Any]) -> tuple[int, object]:
        together.wait(START_DEADLINE_S)
        return answers(worker, body)

    def slowly(worker: Worker, body: dict[str, Any]) -> tuple[int, object]:
        worker.go_on.wait()
        return engine(worker, body)

    assert world.ask().is_success, "the namespace is known"
    world.kvbm.answer = when_all_ask
    for one in world.engines:
        one.answer = slowly
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(world.ask) for _ in range(4)]
        try:
            wait_for(lambda: sum(world.counts()) == 5, "the engines have the requests")
        finally:
            for one in world.engines:
                one.go_on.set()
        taken = sorted(future.result().headers["x-kvbm-engine"] for future in futures)
    assert taken == ["a", "a", "a", "b"]


@pytest.mark.slow
def test_a_dead_engine_is_passed_over(world: World) -> None:
    """Goal: no request fails, though KVBM still ranks the dead engine first."""
    world.engines[0].close()
    assert world.taken_by(3) == ["b"] * 3
    world.engines[1].close()
    failed = world.ask()
    assert failed.status_code == 502
    assert "gave no answer" in failed.json()["error"]["message"]


@pytest.mark.slow
def test_what_an_engine_has_begun_is_not_sent_again(world: World) -> None:
    for worker in world.engines:
        worker.answer = hung_up
    assert world.ask().status_code == 502
    assert sorted(world.counts()) == [0, 1]


@pytest.mark.slow
def test_an_answer_that_breaks_off_is_seen(world: World) -> None:
    for worker in world.engines:
        worker.breaks = True
        worker.go_on.set()
    with pytest.raises(httpx.RemoteProtocolError):
        world.ask(stream=True)
    assert sorted(world.counts()) == [0, 1]


@pytest.mark.slow
def test_an_engine_that_says_nothing_is_given_up() -> None:
    """Goal: no request waits without end; the other engine does not get it as well."""
    with proxied("--silence-s", "0.3") as world:
        world.engines[0].answer = lambda worker, body: (worker.go_on.wait(), (200, {}))[1]
        failed = world.ask()
        assert failed.status_code == 502
        assert "ReadTimeout" in failed.json()["error"]["message"]
        assert world.counts() == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["gone", "silent", "refuses", "ranks nobody", "odd"])
def test_without_kvbm_the_engines_share_the_requests(trouble: str) -> None:
    """Goal: KVBM may be away, slow, or know nothing: requests are answered, and spread."""
    with proxied("--route-s", "0.3") as world:
        if trouble == "gone":
            world.kvbm.close()
        elif trouble == "silent":
            world.kvbm.answer = lambda worker, body: (worker.go_on.wait(), (200, {}))[1]
        elif trouble == "refuses":
            world.kvbm.status = 503
        elif trouble == "ranks nobody":
            world.kvbm.best = []
        else:
            world.kvbm.answer = lambda worker, body: (200, [1])
        assert sorted(world.taken_by(4)) == ["a", "a", "b", "b"]


@pytest.mark.slow
def test_a_token_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    """Goal: a rotation of KVBM's token costs no request its best engine."""
    file = tmp_path / "token"
    file.write_text("old\n")
    with proxied("--token-file", str(file)) as world:
        for token in ("old", "new"):
            world.kvbm.token = token
            file.write_text(f"{token}\n")
            assert world.taken_by(3) == ["a", "a", "a"]
        world.kvbm.token = "unknown"
        assert sorted(world.taken_by(2)) == ["a", "b"]


@pytest.mark.slow
def test_an_engine_that_kvbm_leaves_out_is_the_last_choice(world: World) -> None:
    world.kvbm.best = ["b"]
    assert world.taken_by(2) == ["b", "b"]
    world.engines[1].close()
    assert world.taken_by(1) == ["a"]


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False])
def test_an_engine_that_kvbm_does_not_rank_shares_the_load(world: World, together: bool) -> None:
    """Goal: no healthy engine idles. One is attached, and has more to do than the whole prompt."""
    world.kvbm.best = ["a"]
    for one in world.engines:
        one.answer = lambda worker, body: (worker.go_on.wait(), engine(worker, body))[1]
    with ThreadPoolExecutor(4) as pool:
        futures = []
        try:
            for count in range(1, 5):
                futures.append(pool.submit(world.ask))
                if count == 4 or not together:
                    wait_for(lambda n=count: sum(world.counts()) == n, "the engines have them")  # type: ignore[misc]
        finally:
            for one in world.engines:
                one.go_on.set()
        taken = {future.result().headers["x-kvbm-engine"] for future in futures}
    assert taken == {"a", "b"}


@pytest.mark.slow
def test_an_answer_is_not_compressed_and_keeps_its_headers(world: World) -> None:
    """Goal: the client reads what the engine has said, with its headers, but its connection's."""
    world.engines[0].more_headers = {"Retry-After": "7", "X-Request-Id": "one", "Keep-Alive": "5"}
    reply = world.ask()
    assert (reply.headers["retry-after"], reply.headers["x-request-id"]) == ("7", "one")
    assert reply.headers["content-type"] == "application/json"
    assert "keep-alive" not in reply.headers
    sent = {name.lower(): value for name, value in world.engines[0].headers[-1].items()}
    assert sent["accept-encoding"] == "identity"


@pytest.mark.slow
def test_a_client_that_leaves_before_the_first_byte_stops_the_engine(world: World) -> None:
    """Goal: no engine computes for a client that has gone."""
    world.engines[0].answer = lambda worker, body: (worker.go_on.wait(), engine(worker, body))[1]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{world.url}/v1/completions", json={"prompt": [1], "max_tokens": 4}, timeout=1)
    wait_for(lambda: hung_up_on(world.engines[0]), "the proxy closes its connection")
    world.engines[0].go_on.set()


def hung_up_on(worker: Worker) -> bool:
    """Return whether the proxy has closed its last connection."""
    try:
        return worker.connections[-1].recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


@pytest.mark.slow
def test_an_engine_that_says_nothing_is_left_alone() -> None:
    """Goal: a hung engine costs one request, not each; neither is it asked for tokens."""
    with proxied("--silence-s", "0.3") as world:
        world.engines[0].answer = lambda worker, body: (worker.go_on.wait(), (200, {}))[1]
        assert world.ask().status_code == 502
        assert world.taken_by(3) == ["b"] * 3
        assert world.ask("some words").is_success
        assert len(world.engines[0].asked) == 1


@pytest.mark.slow
def test_engines_take_turns_if_that_is_wanted() -> None:
    with proxied("--policy", "turns") as world:
        assert world.taken_by(4) == ["a", "b", "a", "b"]
        assert world.kvbm.asked == []


def test_a_wrong_engine_is_named() -> None:
    line = [sys.executable, str(PROXY), "--engine", "a:8000"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=START_DEADLINE_S)
    assert done.returncode == 2
    assert "'a:8000' is not NAME=URL" in done.stderr
