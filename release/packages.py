"""The packages that are released together, and their one version.

The version stands in `libs/kvbm_stack/pyproject.toml`. The other packages have copies of it, as
their own version and in what they need of each other. The chart has one, too; `set_version` writes
them all.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STACK = ROOT / "libs/kvbm_stack"
PACKAGES = (
    ROOT / "libs/kvbm_common",
    ROOT / "libs/kvbm_cli",
    ROOT / "services/index",
    ROOT / "services/host_tier",
    ROOT / "services/disk_tier",
    ROOT / "services/metrics",
    ROOT / "connectors",
    STACK,
)
CHART = ROOT / "deploy/helm/kvbm/Chart.yaml"
VERSION = re.compile(r"(?:(?:0|[1-9][0-9]*)\.){2}(?:0|[1-9][0-9]*)")
"""Services tell NATS their version, which takes no other form."""
CHART_LINE = re.compile(r"(?m)^(version|appVersion): .*$")
OWN_LINE = re.compile(r'(?m)^version = "[^"]*"$')
PIN = re.compile(r'"(kvbm-[a-z-]+(?:\[[a-z0-9]+\])?)==[^"]*"')


def project_of(package: Path) -> dict[str, Any]:
    """Return the table `project` of a package."""
    table: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return table


def version() -> str:
    """Return the version of all packages."""
    return str(project_of(STACK)["version"])


def with_version(text: str, wanted: str) -> str:
    """Return a package's pyproject.toml with this version, as its own and of its siblings."""
    return PIN.sub(rf'"\1=={wanted}"', OWN_LINE.sub(f'version = "{wanted}"', text))


def chart_with_version(text: str, wanted: str) -> str:
    """Return the chart's Chart.yaml with this version, as its own and of the images."""
    return CHART_LINE.sub(rf"\1: {wanted}", text)


def set_version(wanted: str) -> None:
    """Write a version into every package and the chart; raises ValueError for another text."""
    if not VERSION.fullmatch(wanted):
        raise ValueError(f"version is {wanted!r}, but accepts three numbers, as 0.2.0")
    for package in PACKAGES:
        path = package / "pyproject.toml"
        path.write_text(with_version(path.read_text(), wanted))
    CHART.write_text(chart_with_version(CHART.read_text(), wanted))
