"""Engines of several shapes on one set of tiers, in vLLM's own server with its own processes.

vLLM on CPU runs tensor parallelism alone: a KV connector beside pipeline stages ends its core, and
latent attention does not begin behind a prefix. Worker halves in processes stand for those
(`tests/services/host_tier/shell/test_shapes.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.vllm.conversation import Answer
from tests.vllm.harness import LiveStack, alike, live_stack, prompt, wait_for
from tests.vllm.server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT_TOKENS, BLOCKS, CACHED = 500, 15, 480
"""The blocks before the end of a prompt, and so many tokens of them that are found."""


@contextmanager
def served(stack: LiveStack, model: str, log_dir: Path, ranks: int) -> Iterator[ServerProcess]:
    """A server of so many ranks, all attached."""
    server = ServerProcess(
        model, stack.settings, log=log_dir / f"tp{ranks}.log",
        arguments=["--tensor-parallel-size", str(ranks)] if ranks > 1 else [],
        environ={"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))},
    )  # fmt: skip
    try:
        server.wait_started()
        server.wait_attached()
        assert stack.workers() == set(range(ranks))
        yield server
    finally:
        server.stop()
    wait_for(lambda: not stack.workers(), "the ranks do not leave")


def stored(stack: LiveStack, server: ServerProcess, tokens: Sequence[int]) -> Answer:
    """Compute a prompt, whose blocks are in the host tier then."""
    before = stack.held("host-tier")
    answer, _ = server.complete(tokens)
    assert answer.cached == 0
    wait_for(lambda: len(stack.held("host-tier") - before) == BLOCKS, "nothing is stored")
    return answer


def wait_counted(server: ServerProcess, loads: int) -> None:
    """Wait until so many blocks are counted as loaded, and none as failed."""
    wait_for(lambda: server.counted("loaded_blocks") == loads, "loads are not counted")
    assert server.counted("load_failed_blocks") == 0


def test_what_one_shape_stores_the_other_loads(model: str, log_dir: Path) -> None:
    """Goal: blocks are cut by layers and heads, not by ranks: one size, one name.

    1. One rank, two ranks, one rank again: each engine loads the prompts of those before it, and
    every rank compares what it has read. 2. It computes a prompt of its own.
    """
    prompts: list[list[int]] = []
    answers: list[Answer] = []
    sizes: set[int] = set()
    with live_stack({"cpu_cache_gb": 0.1}) as stack:
        for ranks in (1, 2, 1):
            with served(stack, model, log_dir, ranks) as server:
                sizes |= {
                    one.block_bytes for one in stack.call(stack.view.stats("host-tier")).workers
                }
                for tokens, expected in zip(prompts, answers, strict=True):
                    loaded, _ = server.complete(tokens)
                    assert loaded.cached == CACHED, ranks
                    assert alike([loaded], [expected]), ranks
                wait_counted(server, len(prompts) * BLOCKS)
                prompts.append(prompt(len(prompts), PROMPT_TOKENS))
                answers.append(stored(stack, server, prompts[-1]))
    assert len(sizes) == 1
