"""Dynamo's stand-alone indexer, from the same wheel as RadixTree, fed over ZMQ as vLLM would."""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import zmq
from kvbm_common.runtime.processes import free_port
from kvbm_common.wire.engine_events import (
    BlockStored,
    EngineBatch,
    encode_batch,
    published_frames,
)

from benchmarks.harness import paused, processor_s, wait_for
from benchmarks.index_workload import CHAIN_BLOCKS
from tests.dynamo_env import dynamo_python

BLOCK_TOKENS = 16
DEADLINE_S = 120.0
IDLE_S = 0.3
"""Who uses no processor time for so long has read everything."""


def stored_cpu_s(batch: int, blocks: int, *, events: int = 1) -> tuple[int, float]:
    """Blocks, and processor seconds of the indexer that heard of them, so many events a message."""
    batches = list(_batches(batch, blocks, events))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.SNDHWM, 0)
    endpoint = f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}"
    port = free_port()
    with tempfile.TemporaryFile() as log:
        command = [str(dynamo_python()), "-m", "dynamo.indexer", "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _register(f"http://127.0.0.1:{port}", endpoint)
            assert publisher.poll(int(DEADLINE_S * 1000)), "it subscribes"
            publisher.recv()
            before_s = processor_s(process.pid)
            with paused(process.pid):
                for number, frames in enumerate(batches):
                    publisher.send_multipart(published_frames(b"", number, frames))
            _wait_idle(process.pid)
            spent_s = processor_s(process.pid) - before_s
            assert _held(f"http://127.0.0.1:{port}") == _count(blocks)
        finally:
            process.kill()
            process.wait(10.0)
            publisher.close(0)
            context.term()
    return _count(blocks), spent_s


def _count(blocks: int) -> int:
    return -(-blocks // CHAIN_BLOCKS[-1]) * CHAIN_BLOCKS[-1]


def _batches(batch: int, blocks: int, events: int) -> Iterator[bytes]:
    """Chains of the longest kind, so many events a message."""
    rng = random.Random(3)
    for _ in range(_count(blocks) // CHAIN_BLOCKS[-1]):
        names = [rng.getrandbits(63) for _ in range(CHAIN_BLOCKS[-1])]
        chain: list[BlockStored] = []
        for at in range(0, len(names), batch):
            run = names[at : at + batch]
            tokens = tuple(rng.randrange(32_000) for _ in range(BLOCK_TOKENS * len(run)))
            event = BlockStored(
                block_hashes=tuple(run), parent=names[at - 1] if at else None, token_ids=tokens,
                block_size=BLOCK_TOKENS, medium="GPU", extra_keys=None,
            )  # fmt: skip
            chain.append(event)
        for at in range(0, len(chain), events):
            yield encode_batch(
                EngineBatch(ts=0.0, events=tuple(chain[at : at + events]), dp_rank=0)
            )


def _register(url: str, endpoint: str) -> None:
    body = {"instance_id": 7, "model_name": "model", "dp_rank": 0, "block_size": BLOCK_TOKENS,
            "endpoint": endpoint}  # fmt: skip

    def registered() -> bool:
        request = urllib.request.Request(
            f"{url}/register", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            urllib.request.urlopen(request, timeout=5.0).close()
        except OSError:
            return False
        return True

    wait_for(registered, deadline_s=20, what="registering")


def _wait_idle(pid: int) -> None:
    last, since_s = -1.0, time.perf_counter()

    def idle() -> bool:
        nonlocal last, since_s
        now = processor_s(pid)
        if now != last:
            last, since_s = now, time.perf_counter()
        return time.perf_counter() - since_s > IDLE_S

    wait_for(idle, deadline_s=DEADLINE_S, what="reading")


def _held(url: str) -> int:
    with urllib.request.urlopen(f"{url}/dump", timeout=60.0) as reply:
        dump: dict[str, Any] = json.load(reply)
    events = dump["model:default"]["events"]
    return len(
        {
            block["block_hash"]
            for event in events
            for block in event["event"]["data"]["stored"]["blocks"]
        }
    )
