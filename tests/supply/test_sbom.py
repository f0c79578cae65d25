"""The bill of materials that `make sbom` writes, against the lock that the images install."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements/image.txt"
GIVEN = os.environ.get("KVBM_TEST_SBOM", "")


def pins() -> dict[str, set[str]]:
    """Return every pin of the lock, as NAME@VERSION, with its hashes."""
    found: dict[str, set[str]] = {}
    pin = ""
    for line in LOCK.read_text().splitlines():
        if match := re.match(r"(\S+)==([^\s;]+)", line):
            pin = f"{match[1]}@{match[2]}"
            found[pin] = set()
        elif match := re.search(r"--hash=sha256:(\w+)", line):
            found[pin].add(match[1])
    return found


@pytest.fixture
def components() -> list[dict[str, Any]]:
    """What the bill lists; skipped where none was made."""
    if not GIVEN:
        pytest.skip("make sbom writes one")
    bill = json.loads(Path(GIVEN).read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["specVersion"] >= "1.5"
    listed: list[dict[str, Any]] = bill["components"]
    return listed


def test_the_bill_lists_exactly_what_is_installed(components: list[dict[str, Any]]) -> None:
    """Goal: every pin by its package URL, once, and nothing else."""
    listed = [component["purl"].removeprefix("pkg:pypi/") for component in components]
    assert sorted(listed) == sorted(pins())


def test_the_bill_has_the_hashes_that_pip_demands(components: list[dict[str, Any]]) -> None:
    """Goal: a file can be looked up in the bill by its hash."""
    for component in components:
        hashes = {
            one["content"]
            for reference in component["externalReferences"]
            for one in reference.get("hashes", [])
        }
        pin = f"{component['name']}@{component['version']}"
        assert hashes == pins()[pin], pin


def test_the_lock_is_read_as_it_is_written() -> None:
    """Goal: the parser of this test finds pins, each with a hash."""
    assert len(pins()) > 20
    assert all(pins().values())


def test_the_tools_are_pinned_by_hash() -> None:
    """Goal: what makes the bill, and what audits, is installed from hashes only."""
    text = (ROOT / "requirements/supply.txt").read_text()
    for tool in ("cyclonedx-bom", "pip-audit"):
        assert re.search(rf"^{tool}==\S+ \\\n    --hash=sha256:", text, re.MULTILINE), tool
    makefile = (ROOT / "Makefile").read_text()
    assert "--require-hashes --no-deps -r requirements/supply.txt" in makefile
