"""A campaign: many seeds, shape by shape, in one process; failing programs are shrunk."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from kvbm_common.errors import KvbmError

from tests.vllm.fuzz.draw import draw
from tests.vllm.fuzz.engines import Plain
from tests.vllm.fuzz.fixtures import made
from tests.vllm.fuzz.judge import Failure
from tests.vllm.fuzz.lane import Lane, enter_private_memory
from tests.vllm.fuzz.plants import PLANTS
from tests.vllm.fuzz.program import Program
from tests.vllm.fuzz.reference import Reference
from tests.vllm.fuzz.runner import Result, Run, classes
from tests.vllm.fuzz.shapes import SHAPES
from tests.vllm.fuzz.shrink import shrink
from tests.vllm.harness import VLLM_PYTHON


class Found(msgspec.Struct, kw_only=True):
    """A failing program."""

    program: Program
    failures: list[Failure]
    shrunk: Program | None = None
    shrunk_failures: list[Failure] = []
    runs: int = 0
    """Of the shrinker."""
    like: str = ""
    """The first failure that it looks like: of the same kinds, with all acts that it needs."""
    after: int = 0
    """Programs of this shape that had run until then, with it."""

    def looks_like(self, other: Found) -> bool:
        """Might this, as small as it is, be what the other one shows, too?"""
        return (
            other.program.shape == self.program.shape
            and classes(self.shrunk_failures or self.failures) >= classes(other.failures)
            and serious(self.shrunk or self.program) == serious(other.program)
        )


def serious(program: Program) -> set[str]:
    """The acts, but for those that every other program has."""
    return {act.what for act in program.acts} - {"reset", "start", "continue"}


class Tally(msgspec.Struct, kw_only=True):
    """What came of the programs of one shape."""

    shape: str
    plant: str = ""
    programs: int = 0
    seconds: float = 0.0
    started_s: float = 0.0
    """How long its engines took to start."""
    features: dict[str, int] = {}
    found: list[Found] = []


@dataclass(kw_only=True)
class Wishes:
    """What a campaign shall do."""

    shapes: list[str]
    first: int = 0
    end: int = 100
    until_s: float = field(default_factory=lambda: time.monotonic() + 3600)
    plant: str = ""
    plants: list[str] = field(default_factory=list)
    """A table of these instead of a campaign."""
    plant_s: float = 120.0
    shrink_s: float = 120.0
    failures_max: int = 5
    """Per shape: then it is enough."""
    programs: list[Program] = field(default_factory=list)
    """To be replayed, instead of drawn ones."""
    work: Path = Path("/tmp/kvbm-fuzz")
    report: Callable[[Tally], None] = lambda tally: None


class Campaign:
    """Reference and lanes are started when they are needed."""

    def __init__(self, wishes: Wishes) -> None:
        self._wishes = wishes
        wishes.work.mkdir(parents=True, exist_ok=True)
        self._private = enter_private_memory()
        self._references: dict[str, tuple[Path, Reference]] = {}
        self._alone: Plain | None = None
        self._known: dict[str, Found] = {}

    def run(self) -> list[Tally]:
        """All shapes, one after the other."""
        tallies = []
        try:
            if self._wishes.plants:
                return list(itertools.chain.from_iterable(map(self._plants, self._by_shape())))
            for number, shape in enumerate(self._wishes.shapes):
                programs = self._programs(shape, number)
                share = self._share_s(number)
                tallies.append(self._shape(shape, programs, time.monotonic() + share))
        finally:
            for _, reference in self._references.values():
                reference.stop()
            if self._alone is not None:
                self._alone.close()
        return tallies

    def _share_s(self, number: int) -> float:
        left = len(self._wishes.shapes) - number
        return max(0.0, self._wishes.until_s - time.monotonic()) / left

    def _programs(self, shape: str, number: int) -> list[Program]:
        wishes = self._wishes
        if wishes.programs:
            return [program for program in wishes.programs if program.shape == shape]
        step = len(wishes.shapes)
        seeds = range(wishes.first + number, wishes.end, step)
        return [draw(seed, SHAPES[shape]) for seed in seeds]

    def _shape(self, shape: str, programs: list[Program], until_s: float) -> Tally:
        tally = Tally(shape=shape)
        if not programs:
            return tally
        started_s = time.monotonic()
        lane = self._lane(shape, self._wishes.plant)
        tally.started_s = time.monotonic() - started_s
        features: Counter[str] = Counter()
        try:
            for program in programs:
                new = [found for found in tally.found if not found.like]
                if time.monotonic() > until_s or len(new) >= self._wishes.failures_max:
                    break
                result = self._one(program, lane)
                tally.programs += 1
                tally.seconds += result.seconds
                features += result.features
                tally.features = dict(features)
                if result.failures:
                    self._failed(program, result, lane, tally, until_s)
                self._wishes.report(tally)
        finally:
            lane.close()
        return tally

    # --- plants -----------------------------------------------------------------------------

    def _by_shape(self) -> list[tuple[str, list[str]]]:
        """Plants by the shape that can show them, so that engines start once."""
        found: dict[str, list[str]] = {}
        for name in self._wishes.plants:
            for shape in PLANTS[name].shapes:
                found.setdefault(shape, []).append(name)
        return list(found.items())

    def _plants(self, wanted: tuple[str, list[str]]) -> list[Tally]:
        """How many programs each takes to be found."""
        shape, names = wanted
        names = sorted(names, key=lambda name: PLANTS[name].restarts)
        lane = self._lane(shape, plant="")
        try:
            return [self._planted(lane, shape, name) for name in names]
        finally:
            with contextlib.suppress(RuntimeError):  # It may have been closed, and not opened.
                lane.close()

    def _planted(self, lane: Lane, shape: str, name: str) -> Tally:
        tally = Tally(shape=shape, plant=name)
        until_s = time.monotonic() + self._wishes.plant_s
        try:
            lane.plant(name)
        except (AssertionError, OSError, KvbmError, TimeoutError) as error:
            print(f"{name} cannot be planted: {error}", file=sys.stderr)
            self._wishes.report(tally)
            return tally
        for seed in range(self._wishes.first, self._wishes.end):
            program = draw(seed, SHAPES[shape], PLANTS[name].often)
            result = self._one(program, lane)
            tally.programs += 1
            tally.seconds += result.seconds
            if result.failures:
                tally.found = [Found(
                    program=program, failures=result.failures,
                    after=tally.programs, like="the plant",
                )]  # fmt: skip
            if result.failures or time.monotonic() > until_s:
                break
        self._wishes.report(tally)
        return tally

    def _of_kind(self, shape: str) -> tuple[Path, Reference]:
        """The checkpoints for a shape's engines, and vLLM alone, which starts meanwhile."""
        kind = SHAPES[shape].kind
        if kind not in self._references:
            fixtures = made(VLLM_PYTHON, kind)
            reference = Reference(kind, fixtures, self._wishes.work)
            self._references[kind] = fixtures, reference
            reference.begin()
        return self._references[kind]

    def _lane(self, shape: str, plant: str) -> Lane:
        fixtures, _ = self._of_kind(shape)
        return Lane(
            SHAPES[shape], fixtures, self._wishes.work / shape, plant=plant,
            private=self._private,
        )  # fmt: skip

    def _plain(self, shape: str) -> Plain:
        """vLLM alone with the arguments of a shape: one at a time, started when it is asked."""
        if self._alone is None or self._alone.shape.name != shape:
            if self._alone is not None:
                self._alone.close()
            fixtures, _ = self._of_kind(shape)
            self._alone = Plain(SHAPES[shape], fixtures, self._wishes.work / f"{shape}-alone")
        return self._alone

    def _one(self, program: Program, lane: Lane) -> Result:
        plain = partial(self._plain, program.shape)
        _, reference = self._of_kind(program.shape)
        result = Run(program, lane, reference, plain).result()
        if result.unusable:
            lane.reopen()
        return result

    def _failed(
        self, program: Program, result: Result, lane: Lane, tally: Tally, until_s: float
    ) -> None:
        found = Found(program=program, failures=result.failures, after=tally.programs)
        found.like = next((name for name, one in self._known.items() if one.looks_like(found)), "")
        tally.found.append(found)
        self._wishes.report(tally)
        if found.like:
            return
        self._known[f"{program.shape} seed {program.seed}"] = found
        worst = result.worst
        latest = result.failures

        def fails(candidate: Program) -> bool:
            nonlocal latest
            again = self._one(candidate, lane)
            still = worst in classes(again.failures)
            if still:
                latest = again.failures
            return still

        if self._wishes.shrink_s <= 0:
            return
        seconds = min(self._wishes.shrink_s, max(10.0, until_s - time.monotonic()))
        try:
            found.shrunk, found.runs = shrink(program, fails, seconds=seconds)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            lane.reopen()
        found.shrunk_failures = latest
