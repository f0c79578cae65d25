"""A private stack in a thread, and engines as processes: what the vLLM tests work with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import runpy
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from kvbm_cli.demo.check import StackView
from kvbm_cli.stack import SERVICES, Stack
from kvbm_common.config.settings import Settings
from kvbm_common.errors import DeadlineExceeded
from kvbm_common.nats.bus import Bus
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.admin import RemoveReply, RemoveRequest
from kvbm_common.wire.verbs import verb_subject

from tests import line_process, waiting
from tests.line_process import LineProcess
from tests.vllm import template
from tests.vllm.conversation import Answer, Ask, Command, Reply

START_DEADLINE_S = 120.0
REPLY_DEADLINE_S = 120.0
"""The first forward pass of an engine takes seconds, on a starved machine a minute."""
STACK_DEADLINE_S = 95.0
PATIENCE_MS = 10_000
"""For lookups and offers, unless time is the subject: on a machine with ten busy processes a
service was not heard for 2.5 s."""
BLOCK_TOKENS = 32
VOCABULARY = 1024

ROUNDING = 1e-4
CORRUPT_CHUNK = 1 << 20
NONSENSE = np.random.default_rng(7).bytes(CORRUPT_CHUNK)
"""Random bits: among so many are NaN and infinities, which masked attention spreads."""
T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
VLLM_PYTHON = ROOT / os.environ.get("KVBM_TEST_VLLM", ".venv-vllm") / "bin" / "python"
"""Of the environment that `make_env.py` makes; the services run in ours."""


class LiveStack:
    """A private stack whose event loop runs in a thread of its own."""

    def __init__(
        self, overrides: Mapping[str, object], services: Sequence[str] | None = None
    ) -> None:
        """`services` are all of them unless named."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stack", daemon=True)
        self._thread.start()
        self.stack = Stack.private(overrides, services=services or SERVICES)
        self._bus: Bus | None = None

    def open(self) -> None:
        """Start all services."""
        self.call(self.stack.open())
        self._bus = self.call(Bus.connect(self.stack.admin, "test", counters=Metrics()))

    @property
    def view(self) -> StackView:
        assert self._bus is not None
        return StackView(self._bus, self.stack.settings)

    @property
    def settings(self) -> Settings:
        return self.stack.settings

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the stack's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(STACK_DEADLINE_S)

    def ask(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Ask a service until it answers: on a starved machine one question may be too early."""
        give_up_s = time.monotonic() + STACK_DEADLINE_S
        while True:
            try:
                return self.call(question())
            except DeadlineExceeded:
                if time.monotonic() > give_up_s:
                    raise

    def kill(self, kind: str) -> None:
        """As a crash."""
        self.call(self.stack.kill(kind))

    def start(self, kind: str) -> None:
        """Start it again and wait until it serves."""
        self.call(self.stack.start(kind))
        self.call(self.stack.wait_ready(kind))
        assert self._bus is not None
        self.call(self._bus.wait_connected())  # After NATS came back, others may be sooner.

    def figures(self, kind: str) -> dict[str, float]:
        """What a service counts."""
        return dict(self.ask(lambda: self.view.stats(kind)).figures)

    def forget(self, kind: str) -> None:
        """Remove every block of a tier, by its admin verb."""
        request = RemoveRequest(everything=True, actor="test")
        subject = verb_subject(
            kind, "reset", host=self.settings.host, instance=self.settings.instance
        )
        more = True
        while more:
            assert self._bus is not None
            answer = self.call(
                self._bus.request(subject, msgspec.json.encode(request), deadline_s=5.0)
            )
            more = msgspec.json.decode(answer, type=RemoveReply).more

    def epoch(self, kind: str) -> int:
        """The number of a service's present life."""
        return self.ask(lambda: self.view.stats(kind)).epoch

    def workers(self) -> set[int]:
        """The ranks that are attached to the host tier, of whatever engine."""
        stats = self.ask(lambda: self.view.stats("host-tier"))
        return {worker.rank for worker in stats.workers}

    def held(self, kind: str) -> set[str]:
        """The blocks of a tier, by its own account, in hex."""
        snapshot = self.ask(lambda: self.view.snapshot(kind))
        return {name for part in snapshot.parts for run in part.runs for name in run.hashes}

    def indexed(self) -> dict[str, set[str]]:
        """What the index holds, by source."""
        found: dict[str, set[str]] = {}
        for holder in self.ask(self.view.dump):
            found.setdefault(holder.source, set()).update(holder.hashes)
        return {source: names for source, names in found.items() if names}

    def close(self) -> None:
        """End everything."""
        if self._bus is not None:
            self.call(self._bus.close())
        self.call(self.stack.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


@contextlib.contextmanager
def live_stack(
    overrides: Mapping[str, object], services: Sequence[str] | None = None
) -> Iterator[LiveStack]:
    """A stack for the length of a block."""
    stack = LiveStack(overrides, services)
    try:
        stack.open()
        yield stack
    finally:
        stack.close()


class EngineProcess(LineProcess[Command, Reply]):
    """A vLLM engine; see engine_process."""

    def __init__(
        self,
        model: str,
        settings: Settings | None,
        *,
        log: Path,
        blocks: int = 64,
        extra: Mapping[str, object] | None = None,
        events: bool = True,
        arguments: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        python: Path = VLLM_PYTHON,
        module: str = "tests.vllm.engine_process",
        shipped: bool = False,
        fresh: bool = False,
    ) -> None:
        """Without `settings` it is vLLM without our connector. `arguments` are vLLM's own.

        `shipped`: the connector has the defaults of a user who has set nothing. `fresh`: it imports
        vLLM itself, as it does with an environment of its own.
        """
        forks = None if fresh or environ else template.Suite.templates
        options: dict[str, object] = {
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": blocks,
            "max_model_len": 1920,
            "max_num_batched_tokens": 256,
        }
        patience = {"onboard_deadline_ms": PATIENCE_MS, "offer_deadline_ms": PATIENCE_MS}
        if settings is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "KvbmConnector",
                "kv_connector_module_path": "kvbm_connectors.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "runtime_dir": str(settings.runtime_dir),
                    **({} if shipped else patience),
                    **(extra or {}),
                },
            }
        if settings is not None and events:
            directory = f"ipc://{settings.runtime_dir}/{log.stem}"
            options["kv_events_config"] = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"{directory}-events",
                "replay_endpoint": f"{directory}-replay",
            }
        options |= dict(arguments or {})
        super().__init__(
            [python, "-m", module, model, json.dumps(options)],
            reply=Reply,
            log=log,
            environ=ENVIRON | dict(environ or {}),
            reply_deadline_s=REPLY_DEADLINE_S,
            start=forks.start if forks else line_process.fresh,
        )

    def wait_started(self) -> EngineProcess:
        """Wait until it serves; engines that start together share the time."""
        assert self.line(START_DEADLINE_S) == b"ready\n", self.tail()
        return self

    def run(self, *asks: Ask, settle: bool = True) -> list[Answer]:
        """Let requests run together; `settle` leaves a quiet point behind."""
        reply = self.say(Command(what="run", asks=list(asks), settle=settle))
        assert reply.ok, f"not quiet{self.tail()}"
        return reply.answers

    def reset(self) -> None:
        """Empty the device's prefix cache."""
        reply = self.say(Command(what="reset"))
        assert reply.ok, f"reset refused{self.tail()}"

    def blocks(self, group: int | None = None) -> set[str]:
        """Our names of what is in the device's prefix cache; of one KV group, if given."""
        return set(self.say(Command(what="dump", group=group)).blocks)

    def state(self) -> Reply:
        """Counts and the like."""
        return self.say(Command(what="state", settle=False))

    def count(self, name: str) -> int:
        """One of the connector's counters."""
        return self.state().counts.get(name, 0)

    def wait_attached(self, stack: LiveStack) -> None:
        """Wait until both halves know the present life of the host tier, and the consolidator
        follows the engine's events."""
        epoch = stack.epoch("host-tier")

        def attached() -> bool:
            state = self.state()
            return state.streams_attached and set(state.epochs) == {epoch}

        wait_for(
            attached,
            f"not attached to {epoch}",
            details=lambda: f"{self.state()} {re.findall('KVBM passes.*', self.log_text())}",
        )

    def ask_to_stop(self) -> None:
        """By a command: what it has running ends first."""
        self.begin(Command(what="stop"))


ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    # In one process vLLM does not bind them; two that spin took ten times as long.
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "PYTHONHASHSEED": "0",
    "UCX_MODULES": "^ib",  # As the Makefile does for the services.
}


ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_PLACES": "{0}", "OMP_PROC_BIND": "true"}
"""What vLLM's own server tells OpenMP in its workers for `VLLM_CPU_OMP_THREADS_BIND=0`; in one
process it does not."""


