"""pip-audit over a lock file, with a plain answer: weak, clean, or not audited.

    python -m tests.supply.audit .venv-supply/bin/pip-audit requirements/image.txt

Without its data pip-audit skips each package, says that no weakness is known, and exits with 0. So
here only a package that was looked up counts. What was not is no failure, because many builds have
no way to the data; KVBM_AUDIT_REQUIRED=1 makes it one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

DEADLINE_S = 300.0
OPTIONS = (
    "--require-hashes", "--disable-pip", "--format=json", "--progress-spinner=off", "--timeout=10",
)  # fmt: skip


class NoReport(Exception):
    """pip-audit gave no report; the text is its last line."""


class Weakness(msgspec.Struct, frozen=True):
    """One entry of the data."""

    id: str
    fix_versions: tuple[str, ...] = ()


class Package(msgspec.Struct, frozen=True):
    """What is known of one pin; without a version it was not looked up."""

    name: str
    version: str = ""
    vulns: tuple[Weakness, ...] = ()
    skip_reason: str = ""


class Report(msgspec.Struct, frozen=True):
    """What pip-audit prints."""

    dependencies: tuple[Package, ...]


def audited(command: Path, lock: Path) -> Report:
    """Run pip-audit over a lock file; raises NoReport."""
    words = [str(command), "--requirement", str(lock), *OPTIONS]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        return msgspec.json.decode(done.stdout, type=Report)
    except msgspec.MsgspecError:
        lines = done.stderr.strip().splitlines()
        raise NoReport(lines[-1] if lines else f"exit code {done.returncode}") from None
    except subprocess.TimeoutExpired:
        raise NoReport(f"no end within {DEADLINE_S} s") from None
    except OSError as error:
        raise NoReport(str(error)) from None


def told(report: Report) -> tuple[list[str], int, int]:
    """Return a line for each weakness, how many packages were looked up, and how many were not."""
    weak = [
        f"{package.name} {package.version}: {one.id}, fixed in {', '.join(one.fix_versions) or '–'}"
        for package in report.dependencies
        for one in package.vulns
    ]
    skipped = sum(bool(package.skip_reason) for package in report.dependencies)
    return weak, len(report.dependencies) - skipped, skipped


def audit(command: Path, lock: Path, *, required: bool) -> int:
    """Print what is known, and return the exit code."""
    try:
        weak, known, skipped = told(audited(command, lock))
    except NoReport as error:
        print(f"NOT AUDITED: {lock}: pip-audit gives no report: {error}")
        return int(required)
    for line in weak:
        print(line)
    if skipped or not known:
        print(f"NOT AUDITED: {skipped} of {known + skipped} packages: no data could be had")
    print(f"{lock}: {known} packages looked up, {len(weak)} weaknesses known")
    return int(bool(weak) or (required and (skipped > 0 or known == 0)))


def main(words: list[Any]) -> int:
    """Run the command line."""
    command, lock = words
    return audit(Path(command), Path(lock), required=bool(os.environ.get("KVBM_AUDIT_REQUIRED")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
