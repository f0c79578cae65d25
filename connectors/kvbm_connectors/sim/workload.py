"""Workloads: what users ask an engine for, as turns of conversations that share prefixes.

A conversation is a chain of turns: each turn's prompt is everything that was said before and a new
message. Turns of one conversation run one after the other; conversations run side by side.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from kvbm_common.errors import KvbmError

Tokens = npt.NDArray[np.uint32]
VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: its conversation, what is new in its prompt, and what will be answered."""

    conversation: int
    prompt: Tokens
    outputs: Tokens


def conversations(*, requests: int, seed: int) -> Iterator[Turn]:
    """Yield the turns of multi-turn chat: a few long system prompts, many users, histories that
    grow.

    Turns of all conversations are shuffled into each other, so that a conversation comes back when
    much else has passed through the cache.
    """
    rng = random.Random(seed)
    generator = np.random.default_rng(seed)
    systems = [_tokens(generator, rng.randrange(400, 1000)) for _ in range(4)]
    users = max(1, requests // 6)
    histories = {user: rng.choice(systems) for user in range(users)}
    # A user's next turn is a Zipf-like draw: some talk much, most a little.
    weights = [1 / (1 + rank) ** 0.4 for rank in range(users)]
    for user in rng.choices(range(users), weights=weights, k=requests):
        message = _tokens(generator, rng.randrange(40, 400))
        prompt = np.concatenate([histories[user], message])
        outputs = _tokens(generator, rng.randrange(16, 128))
        histories[user] = np.concatenate([prompt, outputs])
        if len(histories[user]) > 4000:
            histories[user] = rng.choice(systems)
        yield Turn(user, prompt, outputs)


def trace(path: Path, *, requests: int) -> Iterator[Turn]:
    """Return the first requests of a Mooncake trace, in its order, as fast as they go.

    Each hash id becomes the same 512 tokens wherever it appears, the last id of a request only as
    many as the input length leaves. Raises BadTrace, and does so before the first turn.
    """
    entries = _read(path, requests)
    return (_turn(number, entry) for number, entry in enumerate(entries))


def _read(path: Path, requests: int) -> list[TraceLine]:
    entries = read_trace(path, TraceLine, requests=requests)
    for number, entry in enumerate(entries, start=1):
        named = len(entry.hash_ids) * TRACE_BLOCK_TOKENS
        if entry.input_length > named:
            said = f"input_length is {entry.input_length}, hash_ids name {named}"
            raise BadTrace(f"{path}, line {number}: {said}")
    return entries


def _turn(number: int, entry: TraceLine) -> Turn:
    prompt = np.concatenate([_piece(hash_id) for hash_id in entry.hash_ids])
    return Turn(number, prompt[: entry.input_length], _tokens(np.random.default_rng(number), 1))


def _piece(hash_id: int) -> Tokens:
    return _tokens(np.random.default_rng(hash_id), TRACE_BLOCK_TOKENS)


def _tokens(generator: np.random.Generator, count: int) -> Tokens:
    return generator.integers(0, VOCABULARY, count, dtype=np.uint32)


TRACE_BLOCK_TOKENS = 512
"""Mooncake's traces name 512 tokens by one hash id."""

Line = TypeVar("Line", bound=msgspec.Struct)


class BadTrace(KvbmError):
    """The trace file is not in Mooncake's format."""

    code = "bad_trace"


class TraceLine(msgspec.Struct, frozen=True):
    """A whole line of a trace."""

    timestamp: float
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class BlockIds(msgspec.Struct, frozen=True):
    """The part of a line that a simulation of the cache needs; blocks may be of any size."""

    hash_ids: list[int | str]


def read_trace(path: Path, line_type: type[Line], *, requests: int | None = None) -> list[Line]:
    """Return the first requests of a trace, or all. Raises BadTrace, which names the line.

    Empty lines at its end are skipped.
    """
    decoder = msgspec.json.Decoder(line_type)
    found: list[Line] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(itertools.islice(lines, requests), start=1):
                if line.isspace():
                    continue
                if len(found) < number - 1:
                    raise BadTrace(f"{path}, line {len(found) + 1} is empty, and others follow")
                try:
                    found.append(decoder.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise BadTrace(f"{path}, line {number}: {error}") from error
    except OSError as error:
        raise BadTrace(f"the trace cannot be read: {error}") from error
    return found
