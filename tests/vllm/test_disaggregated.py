"""Disaggregated serving: a prefill worker with KVBM and vLLM's NixlConnector, a decode worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_common.runtime.processes import free_port

from tests.vllm.harness import LiveStack, alike, live_stack, prompt, wait_for
from tests.vllm.server import TRANSFER, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"num_threads": 0},
}
"""By default vLLM's agent has four threads that spin: more than a small machine has to give."""
BOTH = {
    "kv_connector": "PdConnector",
    "kv_connector_module_path": "kvbm_connectors.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [TRANSFER, NIXL]},
}
"""What docs/vllm.md says for a prefill worker; KVBM's guide calls it `--connector kvbm nixl`."""
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a router says to a prefill worker; the reply is what it says to the decode worker."""


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    with live_stack({"cpu_cache_gb": 0.1}) as running:
        yield running


def test_prefill_from_the_cache_decode_elsewhere(
    stack: LiveStack, model: str, log_dir: Path
) -> None:
    """Goal: KVBM serves the prefill worker while NIXL hands its blocks to the decode worker.

    1. The prefill worker computes a prompt, the decode worker pulls its blocks and answers.
    2. The prefill worker's device is emptied; it loads the prompt from the host tier, and the
       decode worker, emptied too, gives the same answer.
    """
    common = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "UCX_TLS": "tcp,self,sm",
        # The progress thread of vLLM's NIXL spins, on the core that its worker is bound to.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # vLLM compiles a function on the first NIXL transfer: a minute here, beyond its own lease.
        "TORCHDYNAMO_DISABLE": "1",
    }
    servers = [
        ServerProcess(
            model, stack.settings, log=log_dir / f"{name}.log", transfer=transfer,
            environ=common | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        )
        for name, transfer in (("prefill", BOTH), ("decode", NIXL))
    ]  # fmt: skip
    prefill, decode = servers
    try:
        for server in servers:
            server.wait_started()
        tokens = prompt(1, 500)
        answers = []
        for expected in (0, 480):
            prefill.wait_attached()
            computed, found = prefill.complete(tokens, new_tokens=1, kv_transfer_params=PREFILL)
            assert computed.cached == expected
            assert found["do_remote_prefill"]
            answer, _ = decode.complete(tokens, kv_transfer_params=found)
            answers.append(answer)
            wait_for(lambda: len(stack.held("host-tier")) == 15, "nothing is stored")
            for server in servers:
                server.reset()
        assert alike(answers[:1], answers[1:])
        alone, _ = decode.complete(tokens)
        assert alone.cached == 0
        assert alike([alone], answers[:1])
        assert prefill.counted("loaded_blocks") == 15
        pulls = "vllm:nixl_xfer_time_seconds_count{"
        assert sum(n for name, n in decode.metrics().items() if name.startswith(pulls)) == 2
    finally:
        for server in servers:
            server.stop()
