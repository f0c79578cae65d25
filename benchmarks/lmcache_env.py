"""Make the environment of LMCache, on top of vLLM's: `python3 -m benchmarks.lmcache_env`.

LMCache 0.5.6 wants other versions of what vLLM has: its own lie before vLLM's on the path.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIRECTORY = ROOT / ".venv-lmcache"
PYTHON = DIRECTORY / "bin" / "python"
ALONE = [
    "lmcache==0.5.6",
    "sortedcontainers",
    "aiofile",
    "caio",
    "aiofiles",
    "redis",
    "nvtx",
    "awscrt",
]
WITH_DEPENDENCIES = [
    "google-api-core", "google-cloud-bigtable", "numpy<=2.2.6", "protobuf<7",
    "opentelemetry-api<=1.40.0", "opentelemetry-sdk<=1.40.0", "opentelemetry-exporter-otlp<=1.40.0",
    "opentelemetry-exporter-prometheus<=0.61b0",
]  # fmt: skip


def main() -> None:
    """Make it once; a stamp remembers."""
    on_top_of_vllm(DIRECTORY, alone=ALONE, with_dependencies=WITH_DEPENDENCIES)


def on_top_of_vllm(
    directory: Path, *, alone: Sequence[str], with_dependencies: Sequence[str] = ()
) -> None:
    """Make an environment that finds vLLM's packages after its own, unless it is there."""
    stamp = directory / ".setup-stamp"
    wanted = "\n".join([*alone, *with_dependencies])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    (theirs,) = (ROOT / ".venv-vllm").glob("lib/python*/site-packages")
    (packages / "vllm.pth").write_text(f"{theirs}\n")
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", *alone], check=True)
    if with_dependencies:
        subprocess.run([*pip, *with_dependencies], check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
