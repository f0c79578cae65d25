"""vLLM's division of a model into pipeline stages, where no vLLM is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest


@contextmanager
def divided(borders: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Have vLLM divide layers so, and be rank 3 of two stages by two ranks."""
    utils, state = ModuleType("vllm.distributed.utils"), ModuleType("parallel_state")
    utils.__dict__["get_pp_indices"] = lambda layers, stage, count: borders[stage]
    state.__dict__["get_pp_group"] = lambda: SimpleNamespace(rank_in_group=1)
    state.__dict__["get_tp_group"] = lambda: SimpleNamespace(rank_in_group=1, world_size=2)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("vllm", "vllm.distributed"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, "vllm.distributed.utils", utils)
        patch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
        yield
