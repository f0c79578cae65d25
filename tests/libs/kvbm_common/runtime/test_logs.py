"""Log lines for people and machines, and the limiter of repeated ones."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from kvbm_common.errors import RequestFailed
from kvbm_common.runtime import logs
from kvbm_common.runtime.logs import REPEAT_S, JsonFormatter, OncePerKind, TextFormatter


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    """A warning."""
    logger = logging.getLogger("kvbm.test")
    made = logger.makeRecord(logger.name, logging.WARNING, "x.py", 1, message, args, None)
    made.__dict__.update(extra)
    made.created, made.msecs = 1_700_000_000.25, 250.0
    return made


def test_a_json_line_has_the_ids_that_it_is_about() -> None:
    """One line, whatever is in the message; nothing but the ids of `extra`."""
    made = record("load of %s\nfailed", "r-1", request="r-1", block="0f", colour="red")
    line = JsonFormatter("host-tier-0").format(made)
    assert "\n" not in line
    assert json.loads(line) == {
        "ts": "2023-11-14T22:13:20.250Z", "level": "warning", "source": "host-tier-0",
        "module": "kvbm.test", "message": "load of r-1\nfailed", "request": "r-1", "block": "0f",
    }  # fmt: skip


def test_a_text_line_ends_with_them() -> None:
    """A kind is in the message already."""
    line = TextFormatter("host-tier-0").format(record("failed", kind="k", request="r-1"))
    assert line.endswith("WARNING host-tier-0 kvbm.test: failed request=r-1")


def test_an_exception_is_in_its_line() -> None:
    made = record("failed")
    try:
        raise ValueError("no")
    except ValueError:
        made.exc_info = sys.exc_info()
    told: Any = json.loads(JsonFormatter("s").format(made))
    assert told["exception"].endswith("ValueError: no")


def test_a_process_writes_json_when_it_is_told_to() -> None:
    """The real handler, in a process of its own."""
    code = (
        "import logging; from kvbm_common.runtime import logs; logs.set_up('s-0', 'info', 'json');"
        "logs.OncePerKind(logging.getLogger('m')).warning('k', 'text', request='r')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    [line] = done.stderr.decode().splitlines()
    told = json.loads(line)
    assert (told["kind"], told["request"], told["message"]) == ("k", "r", "k: text")


def test_wrong_blocks_are_named_up_to_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    logs.corrupt(logging.getLogger("test"), [f"{n:032x}" for n in range(logs.CORRUPT_MAX + 2)])
    assert [one.__dict__.get("block") for one in caplog.records][:2] == ["0" * 32, "0" * 31 + "1"]
    assert caplog.records[-1].getMessage() == "and so are 2 more"


def test_a_kind_is_logged_once_a_minute_with_what_was_withheld(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now_s = 0.0
    limiter = OncePerKind(logging.getLogger("test"), clock_s=lambda: now_s)
    for _ in range(3):
        limiter.warning("oversized", "9 MB")
    limiter.info("malformed", "not JSON")
    now_s = REPEAT_S + 1
    limiter.warning("oversized", "8 MB")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "oversized: 9 MB"),
        ("INFO", "malformed: not JSON"),
        ("WARNING", "oversized: 8 MB (and 2 more of this kind)"),
    ]


def test_too_many_kinds_share_one_and_never_raise(caplog: pytest.LogCaptureFixture) -> None:
    """Codes of peers are theirs to invent: no log line may end the service that writes it."""
    limiter = OncePerKind(logging.getLogger("test"), clock_s=lambda: 0.0)
    for number in range(logs.KINDS_MAX + 3):
        limiter.warning(f"kind-{number}", "text")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == logs.KINDS_MAX + 1
    assert said[-1] == "other: text"
    assert RequestFailed("theirs", "text").label == "peer_failed"
