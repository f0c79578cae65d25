"""Makes a failing program smaller as long as it still fails: bounded in runs and in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from tests.vllm.fuzz.program import Act, Program, Request, Wave

Fails = Callable[[Program], bool]
SIMPLER: tuple[dict[str, object], ...] = (
    {"n": 1}, {"grammar": ""}, {"prompt_logprobs": False}, {"salt": ""}, {"abort": 0},
    {"at": 0}, {"priority": 0}, {"period": 0}, {"adapter": 0}, {"engine": 0}, {"after": ""},
    {"system": 0, "system_tokens": 0}, {"new": 1}, {"tail_tokens": 1},
)  # fmt: skip


def shrink(
    program: Program,
    fails: Fails,
    *,
    runs: int = 60,
    seconds: float = 120.0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Program, int]:
    """The smallest that was found, and after how many runs."""
    give_up_s = clock() + seconds
    done = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(program):
            if _worth(candidate) >= _worth(program):
                continue
            if done >= runs or clock() >= give_up_s:
                return program, done
            done += 1
            if fails(candidate):
                program, smaller = candidate, True
                break
    return program, done


def candidates(program: Program) -> Iterator[Program]:
    """Smaller programs, those that lose most first."""
    for kept in _without(program.waves):
        yield _program(program, kept)
    yield from _fewer(program, "requests")
    yield from _fewer(program, "acts")
    for change in SIMPLER:  # Of all requests at once, then of each.
        yield _changed(program, None, change)
    for request in program.requests:
        for change in SIMPLER:
            yield _changed(program, request.name, change)
        for name in ("tail_tokens", "system_tokens", "new"):
            value = getattr(request, name)
            yield _changed(program, request.name, {name: max(1, value // 2) if value else 0})


def _fewer(program: Program, name: str) -> Iterator[Program]:
    for index, wave in enumerate(program.waves):
        for kept in _without(getattr(wave, name)):
            waves = list(program.waves)
            waves[index] = msgspec.structs.replace(wave, **{name: kept})
            yield _program(program, waves)


def _without(things: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """The halves, then the quarters, …, then all but one."""
    size = len(things) // 2 or len(things)
    while size:
        for start in range(0, len(things), size):
            yield (*things[:start], *things[start + size :])
        size //= 2


def _changed(program: Program, name: str | None, change: dict[str, object]) -> Program:
    waves = [
        msgspec.structs.replace(wave, requests=tuple(
            msgspec.structs.replace(request, **change) if name in (None, request.name) else request
            for request in wave.requests
        ))
        for wave in program.waves
    ]  # fmt: skip
    return _program(program, waves)


def _program(program: Program, waves: Sequence[Wave]) -> Program:
    kept = tuple(wave for wave in waves if wave.requests or wave.acts)
    return msgspec.structs.replace(program, waves=kept)


def _worth(program: Program) -> tuple[int, int]:
    return program.size, _spice(program)


def _spice(program: Program) -> int:
    """How much is unusual about its requests and acts."""
    plain_request, plain_act = Request(name=""), Act(what="")
    skipped = {"name", "tail", "what", "tail_tokens", "system_tokens", "new"}
    return sum(
        getattr(thing, name) != getattr(plain, name)
        for things, plain in ((program.requests, plain_request), (program.acts, plain_act))
        for thing in things
        for name in thing.__struct_fields__
        if name not in skipped
    )
