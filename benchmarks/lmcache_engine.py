"""The engine process of the LMCache arm: as tests.vllm.engine_process, in LMCache's environment."""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    """vLLM looks at every object of every module for kernels, and trips over one of llvmlite's,
    which LMCache brings along: hide it meanwhile."""
    from vllm.triton_utils import dispatcher

    rebind = dispatcher._rebind_kernels

    def without_llvmlite(originals: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in [*sys.modules] if "llvmlite" in name}
        rebind(originals)
        sys.modules.update(hidden)

    dispatcher._rebind_kernels = without_llvmlite

    from tests.vllm import engine_process

    engine_process.main()


if __name__ == "__main__":
    main()
