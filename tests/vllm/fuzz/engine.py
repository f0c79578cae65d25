"""A vLLM engine for the fuzzer: in a process of its own, driven over stdin and stdout.

`python -m tests.vllm.fuzz.engine MODEL '{…LLM arguments…}'`; `ready` comes first.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from tests.vllm.fuzz import plants
from tests.vllm.fuzz.talk import Answer, Ask, Command, Reply, Spoken

SETTLE_DEADLINE_S = 20.0
"""Leases and offers end after 5 s by default, lookups after 2 s."""
WORDS = "(t3|t4|t5|t6|t7|t8|t9)"
GRAMMARS: dict[str, dict[str, Any]] = {
    "choice": {"choice": ["t3t4t5", "t6t7", "t8t8t8t8t8", "t9t3"]},
    "regex": {"regex": f"{WORDS}{{2,9}}"},
}
"""No word is the beginning of another one, so that every state has a token that leads on."""


class Engine:
    """vLLM, with our connector or without one."""

    def __init__(self, model: str, arguments: dict[str, Any], say: Callable[[Reply], None]) -> None:
        from vllm import LLM

        from tests.vllm.fuzz.observer import Observer

        options = {"enforce_eager": True, "enable_prefix_caching": True}
        self._llm = LLM(model=model, **(options | arguments))
        self._engine = self._llm.llm_engine
        self._say = say
        self.core = self._engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self._observer = Observer(self.scheduler)
        self._resets = 0

    def serve(self) -> None:
        """Carry out commands until `stop`."""
        while (command := _next()) is not None:
            self._say(self._carry_out(command))

    def _carry_out(self, command: Command) -> Reply:
        try:
            answers, ok, text = self._do(command)
        except Exception as error:  # The fuzzer judges; the engine may be of no use any more.
            print(f"{command.what}: {error!r}\n{where(error)}", file=sys.stderr)
            answers, ok, text = [], False, f"{type(error).__name__}: {error}"
        half = self._half()
        return Reply(
            answers=answers, ok=ok, text=text, counts=self._counts(), epochs=self._epochs(),
            attached=half is not None and half.attached,
        )  # fmt: skip

    def _do(self, command: Command) -> tuple[list[Answer], bool, str]:
        match command.what:
            case "run":
                return self._run(command), True, ""
            case "reset":
                return [], self._engine.reset_prefix_cache(), ""
            case "reset connector":
                return [], self._engine.reset_prefix_cache(reset_connector=True), ""
            case "reset running":
                return self._reset_running()
            case "weights":
                self._llm.collective_rpc("reload_weights", kwargs={"weights_path": command.path})
            case "adapter":
                return [], self._load_adapter(command), ""
            case "scrub":
                self._llm.collective_rpc(scrub)
            case "plant":
                plants.arrange(command.name)
            case "settle":
                return self._settle()
        return [], True, ""

    def _load_adapter(self, command: Command) -> bool:
        """What the server does on load_lora_adapter with `load_inplace`."""
        from vllm.lora.request import LoRARequest

        return bool(self._engine.add_lora(LoRARequest(
            command.name, command.number, command.path, load_inplace=True
        )))  # fmt: skip

    # --- a wave -----------------------------------------------------------------------------

    def _run(self, command: Command) -> list[Answer]:
        waiting = sorted(command.asks, key=lambda ask: ask.at)
        pauses = sorted(command.pauses)
        outputs: dict[str, tuple[Any, dict[int, Any]]] = {}
        aborts: dict[str, int] = {}
        give_up_s = time.monotonic() + command.deadline_s
        step = 0
        while waiting or pauses or self._engine.has_unfinished_requests():
            if not self._engine.has_unfinished_requests() and (waiting or pauses):
                step = max(step, min([a.at for a in waiting[:1]] + pauses[:1]))
            while waiting and waiting[0].at <= step:
                ask = waiting.pop(0)
                self._begin(ask)
                if ask.abort:
                    aborts[ask.name] = step + ask.abort
            while pauses and pauses[0] <= step:
                give_up_s += self._pause(pauses.pop(0))
            for name in [name for name, at in aborts.items() if at <= step]:
                del aborts[name]
                self._observer.aborted(name)
                self._engine.abort_request([name])
            for output in self._engine.step():
                texts = {text.index: text for text in output.outputs}
                outputs.setdefault(output.request_id, (output, {}))[1].update(texts)
            step += 1
            if time.monotonic() > give_up_s:
                break
        stuck = self._give_up(command.asks)
        return [_answer(ask, outputs.get(ask.name), stuck) for ask in command.asks]

    def _give_up(self, asks: list[Ask]) -> set[str]:
        if not self._engine.has_unfinished_requests():
            return set()
        faulthandler.dump_traceback()
        open_ = {str(request.request_id) for request in self.scheduler.requests.values()}
        stuck = {ask.name for ask in asks if any(ask.name in name for name in open_)}
        for name in stuck:
            self._engine.abort_request([name])
        return stuck

    def _pause(self, at: int) -> float:
        """Let the fuzzer act; how long it took."""
        started_s = time.monotonic()
        self._say(Reply(at=max(1, at)))
        while (command := _next()) is not None and command.what != "go":
            self._say(self._carry_out(command))
        return time.monotonic() - started_s

    def _begin(self, ask: Ask) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import StructuredOutputsParams

        grammar = GRAMMARS.get(ask.grammar)
        parameters = SamplingParams(
            n=ask.n,
            temperature=1.0 if ask.n > 1 else 0.0,
            top_k=1 if ask.n > 1 else 0,
            max_tokens=ask.new,
            logprobs=1,
            prompt_logprobs=1 if ask.prompt_logprobs else None,
            detokenize=False,
            structured_outputs=StructuredOutputsParams(**grammar) if grammar else None,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": ask.tokens}
        if ask.salt:
            prompt["cache_salt"] = ask.salt
        adapter = None
        if ask.adapter:
            adapter = LoRARequest(ask.adapter, ask.adapter_id, ask.adapter_path)
        self._engine.add_request(
            ask.name, prompt, parameters, lora_request=adapter, priority=ask.priority
        )

    # --- the connector ----------------------------------------------------------------------

    def _half(self) -> Any:
        return getattr(self.scheduler.connector, "_scheduler_half", None)

    def _reset_running(self) -> tuple[list[Any], bool, str]:
        """vLLM raises where blocks are held for a load or an offer: that is a refusal."""
        try:
            return [], self._engine.reset_prefix_cache(reset_running_requests=True), ""
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise
            return [], False, str(error)

    def _settle(self) -> tuple[list[Answer], bool, str]:
        """Step until nothing is held: vLLM's own loop would do the same."""
        give_up_s = time.monotonic() + SETTLE_DEADLINE_S
        left = "?"
        while time.monotonic() < give_up_s:
            left = self._left()
            if not left:
                return [], True, ""
            self._engine.engine_core.get_output()
            time.sleep(0.001)
        return [], False, left

    def _left(self) -> str:
        """What is still held; empty when nothing is."""
        if self.scheduler.has_requests():
            return f"requests {sorted(self.scheduler.requests)}"
        side, half = getattr(self.scheduler.connector, "_scheduler", None), self._half()
        if side is not None and half is not None:
            if not side.idle:
                return f"followed requests {sorted(side._requests)}"
            if not half.idle():
                return "the scheduler half is not idle"
        pool = self.scheduler.kv_cache_manager.block_pool
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return f"{held} device blocks" if held else ""

    def _counts(self) -> dict[str, int]:
        counts = {f"vllm {name}": number for name, number in self._observer.counts.items()}
        if self._half() is not None:
            counts |= self.scheduler.connector.counts()
            half = lent_half()
            if half is not None:
                counts |= {f"worker.{name}": n for name, n in half.counts.items()}
        return counts

    def _epochs(self) -> list[int]:
        half = self._half()
        if half is None:
            return []
        lent = lent_half()
        return [half.epoch] if lent is None else [half.epoch, lent.epoch]


