"""Several ranks: tensor parallelism, in vLLM's own server with its own processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.harness import LiveStack, alike, live_stack, prompt, same, wait_for
from tests.vllm.server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    with live_stack({"cpu_cache_gb": 0.1}) as running:
        yield running


def test_two_ranks_store_and_load_their_parts(stack: LiveStack, model: str, log_dir: Path) -> None:
    """Goal: a block of a tensor-parallel engine is the parts of all ranks, together or not at all.

    1. A prompt is computed by two ranks; the host tier stores whole blocks.
    2. The device is emptied: the same answer, from the host tier, without a failed load.
    """
    arguments = ["--tensor-parallel-size", "2"]
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    server = ServerProcess(
        model, stack.settings, log=log_dir / "tp.log", arguments=arguments, environ=environ
    )
    try:
        server.wait_started()
        wait_for(lambda: stack.workers() == {0, 1}, "the ranks do not attach")
        tokens = prompt(1, 500)
        cold, _ = server.complete(tokens)
        wait_for(lambda: len(stack.held("host-tier")) == 15, "nothing is stored")
        local, _ = server.complete(tokens)
        server.reset()
        loaded, _ = server.complete(tokens)
        assert local.cached == loaded.cached == 480
        assert same([loaded], [local])
        assert alike([cold], [local])
        wait_for(lambda: server.counted("loaded_blocks") == 15, "loads are not counted")
        assert server.counted("load_failed_blocks") == 0
    finally:
        server.stop()
