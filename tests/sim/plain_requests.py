"""Requests of a plain engine, with a table of device blocks for each KV group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvbm_common.identity import SequenceHash
from kvbm_connectors.core.messages import LoadResult

NOWHERE = -1
"""In a table: a block that is behind a window."""


@dataclass(slots=True)
class Request:
    """A request in the engine. Its last token must be computed."""

    name: str
    tokens: list[int]
    names: list[list[SequenceHash]]
    """Of each KV group, those of the full blocks."""
    since_ms: float
    tables: list[list[int]] = field(default_factory=list)
    """The device blocks of each group; NOWHERE: after a window."""
    local: int = 0
    """Tokens that the device's cache had."""
    computed: int = 0
    """Tokens before the first one that is computed."""
    boundary: int = 0
    """Tokens that the device has after the load."""
    run: int = 0
    """Counts its beginnings: a timer of a former one means nothing."""
    asked_ms: float = 0.0
    aborted: bool = False
    results: list[LoadResult] = field(default_factory=list)
    """Of the ranks whose part of the load has ended."""


def flat(tables: Iterable[Iterable[int]]) -> list[int]:
    """Return the device blocks of all groups."""
    return [block for table in tables for block in table if block != NOWHERE]
