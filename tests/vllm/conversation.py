"""What the tests say to an engine process, and what it answers: one JSON line each."""

from __future__ import annotations

import msgspec


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request to vLLM, greedy, with logprobs."""

    name: str
    tokens: list[int]
    new_tokens: int = 8
    salt: str | None = None
    lora: tuple[str, int, str] | None = None
    """An adapter: its name, number and directory."""
    sounds: list[tuple[int, float]] = []
    """Seed and seconds of each noise that its tokens have a place for."""
    transfer: dict[str, object] = {}
    """Its `kv_transfer_params`: what connectors read, hints among them."""
    abort_after_steps: int = 0
    """0: let it finish."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """`run` the asks, `reset` the prefix cache, `dump` its content, `verify never`,
    `hold loads`, `time calls`, `load weights`, `receive weights` (by a function of the program),
    `replace adapter` (in place, by that of the first ask; ok: it was loaded), `reset all`,
    `reset refused` (while the first ask runs; ok: vLLM has refused), `pause`, `write in pause`
    (weights, while the first ask runs), `park`, `restore`, `state` (nothing but the reply) or
    `stop`."""

    what: str
    path: str = ""
    """Of a file: as long as it is there, a step that loads does not go on (`hold loads`). Of a
    model's directory (`load weights`, `receive weights`, `write in pause`)."""
    asks: list[Ask] = []
    group: int | None = None
    """`dump` the blocks of this KV group alone."""
    settle: bool = True
    """Go on stepping until no request holds blocks and nothing is on offer."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came out of one ask."""

    name: str
    tokens: list[int]
    logprobs: list[float]
    cached: int
    """Prompt tokens that were not computed, from the device or from us."""
    seconds: float
    """To the first token."""
    finish: str
    waited: int = 0
    """Steps of the scheduler from its arrival to the one that has it run, which counts."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """To any command."""

    answers: list[Answer] = []
    ok: bool = True
    counts: dict[str, int] = {}
    """What the connector's halves have counted."""
    preemptions: int = 0
    drafts: tuple[int, int] = (0, 0)
    """Draft tokens that vLLM has made, and those that were right."""
    blocks: list[str] = []
    """Our names of the blocks in the device's prefix cache, in hex."""
    engine: str = ""
    epochs: list[int] = []
    """The lives of the host tier that the scheduler half and the worker half are attached to;
    0: to none."""
    streams_attached: bool = False
    cpus: dict[str, int] = {}
    """How many processors each of the connector's threads may use."""
    expects_reads: bool = True
    """Does the worker's mover stand ready for the host tier?"""
