"""Engines of one shape and what they load: with our connector (lane.py), or vLLM alone."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

from tests.vllm.fuzz.processes import FuzzEngine
from tests.vllm.fuzz.program import Act
from tests.vllm.fuzz.shapes import Shape

ADAPTERS = {1: 0, 2: 1}
"""What each of them holds when a program begins."""


class Engines:
    """One engine, or two."""

    def __init__(self, shape: Shape, fixtures: Path, work: Path) -> None:
        self.shape = shape
        self.weights = "a"
        self.contents = dict(ADAPTERS)
        self._on_disk = "a"
        """The checkpoint in the directory with which an engine starts."""
        self.paths: dict[int, Path] = {}
        self.counts: Counter[str] = Counter()
        self.model = work / "model"
        self.engines: list[FuzzEngine] = []
        self._fixtures, self._work = fixtures, work
        self._logs = 0

    def _copy_fixtures(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        self.weights = self._on_disk = "a"
        self.contents = dict(ADAPTERS)
        shutil.copytree(self._fixtures / "a", self.model)
        for number, content in self.contents.items():
            self.paths[number] = self._work / f"adapter{number}"
            shutil.copytree(self._fixtures / f"lora{content}", self.paths[number])

    def _next_log(self) -> Path:
        self._logs += 1
        return self._work / f"engine{self._logs}.log"

    def prepare(self) -> None:
        """The state in which every program begins."""
        if self.weights != "a":
            self.load_weights("a")
        if self.contents != ADAPTERS:
            for number, content in ADAPTERS.items():
                self._load_adapter(number, content, same_path=True)
        for engine in self.engines:
            engine.do("scrub")
            engine.do("reset")

    def act(self, act: Act) -> str:
        """Carry out one that concerns engines alone; why it could not be, or nothing."""
        match act.what:
            case "reset" | "reset connector" | "reset running":
                replies = [engine.do(act.what) for engine in self.engines]
                return "" if all(reply.ok for reply in replies) else f"{act.what} refused"
            case "weights" | "fine-tune":
                return self.load_weights(self._other_weights)
            case "adapter":
                content = 2 if self.contents[act.number] < 2 else act.number - 1
                return self._load_adapter(act.number, content, same_path=act.target == "same path")
            case "restart":
                for engine in self.engines:
                    engine.do("reset")
        return ""

    @property
    def _other_weights(self) -> str:
        return "b" if self.weights == "a" else "a"

    def load_weights(self, name: str) -> str:
        """In the running engines, and everything that was computed with the old ones is gone."""
        problem = ""
        for engine in self.engines:
            reply = engine.do("weights", path=str(self._fixtures / name))
            assert reply.ok, reply.text
            if not engine.do("reset connector").ok:
                problem = "reset with the connector refused after an update of the weights"
        self.weights = name
        return problem

    def _load_adapter(self, number: int, content: int, *, same_path: bool) -> str:
        if not same_path:
            self.paths[number] = self._work / f"adapter{number}-{self.counts['adapters']}"
            self.counts["adapters"] += 1
        source = self._fixtures / f"lora{content}"
        shutil.copytree(source, self.paths[number], dirs_exist_ok=True,
                        copy_function=shutil.copyfile)  # fmt: skip
        self.contents[number] = content
        for engine in self.engines:
            path = str(self.paths[number])
            reply = engine.do("adapter", name=f"adapter{number}", number=number, path=path)
            assert reply.ok, reply.text
            if not engine.do("reset").ok:  # vLLM's own names say no more than the adapter's.
                return "reset refused"
        return ""


class Plain(Engines):
    """vLLM alone, with the arguments of a shape: does it answer so, too?"""

    def __init__(self, shape: Shape, fixtures: Path, work: Path) -> None:
        super().__init__(shape, fixtures, work)
        self._copy_fixtures()
        self.engines = [
            FuzzEngine(self.model, shape, None, log=self._next_log(), environ={}).wait_started()
            for _ in range(1 + shape.second)
        ]

    def close(self) -> None:
        """End everything."""
        for engine in self.engines:
            engine.stop()
