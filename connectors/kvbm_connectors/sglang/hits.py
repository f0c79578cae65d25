"""Hits: how far a prefix can be restored when several pools must have their part of it. Pure.

Two rules of SGLang's (`PoolHitPolicy`): of an `all_pages` pool every page of the prefix is needed,
of a `trailing_pages` pool (a window, a state) only the last few of whichever length is restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"


@dataclass(frozen=True, slots=True)
class Hits:
    """The answer of `batch_exists_v2`, in pages."""

    pages: int
    """The longest prefix that all pools have."""
    by_pool: dict[str, int]
    restorable: list[int]
    """Every length that can be restored: ranks intersect theirs."""


def trailing_lengths(present: Sequence[bool], window: int) -> list[int]:
    """Return the prefix lengths whose last `window` pages are all there (fewer pages where the
    prefix is shorter)."""
    lengths: list[int] = []
    run = 0
    for length, here in enumerate(present, start=1):
        run = run + 1 if here else 0
        if run >= min(window, length):
            lengths.append(length)
    return lengths


def combine(kv_name: str, kv_pages: int, pools: Sequence[tuple[str, Sequence[int]]]) -> Hits:
    """Join the KV pool's run with the lengths that each further pool can restore."""
    by_pool = {kv_name: kv_pages} if kv_pages else {}
    restorable = list(range(1, kv_pages + 1))
    for name, lengths in pools:
        allowed = {length for length in lengths if length <= kv_pages}
        if allowed:
            by_pool[name] = max(allowed)
        restorable = [length for length in restorable if length in allowed]
    return Hits(restorable[-1] if restorable else 0, by_pool, restorable)
