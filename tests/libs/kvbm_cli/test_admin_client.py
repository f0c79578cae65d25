"""The client of the admin API: what it sends, and what it makes of servers that are none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from kvbm_cli import main

TOKEN = "t" * 44
DEEP = "[" * 100_000
REFUSAL = '{"code": "bad_query", "detail": "no"}'
QUESTIONS = (
    "status", "tiers", "services", "workers", "audit", "explain", "explain r",
    f"block {'a' * 32}", "block abcd", "pins", "jobs", "drain --tier host",
    "resize 1 --tier host", "reset --everything --tier host --dry-run",
)  # fmt: skip


class Foreign(HTTPServer):
    """A server that is no metrics service; `tokens` and `paths` is what it was shown."""

    def __init__(self, body: str = "", status: int = 200, location: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body, self.status, self.location = body.encode(), status, location
        self.tokens: list[str | None] = []
        self.paths: list[str] = []
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers every request alike."""

    server: Foreign

    def do_GET(self) -> None:
        self.server.tokens.append(self.headers["authorization"])
        self.server.paths.append(self.path)
        self.rfile.read(int(self.headers["content-length"] or 0))
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("location", self.server.location)
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def target() -> Iterator[Foreign]:
    """Where a redirect points to."""
    server = Foreign("{}")
    yield server
    server.stop()


def typed(monkeypatch: pytest.MonkeyPatch, line: str, url: str) -> int:
    """Type a line, and return how it ended."""
    monkeypatch.setattr("sys.argv", ["kvbm", *line.split(), "--url", url])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("line", ["status", "drain --tier host"])
def test_no_redirect_is_followed(
    monkeypatch: pytest.MonkeyPatch, target: Foreign, capsys: pytest.CaptureFixture[str],
    status: int, line: str,
) -> None:  # fmt: skip
    """Goal: a token is seen by the server that was named, and by no other."""
    monkeypatch.setenv("KVBM_ADMIN_TOKEN", TOKEN)
    server = Foreign(status=status, location=target.url)
    try:
        assert typed(monkeypatch, line, server.url) == 2
    finally:
        server.stop()
    said = capsys.readouterr().err
    assert "--url" in said
    assert urlsplit(target.url).netloc in said
    assert server.tokens == [f"Bearer {TOKEN}"]
    assert target.tokens == []


@pytest.mark.parametrize("request_id", ["cmpl-1", "a\nb\n", "a b+c%2F&x=1", "..", "é" * 300])
def test_a_request_is_asked_for_by_any_id(monkeypatch: pytest.MonkeyPatch, request_id: str) -> None:
    """Clients may choose it. 256 characters of it are kept."""
    server = Foreign('{"lookups": [], "silent": []}')
    monkeypatch.setattr("sys.argv", ["kvbm", "explain", request_id, "--url", server.url])
    try:
        with pytest.raises(SystemExit) as end:
            main.main()
    finally:
        server.stop()
    assert not end.value.code
    [asked] = map(urlsplit, server.paths)
    assert asked.path == "/v1/explanation"
    assert parse_qs(asked.query) == {"request": [request_id[:256]]}


@pytest.mark.parametrize("status", [200, 422])
def test_a_reason_that_does_not_exist_is_a_wrong_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    """Whether the service refuses it or is older; one that exists may have no request."""
    body = '{"requests": [], "silent": []}' if status == 200 else REFUSAL
    server = Foreign(body, status=status)
    try:
        assert typed(monkeypatch, "explain --reason nonsense", server.url) == 2
        said = capsys.readouterr().err
        assert said.startswith("kvbm: --reason is 'nonsense', but accepts one of never_stored, ")
        code = typed(monkeypatch, "explain --reason evicted", server.url)
    finally:
        server.stop()
    assert (code == 2) == (status == 422)
    assert "--reason" not in capsys.readouterr().err


@pytest.mark.parametrize("options", ["", " --json"])
def test_a_status_that_is_not_ready_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str
) -> None:
    """Goal: a script sees what `/readyz` says; the page is whole all the same."""
    reason = "disk-tier.h.0: does not answer"
    status = {"version": "1", "engines": 1, "workers": 1, "kvbm": {}, "tiers": [], "flows": []}
    status["services"] = [{"kind": "disk-tier", "ready": 0}]
    for reasons, code in (([], 0), ([reason], 1)):
        server = Foreign(json.dumps(status | {"ready": not reasons, "reasons": reasons}))
        try:
            assert typed(monkeypatch, f"status{options}", server.url) == code
        finally:
            server.stop()
        told = capsys.readouterr()
        assert not told.err
        assert "disk-tier" in told.out
        assert (reason in told.out) == bool(reasons)


@pytest.mark.parametrize("body", ["{}", "[]", "null", "3", '["a"]', "<html>", "", DEEP])
def test_a_server_that_is_no_kvbm_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], body: str
) -> None:
    """An empty list is a right answer where a list of tiers, services or workers is asked for."""
    server = Foreign(body)
    lists = ("tiers", "services", "workers", "reset")
    try:
        for line in QUESTIONS:
            is_right = body == "[]" and line.startswith(lists)
            code = typed(monkeypatch, line, server.url)
            said = capsys.readouterr().err
            if not is_right:
                assert (code, said.count("\n")) == (1, 1), f"{line}: {said}"
                assert f"{server.url} did not answer as KVBM does" in said, line
    finally:
        server.stop()


def test_a_refusal_of_a_stranger_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its body has."""
    for body in ('{"code":1,"detail":[{"a":"\\u001b[2J"}]}', "[]", DEEP):
        server = Foreign(body, 500)
        try:
            assert typed(monkeypatch, "status", server.url) == 1
        finally:
            server.stop()
        said = capsys.readouterr().err
        assert said.rstrip("\n").isprintable()
        assert "http" in said or "1: " in said
