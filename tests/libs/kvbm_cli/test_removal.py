"""What a removal shows and asks, against an API that answers over HTTP."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from kvbm_cli import main

A = "a" * 32
TIERS = [
    {"tier": "host", "host": "h", "instance": "0", "bytes_used": 5_000_000,
     "slots": {"active": 1, "inactive": 2, "staged": 4, "reset": 3, "total": 10}},
    {"tier": "disk", "host": "h", "instance": "0", "bytes_used": 0, "slots": {"total": 5}},
]  # fmt: skip


class Api(HTTPServer):
    """Knows two tiers, and ends a removal at once."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Api

    def do_GET(self) -> None:
        self._answer(TIERS)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append((self.path, json.loads(body)))
        self._answer({"id": "1", "verb": "reset", "state": "done", "actor": "", "progress": {},
                      "errors": {}})  # fmt: skip

    def _answer(self, value: object) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Terminal(io.StringIO):
    """Standard input at which a person sits."""

    def isatty(self) -> bool:
        return True


def typed(monkeypatch: pytest.MonkeyPatch, api: Api, *words: str) -> int:
    """Type a line, and return how it ended."""
    monkeypatch.setattr("sys.argv", ["kvbm", *words, "--url", api.url])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert isinstance(end.value.code, int)
    return end.value.code


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Have a terminal at standard input, on which this is typed."""
    monkeypatch.setattr("sys.stdin", Terminal(f"{text}\n"))


def test_a_dry_run_shows_where_and_removes_nothing(
    monkeypatch: pytest.MonkeyPatch, api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    """Staged slots hold no block yet."""
    line = ("reset", "--everything", "--tier", "host", "--dry-run")
    assert typed(monkeypatch, api, *line) == 0
    shown = capsys.readouterr().out.split("\n")[1].split()
    assert shown == ["host", "h", "0", "5.0", "MB", "3", "all"]
    assert typed(monkeypatch, api, "evict", A, "--tier", "all", "--dry-run", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["tier"], row["blocks"], row["of these"]) for row in rows] == [
        ("host", 3, "1 by name, where held"), ("disk", 0, "1 by name, where held"),
    ]  # fmt: skip
    assert api.asked == []


@pytest.mark.parametrize("command", ["reset", "evict"])
def test_everything_is_asked_about(
    monkeypatch: pytest.MonkeyPatch, api: Api, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """1. No terminal and no --yes: refused. 2. No. 3. Yes. 4. --yes."""
    line = (command, "--everything", "--tier", "host")
    assert typed(monkeypatch, api, *line) == 2
    assert "--yes" in capsys.readouterr().err
    answer(monkeypatch, "n")
    assert typed(monkeypatch, api, *line) == 1
    assert "nothing was removed" in capsys.readouterr().err
    assert api.asked == []
    answer(monkeypatch, "y")
    assert typed(monkeypatch, api, *line) == 0
    assert api.asked == [(f"/v1/{command}", {"tier": "host", "everything": True})]
    answer(monkeypatch, "n")
    assert typed(monkeypatch, api, *line, "--yes") == 0
    assert len(api.asked) == 2


def test_a_removal_of_named_blocks_does_not_ask(monkeypatch: pytest.MonkeyPatch, api: Api) -> None:
    answer(monkeypatch, "n")
    assert typed(monkeypatch, api, "reset", A, "--tier", "host") == 0
    assert api.asked == [("/v1/reset", {"tier": "host", "hashes": [A]})]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("evict --tier host", "--everything"),
        ("reset --tier host", "--everything"),
        (f"evict {A} --everything --tier host", "--everything"),
        (f"evict {A} --prefix {A} --tier host", "--prefix"),
        ("evict --everything --tier nosuch", "--tier"),
        ("reset --everything --tier nosuch --yes", "--tier"),
        ("evict --namespace xyz --tier host", "--namespace"),
        (f"evict --prefix {A} --tier host --host a.b", "--host"),
    ],
)
def test_a_dry_run_refuses_what_the_removal_would(
    monkeypatch: pytest.MonkeyPatch, api: Api, capsys: pytest.CaptureFixture[str],
    line: str, named: str,
) -> None:  # fmt: skip
    """Goal: a line that shows something is a line that removes."""
    assert typed(monkeypatch, api, *line.split(), "--dry-run") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert named in said.err
    assert api.asked == []


def test_names_of_blocks_are_taken_in_capitals(monkeypatch: pytest.MonkeyPatch, api: Api) -> None:
    """Another tool may print them so; the API has them in small letters."""
    assert typed(monkeypatch, api, "reset", A.upper(), "--tier", "host") == 0
    assert api.asked == [("/v1/reset", {"tier": "host", "hashes": [A]})]
