"""Source distributions and wheels of all packages.

A wheel is built from its source distribution, in a directory that is removed. So the source
distribution is complete, and the library that a checkout runs with is not compiled again.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from release.packages import PACKAGES, project_of

FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Of Python 3.11.4 and later, that is: Debian 12 has 3.11.2."""


def require_ours(target: Path) -> None:
    """Raise ValueError unless a directory has only what `build` makes, or is missing."""
    names = {project_of(package)["name"].replace("-", "_") for package in PACKAGES}
    for path in sorted(target.iterdir()) if target.exists() else ():
        is_built = path.name.endswith((".whl", ".tar.gz")) and path.name.split("-")[0] in names
        if not is_built or not path.is_file():
            raise ValueError(f"{path} is no wheel of KVBM: nothing is removed")


def build(target: Path) -> list[Path]:
    """Build everything into an empty or missing directory; returns the files."""
    target.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        build_package(package, target)
    return sorted(target.iterdir())


def build_package(package: Path, target: Path) -> None:
    """Build one package's source distribution and its wheel."""
    with tempfile.TemporaryDirectory() as scratch:
        _hatchling(package, "sdist", Path(scratch))
        [archive] = Path(scratch).iterdir()
        with tarfile.open(archive) as opened:
            opened.extractall(scratch, **FILTER)
        _hatchling(Path(scratch) / archive.name.removesuffix(".tar.gz"), "wheel", target)
        archive.replace(target / archive.name)


def _hatchling(directory: Path, kind: str, target: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target.resolve())]
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
