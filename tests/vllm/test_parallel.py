"""Several ranks: tensor and data parallelism, in vLLM's own server with its own processes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_common.runtime.processes import free_port

from tests.vllm.harness import LiveStack, alike, live_stack, prompt, same, wait_for
from tests.vllm.server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BY_NAME = {
    "kv_connector": "DynamoConnector",
    "kv_role": "kv_both",
}
"""KVBM's own name for it; our entry point has told vLLM where it is."""


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    with live_stack({"cpu_cache_gb": 0.1}) as running:
        yield running


def test_two_ranks_store_and_load_their_parts(stack: LiveStack, model: str, log_dir: Path) -> None:
    """Goal: a block of a tensor-parallel engine is the parts of all ranks, together or not at all.

    1. A prompt is computed by two ranks; the host tier stores whole blocks.
    2. The device is emptied: the same answer, from the host tier, without a failed load.
    3. The host tier is killed and starts again: both ranks come back, and caching resumes.
    """
    arguments = ["--tensor-parallel-size", "2"]
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    server = ServerProcess(
        model, stack.settings, log=log_dir / "tp.log", arguments=arguments, environ=environ
    )
    try:
        server.wait_started()
        server.wait_attached()
        assert stack.workers() == {0, 1}
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

        stack.kill("host-tier")
        stack.start("host-tier")
        wait_for(lambda: stack.workers() == {0, 1}, "the ranks do not come back")
        seeds = itertools.count(2)

        def caches_again() -> bool:
            before = server.counted("loaded_blocks")
            again = prompt(next(seeds), 500)
            cold, _ = server.complete(again)
            server.reset()
            loaded, _ = server.complete(again)
            assert alike([loaded], [cold])
            return server.counted("loaded_blocks") == before + 15

        wait_for(caches_again, "caching does not resume", deadline_s=30)
    finally:
        server.stop()


def test_data_parallel_ranks_and_adapters(
    stack: LiveStack, model: str, lora: str, log_dir: Path
) -> None:
    """Goal: ranks are sources of their own that share the tiers; an adapter is part of the name.

    1. Each rank computes a prompt: the index has two device sources.
    2. Either loads what the other computed.
    3. With an adapter nothing is found, and the answer differs; its own blocks are found again.
    4. After a reset the index has no device blocks left.
    """
    before = stack.held("host-tier")
    # Each rank adds its number to both.
    events = {"enable_kv_cache_events": True, "publisher": "zmq",
              "endpoint": f"tcp://*:{free_port()}",
              "replay_endpoint": f"tcp://*:{free_port()}"}  # fmt: skip
    arguments = ["--data-parallel-size", "2", "--enable-lora", "--lora-modules", f"adapter={lora}"]
    server = ServerProcess(
        model, stack.settings, log=log_dir / "dp.log",
        transfer=BY_NAME, arguments=[*arguments, "--kv-events-config", json.dumps(events)],
        environ={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )  # fmt: skip

    def stored() -> int:
        return len(stack.held("host-tier") - before)

    def on_devices() -> list[int]:
        sources = stack.indexed().items()
        return sorted(len(names) for source, names in sources if source.startswith("vllm"))

    try:
        server.wait_started()
        server.wait_attached(engines=2)
        mine, theirs = prompt(20, 500), prompt(21, 500)
        first, _ = server.complete(mine, rank=0)
        second, _ = server.complete(theirs, rank=1)
        assert first.cached == second.cached == 0
        wait_for(lambda: stored() == 30, "nothing is stored")
        wait_for(
            lambda: on_devices() == [15, 15], "the index differs", details=lambda: f"{on_devices()}"
        )
        for tokens, rank, computed in ((mine, 1, first), (theirs, 0, second)):
            loaded, _ = server.complete(tokens, rank=rank)
            assert loaded.cached == 480
            assert alike([loaded], [computed])

        adapted, _ = server.complete(mine, rank=0, model="adapter")
        assert adapted.cached == 0
        assert not alike([adapted], [first])
        wait_for(lambda: stored() == 45, "the adapter's blocks are not stored")
        server.reset()
        wait_for(
            lambda: not on_devices(), "the index is not told", details=lambda: f"{on_devices()}"
        )
        again, _ = server.complete(mine, rank=1, model="adapter")
        assert again.cached == 480
        assert alike([again], [adapted])
    finally:
        server.stop()
