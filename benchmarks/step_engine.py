"""vLLM's scheduler and our connector, step by step, without a model: see `step.py`.

`python -m benchmarks.step_engine MODEL '{…Wanted…}'` prints a `Measured` as JSON. It runs in vLLM's
environment. Every step makes the calls that vLLM's engine core and its V2 model runner make. In the
place of the model two loops of known work run: one holds Python's lock, one gives it up often.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

BLOCK_TOKENS = 16
LAYERS, HEADS, HEAD_SIZE = 2, 1, 8
WINDOW_TOKENS = 512
PROMPT_TOKENS = 1_000
MODEL_TOKENS = 2_048
STEP_TOKENS = 8_192
VOCABULARY = 1_000
SETTLE_S = 20.0
TOKEN = 7
"""What every answer says."""
LOOP = 15_000
"""Rounds of the loop that holds Python's lock: about a millisecond."""
RELEASES, RELEASED_BYTES = 100, 8_192
"""Sums of the loop that gives the lock up, as torch's calls do; of less zlib keeps it."""
SCHEDULER_CALLS = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished_all_groups", "request_finished",
    "get_kv_connector_stats", "get_external_cache_hit_sources", "has_pending_push_work",
    "has_pending_block_frees", "on_new_request", "take_events", "get_loaded_kv_cache_group_ids",
)  # fmt: skip
WORKER_CALLS = (
    "handle_preemptions", "bind_connector_metadata", "start_load_kv", "finish_forward",
    "wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors",
    "get_kv_connector_stats", "get_kv_connector_kv_cache_events", "build_connector_worker_meta",
    "clear_connector_metadata",
)  # fmt: skip


class Wanted(msgspec.Struct):
    """A run: the connector, and how many requests decode for how many steps."""

    connector: dict[str, Any]
    running: int
    steps: int
    pause_ms: float = 1.0
    """What a step waits without Python's lock, as for a device."""
    windowed: bool = False
    """Half of the layers look back no further than `WINDOW_TOKENS`: two KV groups."""
    drafts: int = 0
    """Draft tokens of each request in a step; from none to all are right. Steps do not overlap."""


class Measured(msgspec.Struct):
    """What the steps of a run have cost, in microseconds a step."""

    calls_us: list[float] = []
    """Wall-clock time of our calls."""
    processor_us: list[float] = []
    """The engine thread's processor time in our calls."""
    by_call_us: dict[str, float] = {}
    """Processor time by call, on average."""
    threads_us: dict[str, float] = {}
    """Processor time of the other threads, on average."""
    holding_us: list[float] = []
    """Wall-clock time of the loop that holds Python's lock."""
    releasing_us: list[float] = []
    """Wall-clock time of the loop that gives it up."""
    counts: dict[str, int] = {}


