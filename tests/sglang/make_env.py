"""Make the environment of the SGLang tests: `python3 tests/sglang/make_env.py .venv-sglang`.

No GPU and no kernels: what its HiCache and host pools need to be imported, and nothing else.
Idempotent: a stamp remembers what was installed. Where pip finds only a CUDA build of torch, set
PIP_EXTRA_INDEX_URL to PyTorch's CPU index.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
SGLANG = "sglang==0.5.23"
NIXL = "nixl-cu12==1.5.1"
IMPORTED = [
    "aiohttp", "compressed-tensors", "dill", "fastapi", "gguf", "ipython", "numpy", "orjson",
    "pillow", "prometheus_client", "psutil", "pybase64", "pydantic", "requests", "sentencepiece",
    "starlette", "tqdm", "transformers==5.19.0", "triton",
]  # fmt: skip
"""What SGLang imports on the way to its host pools."""
OURS = ["libs/kvbm_common", "connectors"]
NEEDED = ["xxhash", "msgspec", "pyzmq", "numpy"]
BUILD = ["hatchling", "editables"]
ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Make or complete the environment in the directory that is the first argument."""
    directory = Path(sys.argv[1]).resolve()
    stamp = directory / ".setup-stamp"
    wanted = "\n".join([TORCH, SGLANG, NIXL, *IMPORTED, *NEEDED, *OURS])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    pip(python, "--upgrade", "pip")
    pip(python, TORCH)
    install(python, "--no-deps", SGLANG, NIXL)
    constraint = directory / "torch-constraint.txt"
    constraint.write_text(f"torch=={version_of_torch(python)}\n")
    install(python, "--constraint", str(constraint), *IMPORTED, *NEEDED, *BUILD)
    ours = [arg for package in OURS for arg in ("-e", package)]
    install(python, "--no-deps", "--no-build-isolation", *ours)
    stamp.write_text(wanted)


def version_of_torch(python: Path) -> str:
    """The version that pip has found, with the name of its build."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def install(python: Path, *arguments: str) -> None:
    """Install something by uv, which takes a tenth of the time, or by pip: uv does not know of an
    index that pip is configured with."""
    uv = ROOT / ".venv" / "bin" / "uv"
    options = ["--quiet", "--no-cache", "--python", str(python)]
    command = [str(uv), "pip", "install", *options, *arguments]
    if not uv.exists() or subprocess.run(command, check=False, cwd=ROOT).returncode:
        pip(python, *arguments)


def pip(python: Path, *arguments: str) -> None:
    """Install something; pip's own errors go to the terminal."""
    command = [str(python), "-m", "pip", "install", "--quiet", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ)


if __name__ == "__main__":
    main()
