"""What a test and a rank's process say to each other: a line of JSON each."""

from __future__ import annotations

from typing import Any

import msgspec


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A host pool to be made. `mamba` pages are states: their size is one."""

    kind: str = "mha"
    layout: str = "page_first"
    pages: int = 24
    page_size: int = 16
    layers: int = 4
    heads: int = 2
    head_dim: int = 64


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A request's prompt, and what sets it apart from others of the same tokens."""

    tokens: list[int]
    extra_key: str = ""
    salt: str = ""
    is_poet: bool = False
    """With the adapter `poet`."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One call. `pages` are those of the pool's memory, `seeds` what is in them."""

    what: str
    pool: str = "kv"
    keys: list[str] = []
    pages: list[int] = []
    seeds: list[int] = []
    tokens: list[int] = []
    window: int = 0
    """Of a pool that needs the last pages only."""
    backend: str = "dynamic"
    config: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    """Of the server, as far as we read them."""
    pools: dict[str, Pool] = {}
    prompts: list[Prompt] = []
    rounds: int = 1


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. `error` is empty if nothing was raised."""

    error: str = ""
    flags: list[bool] = []
    number: int = 0
    lengths: list[int] = []
    counts: dict[str, int] = {}
    rates: dict[str, float] = {}
