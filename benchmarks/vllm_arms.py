"""Arms: the engines that the vLLM benchmark compares, each on the same model and processor.

All are there from the beginning and idle when it is not their turn; every figure comes from rounds
in which each arm has its turn, so that another load on the machine meets all of them.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm_common.runtime.processes import dying_with_parent, free_port

from benchmarks.lmcache_env import PYTHON as LMCACHE_PYTHON
from tests.vllm.harness import (
    ONE_THREAD,
    ROOT,
    VLLM_PYTHON,
    EngineProcess,
    LiveStack,
    live_stack,
)

BLOCK_TOKENS = 64
DEVICE_BLOCKS = 48
"""3,072 tokens: one long prompt fits, a conversation of many users does not."""
BLOCK_BYTES = 12 * 4 * 2 * 64 * BLOCK_TOKENS * 2
"""12 layers, 4 heads of keys and of values, 64 wide, in bfloat16."""
MODEL = ["--layers", "12", "--hidden", "1024", "--heads", "8", "--kv-heads", "4",
         "--dtype", "bfloat16", "--spread", "0.05"]  # fmt: skip
"""About 170 million parameters."""
MODEL_DEADLINE_S = 300.0
ENGINE: dict[str, object] = {
    "dtype": "bfloat16",
    "block_size": BLOCK_TOKENS,
    "num_gpu_blocks_override": DEVICE_BLOCKS,
    "max_model_len": 2560,
    "max_num_batched_tokens": 2560,
}


LMCACHE: Any = {"python": LMCACHE_PYTHON, "module": "benchmarks.lmcache_engine"}


@dataclass(frozen=True, slots=True)
class Arms:
    """The engines."""

    plain: EngineProcess
    host: EngineProcess
    """With an arena that has room for everything, and shipped settings."""
    trusting: EngineProcess
    """As `host`, but no read is verified."""
    disk: EngineProcess
    """With an arena that has room for one prompt, and a disk that has room for all."""
    disk_stack: LiveStack
    lmcache: EngineProcess

    def all(self) -> tuple[EngineProcess, ...]:
        return self.plain, self.host, self.trusting, self.disk, self.lmcache


def make_model(directory: Path) -> str:
    """Write the random model that all arms serve; returns where."""
    model = directory / "model"
    script = ROOT / "tests" / "vllm" / "make_model.py"
    subprocess.run([VLLM_PYTHON, script, model, *MODEL], check=True, stderr=subprocess.DEVNULL,
                   timeout=MODEL_DEADLINE_S)  # fmt: skip
    return str(model)


@contextlib.contextmanager
def arms() -> Iterator[Arms]:
    """Start everything, one after the other."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-bench-")))
        model = make_model(directory)

        def engine(name: str, tiers: LiveStack | None = None, **more: object) -> EngineProcess:
            settings = tiers.settings if tiers is not None else None
            process = EngineProcess(
                model, settings, log=directory / f"{name}.log", arguments=ENGINE | more,
                environ=ONE_THREAD,
                **(LMCACHE if name == "lmcache" else {}),
            )  # fmt: skip
            stack.callback(process.stop)
            process.wait_started()
            if tiers is not None:
                process.wait_attached(tiers)
            return process

        host_tiers = stack.enter_context(live_stack({"cpu_cache_gb": 2.0}))
        trusting_tiers = stack.enter_context(
            live_stack({"cpu_cache_gb": 2.0, "verify_host_reads": "never"})
        )
        disk_tiers = stack.enter_context(
            live_stack(
                {
                    "cpu_cache_gb": 40 * BLOCK_BYTES / 1e9,
                    "disk_cache_gb": 2.0,
                    "disk_cache_dirs": directory,
                    "disable_disk_offload_filter": True,
                }
            )
        )
        yield Arms(
            plain=engine("plain"),
            host=engine("host", host_tiers),
            trusting=engine("trusting", trusting_tiers),
            disk=engine("disk", disk_tiers),
            disk_stack=disk_tiers,
            lmcache=engine("lmcache", kv_transfer_config=lmcache_server(stack, directory)),
        )


def lmcache_server(stack: contextlib.ExitStack, directory: Path) -> dict[str, object]:
    """Start LMCache's server in its fast mode; returns what its connector is told."""
    port = free_port()
    log = stack.enter_context((directory / "lmcache-server.log").open("wb"))
    command = [
        str(LMCACHE_PYTHON), "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1",
        "--port", str(port), "--chunk-size", str(BLOCK_TOKENS), "--l1-size-gb", "2",
        "--eviction-policy", "LRU", "--supported-transfer-mode", "lmcache_driven",
        "--disable-metrics",
    ]  # fmt: skip
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=dying_with_parent()
    )
    stack.callback(end, server)
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and kill it when it does not."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
