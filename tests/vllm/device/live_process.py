"""Programs on the product's tiers, in a process that is told which: `python -m …live_process`.

`MODEL RUNTIME_DIR`, then lines of JSON on stdin: `LiveCommand`. In the middle of a program it asks
for acts on the stack, which its caller carries out. Runs in vLLM's environment.
"""

from __future__ import annotations

import faulthandler
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec
from kvbm_common.identity import SequenceHash

from tests.vllm.device.engine import MODEL_TOKENS, VOCABULARY
from tests.vllm.device.kinds import ANSWER_MAX, KINDS, Kind
from tests.vllm.device.live import LiveEngine
from tests.vllm.device.live_talk import DISK_ALONE, LiveCommand, LiveReply
from tests.vllm.device.memory import Cell, WrongBytes
from tests.vllm.device.process import prompt_of, vllm_config_of
from tests.vllm.fuzz import plants

PATIENCE_MS = 4_000
TEXTS_MAX = 24
AGAIN = 4
"""Texts that are asked again after an act."""
TEXT_LEAST = 20
"""Tokens of these."""
ASK_MAX = 4
ACT_DEADLINE_S = 60.0
MOVERS = ("auto", "nixl")
"""How blocks are read out of the arena, seed by seed."""


class Caller:
    """Who has started this process: reads commands and carries out acts."""

    def __init__(self, commands: BinaryIO, replies: BinaryIO) -> None:
        self._commands, self._replies = commands, replies

    def command(self) -> LiveCommand | None:
        """The next one; None: it is over."""
        line = self._commands.readline()
        return msgspec.json.decode(line, type=LiveCommand) if line else None

    def say(self, reply: LiveReply) -> None:
        self._replies.write(msgspec.json.encode(reply) + b"\n")

    def act(self, what: str) -> int:
        """Have something done to the stack, and wait; returns the life of the host tier."""
        self.say(LiveReply(act=what))
        return self.done()

    @property
    def is_done(self) -> bool:
        """Whether the act that was asked for is over."""
        return bool(select.select([self._commands], [], [], 0)[0])

    def done(self) -> int:
        """Wait for it."""
        assert select.select([self._commands], [], [], ACT_DEADLINE_S)[0], "an act does not end"
        command = self.command()
        assert command is not None, "the caller is gone"
        return command.epoch


@dataclass
class Past:
    """What programs of one kind leave to the next one: the tiers have it still."""

    right: dict[SequenceHash, Cell] = field(default_factory=dict)
    texts: list[list[int]] = field(default_factory=list)