class Timed:
    """Times calls of a connector, and adds them up by step."""

    def __init__(self) -> None:
        self.wall_s = self.processor_s = 0.0
        self.by_call: defaultdict[str, float] = defaultdict(float)
        self._depth = 0

    def wrap(self, connector: Any, names: tuple[str, ...], side: str) -> None:
        """Time these calls of a connector from now on."""
        for name in names:
            setattr(connector, name, self._timing(getattr(connector, name), f"{side} {name}"))

    def _timing(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            # The processor's clock takes 1 µs to read: a fourth of what a step's calls take.
            processor, wall = time.thread_time(), time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                wall, processor = time.perf_counter() - wall, time.thread_time() - processor
                self._depth -= 1
                if not self._depth:
                    self.wall_s += wall
                    self.processor_s += processor
                    self.by_call[name] += processor

        return timed

    def take(self) -> tuple[float, float]:
        """Return wall-clock and processor time since the last call, in microseconds."""
        taken = self.wall_s * 1e6, self.processor_s * 1e6
        self.wall_s = self.processor_s = 0.0
        return taken


class StepEngine:
    """One engine: a scheduler, a worker's connector, and answers that are made up."""

    def __init__(self, model: str, wanted: Wanted) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        blocks = wanted.running * (PROMPT_TOKENS + wanted.running + 2 * wanted.steps)
        config = _vllm_config(model, wanted)
        caches = _kv_cache_config(2 * blocks // BLOCK_TOKENS + 100, windowed=wanted.windowed)
        config.cache_config.num_gpu_blocks = caches.num_blocks
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._drafts = wanted.drafts
        self.scheduler = (Scheduler if wanted.drafts else AsyncScheduler)(
            vllm_config=config, kv_cache_config=caches, block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS, log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
        )  # fmt: skip
        self.connector: Any = self.scheduler.connector
        self.worker: Any = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, caches
        )
        self.worker.register_kv_caches(_tensors(caches))
        self._in_flight: deque[Any] = deque()
        self.timed = Timed()
        self.timed.wrap(self.connector, SCHEDULER_CALLS, "scheduler")
        self.timed.wrap(self.worker, WORKER_CALLS, "worker")

    def attached(self) -> bool:
        """Return whether both halves are there; a connector that does nothing always is."""
        half = getattr(self.connector, "_scheduler_half", None)
        side = getattr(self.worker, "_worker", None)
        lent = side is not None and side._half is not None and side._half.epoch
        return half is None or bool(half.attached and half.streams_attached and lent)

    def submit(self, number: int, answer: int) -> None:
        """Add a request; lengths differ, so that blocks become full in different steps."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        parameters = SamplingParams(temperature=0, max_tokens=answer)
        parameters.update_from_generation_config({}, eos_token_id=None)
        rng = random.Random(number)
        tokens = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS + number)]
        self.scheduler.add_request(
            Request(
                request_id=f"request {number}", prompt_token_ids=tokens,
                sampling_params=parameters, pooling_params=None, block_hasher=self._hasher,
            )
        )  # fmt: skip

    def step(self, compute: Callable[[], None]) -> None:
        """Plan a step while the one before computes, and take that one's output."""
        self.scheduler.has_requests()
        output = self.scheduler.schedule()
        self._in_flight.append((output, self._run(output)))
        compute()
        if len(self._in_flight) > 1 or self._drafts or not output.num_scheduled_tokens:
            self._update(*self._in_flight.popleft())

    def _run(self, output: Any) -> Any:
        """Call the worker's connector as vLLM's V2 model runner does."""
        from vllm.v1.outputs import KVConnectorOutput

        worker = self.worker
        worker.handle_preemptions(output.kv_connector_metadata)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(None)
        worker.finish_forward()
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        found = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return found

    def _update(self, output: Any, connector_output: Any) -> None:
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        drafts = output.scheduled_spec_decode_tokens
        sampled = [
            [TOKEN] * (1 + random.randint(0, len(drafts.get(name, ()))))
            if _is_whole(requests.get(name)) else [] for name in names
        ]  # fmt: skip
        answer = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled, kv_connector_output=connector_output,
        )  # fmt: skip
        self.scheduler.update_from_output(output, answer)
        if self._drafts:
            going = [name for name in names if _is_whole(requests.get(name))]
            guesses = [[TOKEN] * self._drafts] * len(going)
            self.scheduler.update_draft_token_ids(DraftTokenIds(going, guesses))


def _is_whole(request: Any) -> bool:
    return request is not None and request.num_computed_tokens >= request.num_prompt_tokens


def _vllm_config(model: str, wanted: Wanted) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    drafts = {"method": "ngram", "num_speculative_tokens": wanted.drafts,
              "prompt_lookup_max": 2, "prompt_lookup_min": 1}  # fmt: skip
    arguments = EngineArgs(
        model=model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        block_size=BLOCK_TOKENS, max_model_len=MODEL_TOKENS, max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=wanted.running, enable_prefix_caching=True,
        async_scheduling=not wanted.drafts,
        speculative_config=drafts if wanted.drafts else None,
        kv_transfer_config=KVTransferConfig(**wanted.connector),
    )  # fmt: skip
    return arguments.create_engine_config()


