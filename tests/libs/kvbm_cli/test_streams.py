"""The command with odd arguments and streams, as a shell can start it: never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_cli import main

from tests.libs.kvbm_cli.test_admin_client import Foreign

KVBM = Path(sys.executable).parent / "kvbm"
JOB = {"id": "4f", "verb": "evict", "state": "done", "actor": "é", "progress": {}, "errors": {}}
PLAIN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture
def url() -> Iterator[str]:
    """A server that has one job, whose actor is é."""
    server = Foreign(json.dumps({"jobs": [JOB]}))
    yield server.url
    server.stop()


def shell(line: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of a shell."""
    return subprocess.run(
        ["bash", "-c", line.replace("kvbm", str(KVBM), 1)],
        env=os.environ | environ, capture_output=True, stdin=subprocess.DEVNULL, check=False,
        timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (["explain", "\udcff"], "kvbm explain"),
        (["explain", "--reason", "\udcff"], "--reason"),
        (["explain", "--engine=\udcff"], "--engine"),
        (["block", "\udcff"], "kvbm block"),
        (["jobs", "\udcff", "--cancel"], "kvbm jobs"),
        (["serve", "\udcff"], "kvbm serve"),
        (["\udcff"], "kvbm"),
    ],
)
def test_an_argument_that_is_no_utf8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    line: list[str], named: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.argv", ["kvbm", *line])
    with pytest.raises(SystemExit) as end:
        main.main()
    said = capsys.readouterr().err
    assert (end.value.code, said.count("\n")) == (2, 1)
    assert named in said
    assert "\\udcff" in said
    assert "UTF-8" in said


@pytest.mark.slow
def test_a_closed_stream_is_no_traceback() -> None:
    """What asks a person refuses where there is no standard input."""
    done = shell("kvbm config >&-")
    assert (done.returncode, done.stderr) == (0, b"")
    done = shell("kvbm reset --tier host --everything <&-")
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr
    assert b"--yes" in done.stderr
    assert shell("kvbm explain '' 2>&-").returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("environ", [{"PYTHONIOENCODING": "ascii"}, PLAIN_C])
def test_a_stream_without_a_character_gets_its_escape(url: str, environ: dict[str, str]) -> None:
    """In a locale without é, and for the arrow of `kvbm doctor`."""
    done = shell(f"kvbm jobs --url {url}", **environ)
    assert done.returncode == 0, done.stderr
    assert b"\\xe9" in done.stdout
    done = shell("kvbm doctor", **environ)
    assert b"Traceback" not in done.stderr
    assert b"\\u2192" in done.stdout
