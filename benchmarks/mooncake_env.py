"""Make the environment of Mooncake, on top of vLLM's: `python3 -m benchmarks.mooncake_env`."""

from __future__ import annotations

from benchmarks.lmcache_env import ROOT, on_top_of_vllm

DIRECTORY = ROOT / ".venv-mooncake"
PYTHON = DIRECTORY / "bin" / "python"
MASTER = DIRECTORY / "bin" / "mooncake_master"
PACKAGE = "mooncake-transfer-engine-non-cuda"
"""The wheel for machines without CUDA; `mooncake-transfer-engine` needs CUDA's libraries."""


def main() -> None:
    """Make it once; a stamp remembers. What the wheel needs, vLLM has."""
    on_top_of_vllm(DIRECTORY, alone=[f"{PACKAGE}==0.3.13.post1"])


if __name__ == "__main__":
    main()
