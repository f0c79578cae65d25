"""A vLLM engine in a process of its own, driven over stdin and stdout by JSON lines.

It uses vLLM in one process, so that its scheduler and connector can be looked at.
`python -m tests.vllm.engine_process MODEL '{…LLM arguments…}'`; `ready` comes first.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.vllm.conversation import Answer, Ask, Command, Reply

SETTLE_DEADLINE_S = 15.0
SCHEDULER_CALLS = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished", "get_kv_connector_stats",
    "get_external_cache_hit_sources", "has_pending_push_work", "has_pending_block_frees",
)  # fmt: skip
"""What vLLM's scheduler calls on its way through a step."""
SAMPLES_PER_SECOND = 16_000
GROUP_BYTES = 4
"""vLLM's keys end in the number of the KV group."""


class Engine:
    """vLLM and its connector."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        options: dict[str, Any] = {
            "skip_tokenizer_init": True, "enforce_eager": True, "enable_prefix_caching": True,
            "disable_log_stats": False,
        }  # fmt: skip
        self._llm = LLM(model=model, **(options | arguments))
        self._engine = self._llm.llm_engine
        self._preemptions = 0
        self._requests: dict[str, Any] = {}
        """vLLM's request objects that have not been looked at since they finished."""
        self._names: dict[bytes, str] = {}
        self._timed: Counter[str] = Counter()
        self.scheduler = self._engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    def answer(self, command: Command) -> Reply:
        """Carry out one command."""
        answers: list[Answer] = []
        ok = True
        match command.what:
            case "run":
                answers = self._run(command.asks)
            case "reset":
                ok = bool(self._engine.reset_prefix_cache())
            case "verify never":
                worker_of_this_process()._worker._half._pulls._verify_every = 0
            case "time calls":
                self._time_calls()
            case "load weights":
                self._load_weights(command.path)
            case "receive weights":
                self._llm.collective_rpc(functools.partial(receive, path=command.path))
            case "replace adapter":
                ok = self._replace_adapter(command.asks[0])
            case "reset all":
                ok = bool(
                    self._engine.reset_prefix_cache(
                        reset_running_requests=True, reset_connector=True
                    )
                )
            case "reset refused":
                ok = self._reset_refused(command.asks[0])
            case "write in pause":
                self._write_in_pause(command.path, command.asks[0])
            case "pause":
                self._engine.engine_core.engine_core.pause_scheduler(clear_cache=True)
                self._engine.engine_core.engine_core.resume_scheduler()
            case "park":
                worker_of_this_process().unregister_kv_caches()
                worker_of_this_process().unregister_kv_caches()
            case "restore":
                worker_of_this_process().restore_kv_caches()
                worker_of_this_process().restore_kv_caches()
            case "hold loads":
                hold_loads(Path(command.path))
        if command.settle:
            ok = self._settle() and ok
        return Reply(
            answers=answers,
            ok=ok,
            counts=self._counts(),
            preemptions=self._preemptions,
            drafts=self._drafts(),
            blocks=self._dump(command.group) if command.what == "dump" else [],
            engine=self.connector._life.engine if self._half() is not None else "",
            epochs=self._epochs(),
            streams_attached=self._half() is not None and self._half().streams_attached,
            cpus=cpus_of_threads(),
            expects_reads=bool(lent_half() and lent_half().expects_reads)
            if self._half() is not None
            else False,
        )

    @property
    def _hash_tokens(self) -> int:
        """Tokens of one of vLLM's hashes."""
        return int(self.scheduler.kv_cache_manager.block_pool.hash_block_size)

    def _learn_names(self) -> None:
        """What we call the blocks that vLLM has its own hashes for."""
        side: Any = getattr(self.connector, "_scheduler", None)
        while self._requests:
            _, request = self._requests.popitem()
            if side is not None:
                from kvbm_connectors.vllm.adapters import AdapterRefused
                from kvbm_connectors.vllm.tracked import Tracked  # Others' engines have none.

                try:
                    marks = side.extras.of(request)
                except AdapterRefused:
                    continue  # Its blocks have no names.
                tracked, hashes = Tracked(request, "", marks), request.block_hashes
                for group in side.groups:
                    # A block is called by the last hash in it.
                    each = group.block_tokens // self._hash_tokens
                    names = tracked.first_names(group.hasher, len(hashes) // each)
                    number = group.table.to_bytes(GROUP_BYTES, "big")
                    keys = (bytes(one) + number for one in hashes[each - 1 :: each])
                    self._names.update(zip(keys, (name.hex() for name in names), strict=True))

    def _run(self, asks: list[Ask]) -> list[Answer]:
        from vllm import SamplingParams

        started: dict[str, float] = {}
        first: dict[str, float] = {}
        outputs: dict[str, Any] = {}
        for ask in asks:
            parameters = SamplingParams(
                temperature=0, max_tokens=ask.new_tokens, logprobs=1, detokenize=False,
                extra_args={"kv_transfer_params": ask.transfer} if ask.transfer else None,
            )  # fmt: skip
            prompt, adapter = prompt_of(ask), adapter_of(ask)
            started[ask.name] = time.perf_counter()
            self._engine.add_request(ask.name, prompt, parameters, lora_request=adapter)
        steps = 0
        seen: dict[str, int] = {}
        waited: dict[str, int] = {}
        while self._engine.has_unfinished_requests():
            steps += 1
            for ask in asks:
                if ask.abort_after_steps == steps:
                    self._engine.abort_request([ask.name])
            for output in self._engine.step():
                outputs[output.request_id] = output
                waited.setdefault(output.request_id, steps)
                first.setdefault(output.request_id, time.perf_counter())
            for request in self.scheduler.running:
                waited.setdefault(_asked_as(request.request_id, asks), steps)
            for request in list(self.scheduler.requests.values()):
                self._requests[request.request_id] = request
                if request.num_preemptions > seen.get(request.request_id, 0):
                    seen[request.request_id] = request.num_preemptions
                    self._preemptions += 1
        self._learn_names()
        return [
            _answer(
                ask,
                outputs.get(ask.name),
                first.get(ask.name, 0) - started[ask.name],
                waited.get(ask.name, 0),
            )
            for ask in asks
        ]

    def _reset_refused(self, beside: Ask) -> bool:
        """Reset while a request runs; return whether vLLM has kept its device cache."""
        self._begin(beside)
        while self._engine.has_unfinished_requests() and not self.scheduler.running:
            self._engine.step()
        refused = not self._engine.reset_prefix_cache(reset_connector=True)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return refused

    def _replace_adapter(self, by: Ask) -> bool:
        """Load an adapter in place; return whether vLLM could."""
        try:
            return bool(self._engine.add_lora(adapter_of(by, load_inplace=True)))
        except RuntimeError as error:
            print(f"not loaded: {error}", file=sys.stderr)
            return False

    def _write_in_pause(self, path: str, beside: Ask) -> None:
        """Write weights as RL frameworks do that keep what runs: its request goes on after."""
        core = self._engine.engine_core.engine_core
        self._begin(beside)
        while not any(request.num_output_tokens for request in self.scheduler.running):
            self._engine.step()
        core.pause_scheduler("keep", clear_cache=False)
        self._load_weights(path)
        core.resume_scheduler()
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _begin(self, ask: Ask) -> None:
        """Begin a request whose answer is not the subject."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=ask.new_tokens, detokenize=False)
        self._engine.add_request(ask.name, {"prompt_token_ids": ask.tokens}, parameters)

    def _load_weights(self, path: str) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def _settle(self) -> bool:
        """Step until nobody holds blocks: vLLM's own loop would do the same."""
        give_up_s = time.monotonic() + SETTLE_DEADLINE_S
        while time.monotonic() < give_up_s:
            if not self.scheduler.has_requests() and self._is_idle():
                return True
            self._engine.engine_core.get_output()
            time.sleep(0.001)
        return False

    def _half(self) -> Any:
        return getattr(self.connector, "_scheduler_half", None)

    def _is_idle(self) -> bool:
        side = getattr(self.connector, "_scheduler", None)
        half = self._half()
        return side is None or half is None or (side.idle and half.idle())

    def _counts(self) -> dict[str, int]:
        if self._half() is None:
            return {}
        counts: dict[str, int] = dict(self.connector.counts())
        for name, count in worker_of_this_process().counts().items():
            counts[f"worker.{name}"] = count
        return counts | {name: round(value) for name, value in self._timed.items()}

    def _drafts(self) -> tuple[int, int]:
        """How many draft tokens vLLM has made, and how many of them were right."""
        found = {one.name: getattr(one, "value", 0) for one in self._llm.get_metrics()}
        name = "vllm:spec_decode_num_{}_tokens"
        return int(found.get(name.format("draft"), 0)), int(found.get(name.format("accepted"), 0))

    def _time_calls(self) -> None:
        """From now on, add up how long vLLM's scheduler is in our calls: `calls.ns`, of `steps`.

        A step that computes nothing waits in `build_connector_meta` for news, and is not counted.
        """
        for name in SCHEDULER_CALLS:
            setattr(self.connector, name, self._timing(getattr(self.connector, name)))

    def _timing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started_ns = time.perf_counter_ns()
            answer = call(*arguments)
            is_step = call.__name__ == "build_connector_meta"
            if not is_step or arguments[0].num_scheduled_tokens:
                self._timed["calls.ns"] += time.perf_counter_ns() - started_ns
                self._timed["steps"] += is_step
            return answer

        return timed

    def _epochs(self) -> list[int]:
        half = self._half()
        if half is None:
            return []
        lent = lent_half()
        return [half.epoch, 0 if lent is None else lent.epoch]

    def _dump(self, group: int | None) -> list[str]:
        """Our names of the blocks in vLLM's prefix cache, each once; of one KV group, if given."""
        cache = self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        ending = b"" if group is None else group.to_bytes(GROUP_BYTES, "big")
        keys = (key for key in map(bytes, cache._cache) if key.endswith(ending))
        return sorted({self._names[key] for key in keys})


def worker_of_this_process() -> Any:
    """The connector in the role of the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def lent_half() -> Any:
    """The worker half of this process; None if its memory is not lent."""
    return worker_of_this_process()._worker._half


def cpus_of_threads() -> dict[str, int]:
    """How many processors the threads of this process may use, but for the main one."""
    return {
        thread.name: len(os.sched_getaffinity(thread.native_id))
        for thread in threading.enumerate()
        if thread.native_id is not None and thread is not threading.main_thread()
    }


def hold_loads(path: Path) -> None:
    """From now on, a step that loads waits as long as the file is there, like a busy machine.

    `<path>.reached` says that one does."""
    side = worker_of_this_process()._worker
    start = side._start

    def start_later(load: Any) -> None:
        give_up_s = time.monotonic() + SETTLE_DEADLINE_S
        if path.exists():
            path.with_suffix(".reached").touch()
        while path.exists() and time.monotonic() < give_up_s:
            time.sleep(0.001)
        start(load)

    side._start = start_later


def receive(worker: Any, path: str) -> None:
    """Write weights in a function of a program's own."""
    worker.reload_weights(weights_path=path)


def prompt_of(ask: Ask) -> Any:
    """Return vLLM's prompt of an ask: its tokens, its salt and its sounds."""
    prompt: dict[str, Any] = {"prompt_token_ids": ask.tokens}
    if ask.salt is not None:
        prompt["cache_salt"] = ask.salt
    if ask.sounds:
        prompt["multi_modal_data"] = {"audio": [noise(*sound) for sound in ask.sounds]}
    return prompt


def noise(seed: int, seconds: float) -> Any:
    """Return a random sound, and its samples per second."""
    import numpy

    samples = numpy.random.default_rng(seed).standard_normal(int(seconds * SAMPLES_PER_SECOND))
    return samples.astype("float32"), SAMPLES_PER_SECOND


def adapter_of(ask: Ask, **more: Any) -> Any:
    """Return vLLM's LoRARequest of an ask; None: it has no adapter."""
    from vllm.lora.request import LoRARequest

    if ask.lora is None:
        return None
    name, number, path = ask.lora
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path, **more)


