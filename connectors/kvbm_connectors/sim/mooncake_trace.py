"""Traces in Mooncake's format (FAST'25 release): a request a line, its prompt as ids of blocks.

    {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 7]}

Equal ids stand for equal blocks behind equal prefixes. `timestamp` is in ms.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from kvbm_common.errors import KvbmError

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
    """What a simulation of the cache needs of a line; blocks may be of any size."""

    hash_ids: list[int | str]


def read_trace(path: Path, line_type: type[Line], *, requests: int | None = None) -> list[Line]:
    """Return the first requests of a trace, or all. Raises BadTrace, which names the line."""
    decoder = msgspec.json.Decoder(line_type)
    found: list[Line] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(itertools.islice(lines, requests), start=1):
                try:
                    found.append(decoder.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise BadTrace(f"{path}, line {number}: {error}") from error
    except OSError as error:
        raise BadTrace(f"the trace cannot be read: {error}") from error
    return found
