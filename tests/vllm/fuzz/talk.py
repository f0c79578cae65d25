"""What the fuzzer says to an engine process, and what it answers: one JSON line each."""

from __future__ import annotations

import msgspec


class Ask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, with logprobs."""

    name: str
    tokens: list[int]
    at: int = 0
    new: int = 1
    n: int = 1
    abort: int = 0
    prompt_logprobs: bool = False
    grammar: str = ""
    adapter: str = ""
    adapter_id: int = 0
    adapter_path: str = ""
    salt: str = ""
    priority: int = 0


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`run` the asks; within it, at each of `pauses`, the engine says so and carries out other
    commands until `go`. `reset`, `reset connector`, `reset running`, `weights`, `adapter`, `scrub`,
    `plant`, `settle`, `state`,
    `stop`."""

    what: str
    asks: list[Ask] = []
    pauses: list[int] = []
    """Steps."""
    path: str = ""
    name: str = ""
    number: int = 0
    deadline_s: float = 60.0


class Spoken(msgspec.Struct, frozen=True, kw_only=True):
    """One completion."""

    tokens: list[int]
    logprobs: list[float | None]
    finish: str
    """As vLLM says; `abort`: by us; `stuck`: it had not ended by the deadline."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came out of one ask."""

    name: str
    spoken: list[Spoken]
    cached: int = 0
    prompt_logprobs: list[float | None] = []


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """To any command, or from within a run (`at`)."""

    at: int = 0
    """The run stands before this step, and waits."""
    answers: list[Answer] = []
    ok: bool = True
    text: str = ""
    counts: dict[str, int] = {}
    """What the connector's halves and the observer of the scheduler have counted."""
    epochs: list[int] = []
    attached: bool = False
