"""Helm and the schemas of Kubernetes, or a reason why the tests are skipped."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.helm.chart import run_tool, tool

HERE = Path(__file__).parent


@functools.cache
def missing() -> str:
    """Return why helm does not run here; nothing where it does."""
    if not Path(tool("helm")).exists():
        return "make test-helm installs helm"
    try:
        return run_tool("helm", "version").stderr
    except OSError as error:
        return f"helm does not run here: {error}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs helm where there is none: it comes for x86-64 only."""
    for item in items:
        if HERE in item.path.parents and missing():
            item.add_marker(pytest.mark.skip(reason=missing()))
