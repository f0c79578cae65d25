"""A stack, and TensorRT-LLM engines on it, for tests that look at real bytes."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from kvbm_common.identity import Hasher

from tests.connectors.trtllm.engine import BLOCK_TOKENS, Executor, LlmRequest
from tests.connectors.trtllm.package import args_of, installed
from tests.recording import recorded
from tests.vllm.harness import LiveStack
from tests.waiting import wait_for

if TYPE_CHECKING:
    from kvbm_connectors.client.scheduler import SchedulerHalf
    from kvbm_connectors.trtllm.leader import LeaderSide
    from kvbm_connectors.trtllm.promises import PromiseKeeper

DEADLINE_S = 10.0


class Engine(Executor):
    """An engine whose ranks have met, and numbered requests."""

    def __init__(self, leader: Any, workers: list[Any], **options: Any) -> None:
        super().__init__(leader, workers, **options)
        self.half: SchedulerHalf
        self.side: LeaderSide
        self.keeper: PromiseKeeper
        self.hasher: Hasher
        """Parts of the leader, as `engine_on` has seen them made."""
        self.name = self.incarnation = ""
        self._next_id = 2048  # TensorRT-LLM's do not begin at 0 either.

    def request(self, tokens: range | list[int], output: int = 1, **fields: Any) -> LlmRequest:
        """Hand a request in. Its output follows from its number."""
        self._next_id += 1
        answer = [900 + index for index in range(output)]
        return self.submit(LlmRequest(self._next_id, list(tokens), answer, **fields))

    def run(self, *requests: LlmRequest) -> None:
        """Step until these requests are done."""
        self._step_until(lambda: all(request.done or request.cancelled for request in requests))

    def settle(self) -> None:
        """Step until the engine is idle: blocks come free in steps without a plan, too."""
        self._step_until(lambda: self.idle)
        self.side.check()

    def _step_until(self, condition: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up_s, self.leader.counts()
            self.step()

    def ask(self, tokens: range | list[int], output: int = 1, **fields: Any) -> LlmRequest:
        """A request, run to its end, with all that follows."""
        request = self.request(tokens, output, **fields)
        self.run(request)
        self.settle()
        return request

    def forget(self) -> None:
        """The device's own cache is emptied, as by other requests."""
        assert self.pool.reset()

    def count(self, name: str) -> int:
        """What the leader has counted."""
        return int(self.leader.counts().get(name, 0))

    def close(self) -> None:
        self.leader.shutdown()
        for worker in self.workers:
            worker.shutdown()


@contextmanager
def engine_on(
    stack: LiveStack,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ranks: int = 1,
    variables: dict[str, str] | None = None,
    wait: bool = True,
    **options: Any,
) -> Iterator[Engine]:
    """An engine of so many ranks that the host tier has welcomed."""
    settings = stack.settings
    monkeypatch.setenv("KVBM_RUNTIME_DIR", str(settings.runtime_dir))
    monkeypatch.setenv("KVBM_PROMISE_GB", "0.002")
    for name, value in (variables or {}).items():
        monkeypatch.setenv(name, value)
    cache = options.pop("cache", {"tokens_per_block": BLOCK_TOKENS})
    model = settings.runtime_dir / "model"  # Its next life has the same weights.
    model.mkdir(exist_ok=True)
    (model / "model.safetensors").write_bytes(b"weights")
    with installed() as broadcast:
        module = importlib.import_module("kvbm_connectors.trtllm")
        connector = importlib.import_module("kvbm_connectors.trtllm.connector")
        parts = ("SchedulerHalf", "LeaderSide", "PromiseKeeper", "of_tenant")
        made = [recorded(monkeypatch, connector, name) for name in parts]
        workers = []
        for rank in range(ranks):
            args = replace(args_of(rank, ranks, **cache), model=model, load_format="auto")
            broadcast.rank = rank
            if rank == 0:
                leader, leader_args = module.KvbmConnectorLeader(args), args
            workers.append(module.KvbmConnectorWorker(args))
        engine = Engine(leader, workers, **options)
        [engine.half], [engine.side], [engine.keeper], [namespace, *_] = made
        engine.hasher = Hasher(namespace)
        life = connector.LIVES.of(leader_args)
        engine.name, engine.incarnation = life.engine, life.incarnation
        try:
            if wait:
                wait_attached(engine)
            yield engine
        finally:
            engine.close()


def wait_attached(engine: Engine) -> None:
    """Until lookups and offers are answered."""
    half = engine.half
    wait_for(lambda: half.attached and half.streams_attached, "the engine is not attached")


def promises_left(stack: LiveStack, *engines: Engine) -> list[str]:
    """Files of promises of these engines: other tests have theirs in the same directory."""
    lives = {engine.incarnation for engine in engines}
    assert all(lives), lives
    return [name for name in os.listdir(stack.settings.shm_dir) if name.split("-")[-1] in lives]
