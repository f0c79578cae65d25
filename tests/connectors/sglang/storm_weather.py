"""Weather: what fails while a storm's threads call, drawn from its seed."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback

from tests.connectors.sglang.storm_engines import Engine, Storm
from tests.vllm.harness import corrupt_arena
from tests.waiting import stop_child

EVENTS = 15
"""What happens in one program."""
LULL_S = 5.0
"""The longest time between two events."""
KINDS = {
    "stop host-tier": 4, "stop disk-tier": 2, "stop consolidator": 2, "kill host-tier": 2,
    "kill disk-tier": 1.5, "kill consolidator": 1, "clear": 2, "flush": 3, "reattach": 2, "rot": 1,
    "forget host-tier": 1,
}  # fmt: skip
"""What may happen, and how often."""


class Weather:
    """A thread that lets services fail, weights change and storages end."""

    def __init__(self, storm: Storm) -> None:
        self.storm, self.rng = storm, random.Random(f"weather {storm.seed}")

    def run(self) -> None:
        """Let one thing after the other happen; then the program is over."""
        storm = self.storm
        try:
            for _ in range(EVENTS):
                self.wait_turns(self.rng.randrange(5, 60))
                if storm.over.is_set():
                    return
                [kind] = self.rng.choices(list(KINDS), list(KINDS.values()))
                self.happen(kind)
                storm.counts[kind] += 1
        except Exception:
            storm.wrong(f"weather: {traceback.format_exc()}")
        storm.over.set()

    def wait_turns(self, count: int) -> None:
        """Let the callers take some turns, if they can."""
        until, until_s = self.storm.turns + count, time.monotonic() + LULL_S
        while self.storm.turns < until and time.monotonic() < until_s:
            if self.storm.over.wait(0.02):
                return

    def happen(self, kind: str) -> None:
        """Do one of KINDS."""
        storm, rng = self.storm, self.rng
        match kind.split():
            case ["stop", service]:
                stop_child(pid := storm.stack.stack.pids[service])
                try:
                    storm.over.wait(rng.choice((0.05, 0.3, 1.2, 2.5, 5.0)))
                finally:
                    os.kill(pid, signal.SIGCONT)
            case ["kill", service]:
                storm.stack.kill(service)
                storm.over.wait(rng.choice((0.0, 0.3, 1.0)))
                storm.stack.start(service)
            case ["forget", service]:
                storm.stack.forget(service)
            case ["rot"]:  # Between a pull and its sum nobody could see it.
                with storm.everybody.closed():
                    corrupt_arena(storm.stack.settings)
            case ["clear"]:
                self.clear()
            case ["flush"]:
                self.flush(rng.choice(storm.engines))
            case ["reattach"]:
                self.reattach(rng.choice(storm.engines))

    def clear(self) -> None:
        """Clear all: this process stands for that of each engine. All have other weights then."""
        with self.storm.everybody.closed():
            for engine in self.storm.engines:
                for rank in engine.ranks:
                    rank.storage.clear()
            self.storm.weights += 1

    def flush(self, engine: Engine) -> None:
        """Give an engine weights of its own, with nothing of it on its way."""
        with self.storm.everybody.passing(), engine.gate.closed():
            for rank in engine.ranks:
                for pool in rank.pools.values():
                    pool.flush()
                rank.storage.exists(["after a flush"])
            engine.own_weights = f" {engine.number}.{self.rng.random()}"

    def reattach(self, engine: Engine) -> None:
        """Detach a rank under its calls, and then all; they begin again with the first weights."""
        with self.storm.everybody.passing():
            self.rng.choice(engine.ranks).storage.close()
            with engine.gate.closed():
                for rank in engine.ranks:
                    rank.storage.close()
                for rank in engine.ranks:
                    rank.storage = self.storm.attach(engine, rank.number, rank.pools)
                engine.own_weights = ""
