"""The audit's answer for what pip-audit may print, from a program that stands for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.supply.audit import audit

CLEAN = {"name": "one", "version": "1.0", "vulns": []}
SKIPPED = {"name": "two", "skip_reason": "Dependency not found on PyPI"}
WEAK = {
    "name": "three",
    "version": "3.0",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.1"], "aliases": [], "description": "bad"}],
}
DEAD = 'echo "WARNING: a line" >&2; echo "ConnectionError: no route to the data" >&2; exit 1'


def prints(*packages: Mapping[str, object], exit_code: int = 0) -> str:
    """Return a program that prints a report of these packages."""
    report = json.dumps({"dependencies": packages, "fixes": []})
    return f"echo '{report}'; echo 'No known vulnerabilities found' >&2; exit {exit_code}"


@pytest.mark.parametrize(
    ("program", "line", "exit_code", "required_exit_code"),
    [
        (prints(CLEAN), "1 packages looked up, 0 weaknesses known", 0, 0),
        (prints(CLEAN, WEAK, exit_code=1), "three 3.0: PYSEC-1, fixed in 3.1", 1, 1),
        (prints(SKIPPED), "NOT AUDITED: 1 of 1 packages: no data could be had", 0, 1),
        (prints(CLEAN, SKIPPED), "NOT AUDITED: 1 of 2 packages", 0, 1),
        (prints(), "NOT AUDITED: 0 of 0 packages", 0, 1),
        (DEAD, "gives no report: ConnectionError: no route to the data", 0, 1),
        ("exit 7", "gives no report: exit code 7", 0, 1),
    ],
)
def test_what_was_not_looked_up_is_not_called_clean(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    program: str,
    line: str,
    exit_code: int,
    required_exit_code: int,
) -> None:
    """Goal: pip-audit without its data exits with 0 and finds nothing; the audit says so."""
    command = tmp_path / "pip-audit"
    command.write_text(f"#!/bin/sh\n{program}\n")
    command.chmod(0o700)
    lock = tmp_path / "lock.txt"
    assert audit(command, lock, required=False) == exit_code
    printed = capsys.readouterr().out
    assert line in printed
    assert ("NOT AUDITED" in printed) == (required_exit_code > exit_code)
    assert audit(command, lock, required=True) == required_exit_code


def test_a_program_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: no traceback."""
    assert audit(tmp_path / "nothing", tmp_path / "lock.txt", required=True) == 1
    assert "NOT AUDITED" in capsys.readouterr().out