def _kv_cache_config(blocks: int, *, windowed: bool) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as specs

    features: dict[str, Any] = {
        "block_size": BLOCK_TOKENS, "num_kv_heads": HEADS, "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }  # fmt: skip
    names = [f"layer.{number}" for number in range(LAYERS)]
    groups = [specs.KVCacheGroupSpec(names, specs.FullAttentionSpec(**features))]
    if windowed:
        window = specs.SlidingWindowSpec(sliding_window=WINDOW_TOKENS, **features)
        groups.append(specs.KVCacheGroupSpec([f"window.{name}" for name in names], window))
    return specs.KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups, kv_cache_layout="LBHNC"
    )


def _tensors(caches: Any) -> dict[str, Any]:
    """Make a tensor for the layers of each place in a block; groups share them."""
    import torch

    shape = (caches.num_blocks, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE)
    tensors = [torch.zeros(shape) for _ in range(LAYERS)]
    groups = [group.layer_names for group in caches.kv_cache_groups]
    return {name: one for names in groups for name, one in zip(names, tensors, strict=True)}


class Loops:
    """The work of known length that stands for a model."""

    def __init__(self, pause_ms: float) -> None:
        self._pause_s = pause_ms / 1000
        self._data = bytes(RELEASED_BYTES)
        self.holding_us: list[float] = []
        self.releasing_us: list[float] = []

    def __call__(self) -> None:
        """Run both loops, then wait as for a device."""
        started = time.perf_counter()
        total = 0
        for number in range(LOOP):
            total += number
        middle = time.perf_counter()
        for _ in range(RELEASES):
            zlib.crc32(self._data)
        ended = time.perf_counter()
        self.holding_us.append((middle - started) * 1e6)
        self.releasing_us.append((ended - middle) * 1e6)
        time.sleep(self._pause_s)


def threads_us() -> dict[str, float]:
    """Return the processor time of the other threads of this process, by name."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: defaultdict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        number = int(task.name)
        if number != threading.get_native_id():
            spent_ns = int((task / "schedstat").read_text().split()[0])
            found[names.get(number) or (task / "comm").read_text().strip()] += spent_ns / 1000
    return dict(found)


def measure(engine: StepEngine, wanted: Wanted) -> Measured:
    """Let requests be prefilled, then decode, and time the steps that only decode."""
    deadline_s = time.monotonic() + SETTLE_S
    while not engine.attached():
        assert time.monotonic() < deadline_s, "not attached"
        time.sleep(0.01)
    # The first prompt decodes while the last one is prefilled.
    for number in range(wanted.running):
        engine.submit(number, answer=(1 + wanted.drafts) * 2 * wanted.steps + wanted.running)
    while any(not _is_whole(one) for one in engine.scheduler.requests.values()):
        engine.step(lambda: time.sleep(0.005))
    for _ in range(BLOCK_TOKENS):
        engine.step(lambda: time.sleep(0.02))
    found, loops = Measured(), Loops(wanted.pause_ms)
    before = threads_us()
    engine.timed.take()
    engine.timed.by_call.clear()
    for _ in range(wanted.steps):
        engine.step(loops)
        wall_us, processor_us = engine.timed.take()
        found.calls_us.append(wall_us)
        found.processor_us.append(processor_us)
    steps = wanted.steps
    found.threads_us = {
        name: (spent - before.get(name, 0.0)) / steps for name, spent in threads_us().items()
    }
    found.by_call_us = {name: spent * 1e6 / steps for name, spent in engine.timed.by_call.items()}
    found.holding_us, found.releasing_us = loops.holding_us, loops.releasing_us
    if hasattr(engine.connector, "counts"):
        found.counts = engine.connector.counts()
    return found


def main() -> None:
    """Measure what the arguments want, and print it."""
    model, wanted = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Wanted)
    engine = StepEngine(model, wanted)
    found = measure(engine, wanted)
    print(msgspec.json.encode(found).decode(), flush=True)
    engine.worker.shutdown()
    engine.connector.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