class Program:
    """One program: conversations on one life of an engine, and what is done to the stack."""

    def __init__(
        self,
        make_engine: Callable[[], LiveEngine],
        caller: Caller,
        texts: list[list[int]],
        seed: str,
        *,
        aborts: bool,
    ) -> None:
        """`texts` are what users have said before; here is added what they say now."""
        self._caller, self._texts, self._make_engine = caller, texts, make_engine
        self._rng, self._aborts = random.Random(seed), aborts
        self._engine = make_engine()
        self._former: list[LiveEngine] = []
        sizes = (8, 16, 33, 50)
        self._systems = [
            [self._rng.randrange(VOCABULARY) for _ in range(self._rng.choice(sizes))]
            for _ in range(3)
        ]
        self._names: list[str] = []

    def play(self, disturbances: list[str]) -> None:
        """Draw what happens, and have every act done once."""
        self._engine.wait_attached(self._caller.act("look"))
        self._ask_again()  # What an earlier engine has stored.
        self._stroll(self._rng.randrange(30, 80))
        for act in self._rng.sample(disturbances, len(disturbances)):
            self._do(act)
            self._stroll(self._rng.randrange(5, 30))
        self._forget_device()
        self._ask_until("blocks from host")

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
        self._former.append(self._engine)

    def counts(self) -> dict[str, int]:
        """What all engines have counted, when the last one is closed."""
        each = [Counter(engine.counts) + Counter(engine.facts()) for engine in self._former]
        return dict(sum(each, Counter[str]()))

    def check_closed(self) -> None:
        """Raise WrongBytes if memory of an engine that has ended was written to."""
        for engine in self._former:
            engine.check_closed()

    def _restart_engine(self) -> None:
        """Its next life begins while requests, loads and offers are under way."""
        self.close()
        self._names.clear()
        self._engine = self._make_engine()
        self._engine.wait_attached(self._caller.act("look"))
        self._ask_again()

    def _do(self, act: str) -> None:
        self._engine.counts[act] += 1
        match act.split():
            case ["restart", "engine"]:
                self._restart_engine()
            case ["restart", _]:
                self._stroll_during(act)
            case ["pause", service]:
                self._caller.act(f"stop {service}")
                self._stroll(self._rng.randrange(20, 60))
                self._caller.act(f"continue {service}")
            case ["flip"]:
                self._forget_device()
                self._caller.act(act)
                self._ask_again()
            case _:
                assert act == DISK_ALONE, act
                self._forget_device()
                self._caller.act("write")
                self._caller.act("forget host-tier")
                self._ask_until("blocks from disk")

    def _stroll_during(self, act: str) -> None:
        """The engine goes on while the act is done."""
        self._caller.say(LiveReply(act=act))
        give_up_s = time.monotonic() + ACT_DEADLINE_S
        while not self._caller.is_done and time.monotonic() < give_up_s:
            self._stroll(1)
        self._engine.wait_attached(self._caller.done())

    def _forget_device(self) -> None:
        self._engine.settle()
        assert self._engine.reset(running=False), "the device cache is not reset"

    def _ask_again(self) -> None:
        texts = [text for text in self._texts if len(text) > TEXT_LEAST]
        for text in self._rng.sample(texts, min(AGAIN, len(texts))):
            self._submit(text[: MODEL_TOKENS - 40])

    def _ask_until(self, count: str) -> None:
        """Ask again until something was loaded from where this counts."""
        before = self._engine.counts[count]
        for _ in range(ASK_MAX):
            self._ask_again()
            self._engine.settle()
            if self._engine.counts[count] > before:
                break
            self._forget_device()

    def _submit(self, text: list[int]) -> None:
        self._names.append(self._engine.submit(text, self._rng.randrange(1, ANSWER_MAX)))

    def _stroll(self, steps: int) -> None:
        rng, engine = self._rng, self._engine
        for _ in range(steps):
            if rng.random() < 0.4 and len(engine.names) < 6:
                prompt = prompt_of(rng, self._systems, self._texts)
                self._texts.append(prompt)
                self._submit(prompt)
            if self._names and rng.random() < 0.15:
                self._texts.append(engine.spoken(rng.choice(self._names))[: MODEL_TOKENS - 60])
            if engine.names and rng.random() < 0.02:
                engine.abort(rng.choice(engine.names))
            if rng.random() < 0.08:
                engine.reset(running=rng.random() < 0.3)
            if self._aborts and engine.names and rng.random() < 0.1:
                engine.reset(running=True)
                engine.abort(rng.choice(engine.names))
            del self._texts[:-TEXTS_MAX]
            engine.step()


class Server:
    """Carries out commands: programs of a kind."""

    def __init__(self, model: str, runtime_dir: str, caller: Caller) -> None:
        self._model, self._runtime_dir, self._caller = model, runtime_dir, caller
        self._past: dict[str, Past] = {}

    def answer(self, command: LiveCommand) -> LiveReply:
        """Run one program; an exception is part of the reply."""
        plants.arrange(command.plant)
        kind, revision = KINDS[command.kind], f"{command.kind} {command.plant}"
        past = self._past.setdefault(revision, Past())
        seed = f"{command.kind}/{command.seed}"
        overlaps = not kind.drafts and random.Random(seed).random() < 0.5
        mover = MOVERS[command.seed % len(MOVERS)]

        def make_engine() -> LiveEngine:
            config = self._config(kind, revision, overlaps=overlaps, onboard_mover=mover)
            return LiveEngine(kind, config, command.seed, past.right)

        aborts = kind.aborts_preempted
        program = Program(make_engine, self._caller, past.texts, seed, aborts=aborts)
        error = ""
        try:
            program.play(command.disturbances)
        except Exception:
            error = traceback.format_exc()
        program.close()
        try:
            program.check_closed()
        except WrongBytes:
            error = error or traceback.format_exc()
        return LiveReply(error=error, counts=program.counts())

    def _config(self, kind: Kind, revision: str, *, overlaps: bool, onboard_mover: str) -> Any:
        options = {
            "runtime_dir": self._runtime_dir, "revision": revision, "onboard_mover": onboard_mover,
            "onboard_deadline_ms": PATIENCE_MS, "offer_deadline_ms": PATIENCE_MS,
        }  # fmt: skip
        return vllm_config_of(
            self._model, kind, overlaps=overlaps, connector="KvbmConnector",
            module="kvbm_connectors.vllm", options=options,
        )  # fmt: skip


def main() -> None:
    """Serve until the caller closes stdin. vLLM writes to stdout too: our lines go to a copy."""
    faulthandler.register(signal.SIGUSR1)
    ours = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    commands = os.fdopen(0, "rb", buffering=0)
    caller = Caller(commands, ours)
    server = Server(sys.argv[1], sys.argv[2], caller)
    ours.write(b"ready\n")
    while (command := caller.command()) is not None:
        caller.say(server.answer(command))
    os._exit(0)  # torch's and vLLM's own exit takes seconds and is not our subject.


if __name__ == "__main__":
    main()
