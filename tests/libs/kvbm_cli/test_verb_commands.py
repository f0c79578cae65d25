"""The commands of operators' verbs: what they send, and to where."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kvbm_cli import verb_commands
from kvbm_cli.admin_client import Client
from kvbm_cli.main import make_app
from kvbm_common.wire.operator_verbs import OPERATOR_VERBS
from typer.testing import CliRunner

A, B = "a" * 32, "b" * 32


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, float | None]]:
    """Route, body and, of a job, for how long it is awaited."""
    found: list[tuple[str, Any, float | None]] = []
    monkeypatch.setattr(
        verb_commands, "run_change", lambda path, body, *_: found.append((path, body, None))
    )
    monkeypatch.setattr(
        verb_commands, "run_job", lambda path, body, _url, _json, s: found.append((path, body, s))
    )
    return found


@pytest.mark.parametrize(
    ("line", "path", "body", "waits_s"),
    [
        ("resize 3 --tier disk", "/v1/resize", {"slots": 3, "tier": "disk"}, 600.0),
        ("resize 3 --tier host --no-wait", "/v1/resize", {"slots": 3, "tier": "host"}, 0.0),
        (f"evict {A} {B} --tier all", "/v1/evict", {"hashes": [A, B], "tier": "all"}, 600.0),
        ("reset --everything --yes --tier host --host h --deadline-s 9", "/v1/reset",
         {"everything": True, "tier": "host", "host": "h"}, 9.0),
        (f"pin {A} --tier host", "/v1/pin", {"hashes": [A], "ttl_s": 3600.0, "tier": "host"}, None),
        ("unpin 7 --tier host --host h", "/v1/unpin",
         {"pin": 7, "tier": "host", "host": "h", "instance": "0"}, None),
        ("drain --tier host --instance 1", "/v1/drain", {"tier": "host", "instance": "1"}, None),
        ("policy lfu --tier all", "/v1/policy", {"policy": "lfu", "tier": "all"}, None),
        ("filter --tier disk --off", "/v1/filter", {"tier": "disk", "enabled": False}, None),
        ("loglevel debug --kind index", "/v1/log_level", {"level": "debug", "kind": "index"}, None),
        (f"prefetch {A} --host h", "/v1/prefetch", {"host": "h", "hashes": [A]}, 600.0),
        ('prefetch --tokens 1,2 --namespace {"model":"m"}', "/v1/prefetch",
         {"tokens": [1, 2], "namespace": {"model": "m"}}, 600.0),
    ],
)  # fmt: skip
def test_a_command_sends_what_was_given(
    sent: list[Any], line: str, path: str, body: Any, waits_s: float | None
) -> None:
    """What was left at its default is not sent: the API has the same one."""
    arguments = line.split()
    result = CliRunner().invoke(make_app(arguments), arguments)
    assert result.exit_code == 0, result.output
    assert sent == [(path, body, waits_s)]


@pytest.mark.parametrize(
    ("line", "replies", "code", "said"),
    [
        (f"pin {A} --tier all", [{"pin": 0, "pinned": 0}, {"pin": 0, "pinned": 0}], 1,
         "kvbm: nothing was pinned"),
        (f"pin {A} --tier all", [{"pin": 0, "pinned": 0}, {"pin": 7, "pinned": 1}], 0, ""),
        ("unpin 7 --tier host --host h", [{"ended": False}], 1, "kvbm: no such pin"),
        ("unpin 7 --tier host --host h", [{"ended": True}], 0, ""),
        ("drain --tier host", [{"draining": True}], 0, ""),
    ],
)  # fmt: skip
def test_a_change_without_an_effect_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, line: str, replies: list[Any], code: int, said: str
) -> None:
    """Goal: a script sees that nothing was pinned, or unpinned; `--json` is whole all the same."""
    named = {"kind": "host-tier", "host": "h", "instance": "0", "code": "", "message": ""}
    told = {"outcomes": [named | {"ok": True, "reply": reply} for reply in replies]}
    monkeypatch.setattr(Client, "post", lambda _api, _path, _body: told)
    arguments = [*line.split(), "--json"]
    result = CliRunner().invoke(make_app(arguments), arguments)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith(said)
    assert bool(result.stderr) is bool(said)
    assert json.loads(result.stdout) == told


def test_every_verb_has_a_command_with_its_help() -> None:
    """Goal: the table is the one place that names a verb."""
    commands = verb_commands.commands()
    assert commands.keys() == {verb.command for verb in OPERATOR_VERBS}
    for verb in OPERATOR_VERBS:
        assert commands[verb.command].__doc__ == verb.help, verb.name
