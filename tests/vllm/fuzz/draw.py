"""Draws a program from a seed: the same seed and shape make the same program."""

from __future__ import annotations

import random

from tests.vllm.fuzz.program import Act, Program, Request, Wave
from tests.vllm.fuzz.shapes import Shape

SYSTEMS = 6
CROWD = 24
"""Requests that arrive together, now and then: shared blocks are hit while they are computed."""
SALTS = ("", "", "", "", "red", "blue")
WAVES = (1, 2, 2, 3, 3, 4)
PATTERNS = ("nan", "nan", "noise", "flip")
QUIET_ACTS = {"reset": 10, "none": 7, "reset connector": 2, "corrupt arena": 3}
"""Between waves, with weights."""
OFTEN = 0.7
"""How likely a wave has an act that is wanted often."""
EARLY_KILL = 12
"""Services are killed and stopped in the first steps of a wave: later ones are rare."""


class Draw:
    """One program's generator."""

    def __init__(self, seed: int, shape: Shape, often: tuple[str, ...]) -> None:
        self._often = often
        self._random = random.Random(f"{shape.name}/{seed}")
        self._seed, self._shape = seed, shape
        self._requests: list[Request] = []
        edge = shape.block_tokens
        self._systems = [
            edge * self._random.choice((1, 1, 1, 2, 3, 5)) + self._random.choice((-1, 0, 0, 1, 7))
            for _ in range(SYSTEMS)
        ]

    @property
    def _services(self) -> list[str]:
        has_disk = "disk_cache_gb" in self._shape.stack
        return [name for name in self._shape.services if has_disk or name != "disk-tier"]

    def program(self) -> Program:
        """All waves; those after the first often repeat what came before."""
        count = self._random.choice(WAVES)
        waves = tuple(self._wave(number) for number in range(count))
        return Program(seed=self._seed, shape=self._shape.name, waves=waves)

    def _maybe(self, chance: float) -> bool:
        return self._random.random() < chance

    def _wave(self, number: int) -> Wave:
        crowd = self._maybe(0.07)
        together = crowd or self._maybe(0.6)
        count = CROWD if crowd else self._random.choice((2, 3, 4, 6, 8, 12))
        before = list(self._requests)
        requests = [
            self._request(f"w{number}r{index}", before, together=together) for index in range(count)
        ]
        self._requests += requests
        acts = [*self._acts_before(number), *self._acts_within(requests), *self._wanted(number)]
        return Wave(acts=tuple(acts), requests=tuple(requests))

    # --- requests ---------------------------------------------------------------------------

    def _request(self, name: str, before: list[Request], *, together: bool) -> Request:
        draw = self._random
        at = 0 if together or self._maybe(0.4) else draw.randrange(1, 10)
        if before and self._maybe(0.55):
            return self._again(draw.choice(before), name, at)
        after = draw.choice(before).name if before and self._maybe(0.2) else ""
        fresh = Request(
            name=name, at=at, after=after, tail=draw.randrange(1 << 30),
            tail_tokens=self._tail_tokens(), new=draw.choice((1, 1, 2, 4, 8, 12)),
            period=draw.choice((0, 5, 11)) if self._shape.repeats else 0,
        )  # fmt: skip
        if self._maybe(0.7) and not after:
            system = draw.randrange(SYSTEMS)
            fresh = _with(fresh, system=system, system_tokens=self._systems[system])
        return self._spiced(fresh)

    def _again(self, earlier: Request, name: str, at: int) -> Request:
        """The same prompt, perhaps with other wishes."""
        again = _with(earlier, name=name, at=at, abort=0)
        if self._maybe(0.3):
            again = _with(again, new=self._random.choice((1, 2, 8)))
        if self._maybe(0.1):  # What was asked before may be loaded: early steps are in the load.
            again = _with(again, abort=self._random.choice((1, 1, 2, 3, 4)))
        if self._shape.second and self._maybe(0.5):
            again = _with(again, engine=1 - again.engine)
        return again

    def _tail_tokens(self) -> int:
        edge = self._shape.block_tokens
        blocks = self._random.choice((0, 0, 1, 1, 2, 3, 5))
        return max(1, blocks * edge + self._random.choice((-1, 0, 1, 2, 7, edge // 2)))

    def _spiced(self, request: Request) -> Request:
        """With wishes that few requests have."""
        shape, draw = self._shape, self._random
        request = _with(request, salt=draw.choice(SALTS))
        if self._maybe(0.1):
            request = _with(request, abort=draw.randrange(1, 9))
        if not shape.adapters and self._maybe(0.06):
            request = _with(request, prompt_logprobs=True)
        if shape.grammars and self._maybe(0.06):
            request = _with(request, grammar=draw.choice(("choice", "regex")), new=9)
        elif not shape.only_greedy and self._maybe(0.12):
            request = _with(request, n=draw.choice((2, 3)))
        if shape.adapters:
            request = _with(request, adapter=draw.choice((1, 2)))
        if shape.priorities:
            request = _with(request, priority=draw.randrange(4))
        if shape.name in ("tiny", "priority") and self._maybe(0.4):
            request = _with(request, new=draw.choice((24, 48)))
        if shape.second and self._maybe(0.3):
            request = _with(request, engine=1)
        return request

    # --- acts -------------------------------------------------------------------------------

    def _acts_before(self, number: int) -> list[Act]:
        """Between waves: what needs a quiet engine."""
        if not number:
            return []
        what = self._random.choices(list(QUIET_ACTS), list(QUIET_ACTS.values()))[0]
        acts: list[Act] = []
        if what == "corrupt arena":
            pattern = self._random.choice(PATTERNS)
            number = self._random.randrange(1 << 30)
            acts += [Act(what=what, target=pattern, number=number), Act(what="reset")]
        elif what != "none":
            acts.append(Act(what=what))
        if self._shape.adapters and self._maybe(0.35):
            name = self._random.choice((1, 2))
            where = self._random.choice(("same path", "new path"))
            acts.append(Act(what="adapter", target=where, number=name))
        elif self._maybe(0.06) and self._shape.reloads:
            acts.append(Act(what="weights"))
        if self._slow(0.012):
            what = self._random.choice(("restart", "fine-tune"))
            acts.append(Act(what=what if self._shape.reloads else "restart"))
        if self._slow(0.05) and "disk_cache_gb" in self._shape.stack:
            pattern = self._random.choice(PATTERNS)
            acts.append(Act(what="corrupt disk", target=pattern, number=self._seed))
        return acts

    def _slow(self, chance: float) -> bool:
        return self._maybe(chance * self._shape.slow)

    def _acts_within(self, requests: list[Request]) -> list[Act]:
        """While it runs, by step: the engine's own, and the stack's."""
        draw, acts = self._random, []
        at = draw.choice((1, 1, 1, 2, 2, 3, 4, 6, EARLY_KILL))
        if self._maybe(0.08):
            acts.append(Act(what="reset running", at=draw.randrange(1, 12)))
        if self._slow(0.05):
            acts.append(Act(what="kill", target=draw.choice(self._services), at=at))
            if self._maybe(0.5):
                acts.append(Act(what="start", at=at + draw.randrange(1, 6)))
        elif self._slow(0.03):
            acts.append(Act(what="stop", target=draw.choice(self._services), at=at))
            if self._maybe(0.4):
                acts.append(Act(what="continue", at=at + draw.randrange(1, 6)))
        elif self._slow(0.02):
            what = draw.choice(("fill memory", "fill disk"))
            acts.append(Act(what=what, at=draw.choice((0, at))))
        elif self._slow(0.01):
            acts += [Act(what="kill", target="host-tier", at=at), Act(what="start", at=at)]
            acts.insert(draw.randrange(3), Act(what="fill memory", at=at))
        return acts

    def _wanted(self, number: int) -> list[Act]:
        """Return what this program was asked to do often: an act, or `pause` for two."""
        draw, acts = self._random, []
        for what in self._often:
            at = draw.randrange(1, 5)
            if not self._maybe(OFTEN):
                continue
            if what == "pause":  # Whatever is offered meanwhile is pulled late.
                at = draw.randrange(1, 13)
                acts.append(Act(what="stop", target="host-tier", at=at))
                acts.append(Act(what="continue", at=at + draw.randrange(3, 16)))
            elif what == "stop":
                acts.append(Act(what=what, target="host-tier", at=at))
            elif what == "fill memory":
                acts.append(Act(what=what, at=at))
            elif what == "corrupt arena" and number:
                pattern = draw.choice(PATTERNS)
                acts.append(Act(what=what, target=pattern, number=draw.randrange(1 << 30)))
                acts.append(Act(what="reset"))
            elif number:
                acts.append(Act(what=what))
        return acts


def draw(seed: int, shape: Shape, often: tuple[str, ...] = ()) -> Program:
    """Return the program of a seed, with some acts more often than others."""
    return Draw(seed, shape, often).program()


def _with(request: Request, **changes: object) -> Request:
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return Request(**(fields | changes))
