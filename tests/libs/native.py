"""The copying library, compiled for the tests: a checkout need not be installed to be tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from kvbm_common.copying import LIBRARY

PACKAGE = Path(__file__).resolve().parents[2] / "libs" / "kvbm_common"
IN_PACKAGE = Path("kvbm_common") / "copying"


@cache
def library() -> Path:
    """Where it is; skips the test where there is no compiler. An installed checkout has it."""
    sources = (PACKAGE / IN_PACKAGE / "native").iterdir()
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > max(s.stat().st_mtime for s in sources):
        return LIBRARY
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    directory = Path(tempfile.mkdtemp(prefix="kvbm-native-"))
    built = build(directory)
    assert built.exists(), "the library cannot be compiled"
    return built


def build(directory: Path, *, compiler: str = "cc") -> Path:
    """Run the package's build hook by hand, in a copy; gives where the library should be."""
    shutil.copy(PACKAGE / "hatch_build.py", directory)
    target = directory / IN_PACKAGE
    shutil.copytree(PACKAGE / IN_PACKAGE, target, ignore=shutil.ignore_patterns("*.so"))
    built = target / "_native.so"
    built.write_bytes(b"of another machine")
    environment = {**os.environ, "CC": compiler}
    command: list[str | Path] = [sys.executable, directory / "hatch_build.py"]
    subprocess.run(command, env=environment, check=False, capture_output=True, timeout=120)
    return built
