"""A program: what happens to an engine and its stack, in waves, as one line of JSON.

Tokens are not written down but drawn from the program's seed and a nonce: a program that runs a
second time on the same stack gets other prompts of the same shape, and finds nothing of the first.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec

FIRST_TOKEN = 3
"""Those before it are special."""
VOCABULARY = 1024


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Its prompt: a shared system prompt or an earlier request and its answer, then a
    tail of its own."""

    name: str
    system: int = 0
    """Which one of the pool."""
    system_tokens: int = 0
    after: str = ""
    """An earlier request: its prompt and its answer come before the tail, as in a next turn."""
    tail: int = 0
    tail_tokens: int = 1
    period: int = 0
    """The tail repeats itself: something to speculate on."""
    at: int = 0
    """The step of the wave in which it arrives."""
    new: int = 1
    n: int = 1
    """Several answers are sampled, each time among the likeliest alone: with a seed, vLLM on CPU
    cannot cut a prompt into chunks."""
    abort: int = 0
    """So many steps after it has arrived; 0: let it finish."""
    prompt_logprobs: bool = False
    grammar: str = ""
    adapter: int = 0
    """1, 2: by name; 0: the model alone."""
    salt: str = ""
    priority: int = 0
    engine: int = 0
    """1: the second engine of the same stack."""


class Act(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that is done to engine or stack."""

    what: str
    target: str = ""
    at: int = 0
    """The step of the wave, or before it."""
    number: int = 0


class Wave(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Acts, and requests that run together."""

    acts: tuple[Act, ...] = ()
    requests: tuple[Request, ...] = ()


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What one seed stands for."""

    seed: int
    shape: str
    waves: tuple[Wave, ...]

    def line(self) -> str:
        """As one line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def of(cls, line: str | bytes) -> Program:
        """From such a line."""
        return msgspec.json.decode(line, type=cls)

    @property
    def requests(self) -> list[Request]:
        """Of all waves."""
        return [request for wave in self.waves for request in wave.requests]

    @property
    def acts(self) -> list[Act]:
        """Of all waves."""
        return [act for wave in self.waves for act in wave.acts]

    @property
    def size(self) -> int:
        """Of what is left when it shrinks: requests, acts and tokens."""
        tokens = sum(r.system_tokens + r.tail_tokens + r.new * r.n for r in self.requests)
        return 1000 * (len(self.requests) + len(self.acts) + len(self.waves)) + tokens


def tokens_of(key: str, count: int, *, period: int = 0) -> list[int]:
    """The same key makes the same tokens, and a shorter text is the beginning of a longer one."""
    generator = random.Random(key)
    fresh = period if period else count
    drawn = [generator.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(fresh)]
    return [drawn[index % fresh] for index in range(count)] if fresh else []


def prompt_of(
    request: Request, key: str, spoken: Mapping[str, Sequence[int]], *, limit: int
) -> list[int]:
    """The tokens of a prompt. `spoken` are prompts with their answers, by request."""
    before = list(spoken.get(request.after, ()))[:limit]
    system = tokens_of(f"{key}/system/{request.system}", request.system_tokens)
    tail = tokens_of(f"{key}/tail/{request.tail}", request.tail_tokens, period=request.period)
    prompt = [*(before or system), *tail]
    return prompt[:limit] or [FIRST_TOKEN]