def prompt(seed: int, length: int) -> list[int]:
    """A random prompt."""
    generator = random.Random(seed)
    return [generator.randrange(3, VOCABULARY) for _ in range(length)]


def wait_for(
    condition: Callable[[], object],
    what: str,
    *,
    deadline_s: float = 15.0,
    details: Callable[[], str] = str,
) -> None:
    """Look at a condition that nobody announces until it holds."""
    waiting.wait_for(condition, lambda: f"{what} {details()}", deadline_s=deadline_s, poll_s=0.05)


def vllm_minor() -> int:
    """The 32 of the engines' vLLM 0.32.0, as its files say: beside them may be the metadata of
    another version, whose kernels it uses."""
    (found,) = VLLM_PYTHON.parent.parent.glob("lib/python3.*/site-packages/vllm/_version.py")
    version = runpy.run_path(str(found))["__version__"]
    return int(str(version).split(".")[1])


def corrupt_arena(settings: Settings) -> None:
    """Write nonsense over all of the host tier's memory, behind its back."""
    (path,) = settings.shm_dir.glob(f"kvbm-{settings.host}-*-arena")
    with path.open("r+b") as arena:
        size = path.stat().st_size
        for offset in range(0, size, CORRUPT_CHUNK):
            arena.seek(offset)
            arena.write(NONSENSE[: min(CORRUPT_CHUNK, size - offset)])


def same(found: Sequence[Answer], expected: Sequence[Answer]) -> bool:
    """Are tokens and logprobs equal, bit for bit? A cold run and a hit are not, on every CPU."""
    return [(a.tokens, a.logprobs) for a in found] == [(a.tokens, a.logprobs) for a in expected]


def alike(found: Sequence[Answer], expected: Sequence[Answer]) -> bool:
    """Are tokens equal, and logprobs up to rounding? Wrong KV moves them by whole digits."""
    return all(
        a.tokens == b.tokens
        and len(a.logprobs) == len(b.logprobs)
        and all(abs(x - y) < ROUNDING for x, y in zip(a.logprobs, b.logprobs, strict=True))
        for a, b in zip(found, expected, strict=True)
    )