def lent_half() -> Any:
    """The worker half of this process; None if the workers are processes of their own."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return None
    worker = get_kv_transfer_group()._worker
    return worker._half if worker is not None else None


def where(error: BaseException) -> str:
    """The stack of an error that is told to the fuzzer: in the log it would count as another."""
    return "".join(traceback.format_tb(error.__traceback__))


def scrub(worker: Any) -> None:
    """Zero the KV cache: what an earlier program left there is not this one's subject."""
    for tensor in worker.model_runner.kv_caches:
        tensor.zero_()


def _answer(ask: Ask, came: tuple[Any, dict[int, Any]] | None, stuck: set[str]) -> Answer:
    if came is None:
        finish = "stuck" if ask.name in stuck else "abort"
        return Answer(name=ask.name, spoken=[Spoken(tokens=[], logprobs=[], finish=finish)])
    output, texts = came
    spoken = [
        Spoken(
            tokens=list(text.token_ids),
            logprobs=[_finite(steps[token].logprob) for token, steps in zip(
                text.token_ids, text.logprobs or [], strict=True)],
            finish="stuck" if ask.name in stuck else str(text.finish_reason or "abort"),
        )
        for _, text in sorted(texts.items())
    ]  # fmt: skip
    # The first prompt token has no logprob.
    pairs = zip(ask.tokens[1:], (output.prompt_logprobs or [None])[1:], strict=False)
    return Answer(
        name=ask.name,
        spoken=spoken,
        cached=int(output.num_cached_tokens or 0),
        prompt_logprobs=[_finite(steps[token].logprob) for token, steps in pairs],
    )


def _finite(logprob: float) -> float | None:
    """JSON has no NaN."""
    return logprob if logprob == logprob and abs(logprob) != float("inf") else None


def _next() -> Command | None:
    line = sys.stdin.buffer.readline()
    if not line:
        return None
    command = msgspec.json.decode(line, type=Command)
    return None if command.what == "stop" else command


def interpret_triton() -> None:
    """Have vLLM's CPU build find Triton usable: `TRITON_INTERPRET` needs no back end."""
    found = importlib.import_module("triton.backends").backends
    driver = SimpleNamespace(is_active=lambda: False)
    found["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def main() -> None:
    """Serve until told to stop. vLLM writes to stdout too: our lines go to a copy of it."""
    faulthandler.register(signal.SIGUSR1)
    ours = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    if "TRITON_INTERPRET" in os.environ:
        interpret_triton()
    plants.arrange()

    def say(reply: Reply) -> None:
        ours.write(msgspec.json.encode(reply) + b"\n")

    engine = Engine(sys.argv[1], json.loads(sys.argv[2]), say)
    ours.write(b"ready\n")
    engine.serve()
    engine.scheduler.shutdown()
    engine.core.shutdown()
    os._exit(0)  # torch's and vLLM's own exit takes seconds and is not our subject.


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # A worker that vLLM has spawned: of several ranks.
    plants.arrange()
