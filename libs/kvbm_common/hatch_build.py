"""The build hook of kvbm_common: compiles `kvbm_common/copying/_native.so`.

It takes a C compiler and no headers of Python: the library is loaded by ctypes. Without a compiler
the package is installed all the same, and copies by `memmove` and xxhash, at half the speed.
By hand, for a checkout that is not installed: `python libs/kvbm_common/hatch_build.py`.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # Run by hand where hatchling is not installed.
    BuildHookInterface = object  # type: ignore[assignment,misc]

PACKAGE = Path(__file__).resolve().parent / "kvbm_common" / "copying"
LIBRARY = PACKAGE / "_native.so"
FLAGS = ["-O3", "-fPIC", "-std=gnu11", "-fvisibility=default"]
COMPILER_LIMIT_S = 120
VARIANTS = {"baseline": [], "avx2": ["-mavx2"]} if platform.machine() == "x86_64" else {
    "baseline": []
}  # fmt: skip
"""Per processor, by the compiler's flags; choice.c takes one when the program runs."""


def compile_library() -> bool:
    """Compile, in the place of an older library; false where it cannot be done here."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    try:
        LIBRARY.unlink(missing_ok=True)
        if shutil.which(compiler[0]) is None:
            return False
        with tempfile.TemporaryDirectory() as scratch:
            _compile(compiler, Path(scratch))
    except (subprocess.SubprocessError, OSError) as error:
        print(f"kvbm_common.copying is not compiled: {error}", file=sys.stderr)
        return False
    return True


def _compile(compiler: list[str], scratch: Path) -> None:
    source = PACKAGE / "native"
    objects = []
    for name, flags in VARIANTS.items():
        built = scratch / f"{name}.o"
        _run([*compiler, *FLAGS, *flags, f"-DKVBM_MOVE=kvbm_move_{name}", "-c",
              source / "copying.c", "-o", built])  # fmt: skip
        objects.append(built)
    defined = ["-DKVBM_HAS_AVX2"] if "avx2" in VARIANTS else []
    library = scratch / LIBRARY.name
    alike = [source / "choice.c", source / "naming.c"]  # Of one variant for all processors.
    _run([*compiler, *FLAGS, *defined, "-shared", *alike, *objects, "-o", library])
    shutil.copy(library, LIBRARY)


def _run(command: list[Any]) -> None:
    subprocess.run(command, check=True, timeout=COMPILER_LIMIT_S)


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling before it writes a wheel, an editable one too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and have the wheel carry the library and name its platform."""
        if not compile_library() or version == "editable":
            return
        build_data["artifacts"].append(f"/{LIBRARY.relative_to(Path(self.root))}")
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"


if __name__ == "__main__":
    sys.exit(0 if compile_library() else "no library: is there a C compiler?")