def _finite(logprob: float) -> float:
    """Return a logprob, or a number that no answer has: JSON has no NaN."""
    return logprob if math.isfinite(logprob) else -1e30


def _asked_as(request_id: str, asks: list[Ask]) -> str:
    """Return the name of a request; newer versions of vLLM add a random end to it."""
    names = {request_id, request_id.rpartition("-")[0]}
    return next((ask.name for ask in asks if ask.name in names), request_id)


def _answer(ask: Ask, output: Any, seconds: float, waited: int) -> Answer:
    if output is None:
        return Answer(name=ask.name, tokens=[], logprobs=[], cached=0, seconds=0, finish="abort")
    text = output.outputs[0]
    picked = [
        _finite(steps[token].logprob)
        for token, steps in zip(text.token_ids, text.logprobs, strict=True)
    ]
    return Answer(
        name=ask.name,
        tokens=list(text.token_ids),
        logprobs=picked,
        cached=int(output.num_cached_tokens or 0),
        seconds=seconds,
        finish=str(text.finish_reason or "abort"),
        waited=waited,
    )


def main() -> None:
    """Serve until told to stop. vLLM writes to stdout too: our lines go to a copy of it."""
    faulthandler.register(signal.SIGUSR1)  # Where is it, when it does not answer?
    ours = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    engine = Engine(sys.argv[1], json.loads(sys.argv[2]))
    ours.write(b"ready\n")
    for line in sys.stdin.buffer:
        command = msgspec.json.decode(line, type=Command)
        if command.what == "stop":
            break
        ours.write(msgspec.json.encode(engine.answer(command)) + b"\n")
    engine.scheduler.shutdown()
    engine._engine.engine_core.shutdown()
    ours.write(b"stopped\n")
    os._exit(0)  # torch's and vLLM's own exit takes seconds and is not our subject.


if __name__ == "__main__":
    main()
