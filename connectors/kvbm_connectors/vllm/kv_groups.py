"""KV groups of a vLLM engine: which kinds of attention are served, and how each group is named.

vLLM's hybrid KV cache manager gives layers with full attention and layers with a sliding window
groups of their own. All groups take their blocks from one pool: block `b` is the same bytes in
every group, and belongs to one of them at a time. So one set of regions is lent, and a block is
offered and loaded in the same way whatever its group is. Names differ by `Namespace.group`.

Of a window, only blocks before some boundaries are kept in the tiers (`is_in_tail`): a hit needs no
others, and they would take as much room as full attention. The boundaries are

    the end of the prompt and of the request: the next turn of a conversation begins there
    where a device hit or a shared prefix ended: other prompts part there, too
    every TAILS_EVERY windows: a prompt that parts from all others elsewhere
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvbm_common.identity import Hasher, Namespace
from kvbm_common.tier.kv_groups import GroupRun
from msgspec.structs import replace

FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
WINDOW = "SlidingWindowSpec"
TAILS_EVERY = 4
"""Windows from one regular boundary to the next: a quarter of a window group's blocks is kept."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One KV group: how its blocks are named, and how many before a boundary a hit needs."""

    hasher: Hasher
    window: int = 0
    """In blocks; 0: all blocks (full attention)."""

    def run(self, blocks: int) -> GroupRun:
        """Return what a lookup for so many blocks says of this group."""
        return GroupRun(self.hasher.namespace.block_tokens, blocks, self.window)


def refusal_of_groups(kv_cache_config: Any) -> str:
    """Return why the groups of an engine cannot be cached; `""` if they can."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not specs:
        return "the model has no KV cache"
    for spec in specs:
        kinds = kinds_of(spec)
        if not kinds <= FULL and kinds != {WINDOW}:
            return (
                f"a KV cache group is {', '.join(sorted(kinds))}; full attention and sliding "
                "windows are supported"
            )
        if getattr(spec, "extra_retained_tokens", 0):
            return "a sliding window keeps more tokens than it looks at"
    sizes = sorted({int(spec.block_size) for spec in specs})
    if len(sizes) > 1:
        return f"the KV cache groups have blocks of {sizes} tokens, and one size is supported"
    hash_size = getattr(kv_cache_config, "hash_block_size", None) or sizes[0]
    if len(specs) > 1 and int(hash_size) != sizes[0]:
        return f"vLLM hashes {hash_size} tokens at a time, and blocks have {sizes[0]}"
    return ""


def kinds_of(spec: Any) -> set[str]:
    """Return the kinds of a group's spec. A full-attention spec may have a window: its layers look
    back so far, and keep all blocks."""
    inner = getattr(spec, "kv_cache_specs", None)
    specs = inner.values() if isinstance(inner, dict) else [spec]
    return {type(one).__name__ for one in specs}


def window_blocks(spec: Any) -> int:
    """Return how many blocks before a boundary a hit needs; 0: all of them.

    The first token behind the boundary looks at itself and `sliding_window - 1` tokens before it.
    """
    if kinds_of(spec) != {WINDOW}:
        return 0
    return max(1, -(-(int(spec.sliding_window) - 1) // int(spec.block_size)))


def is_hybrid(kv_cache_config: Any) -> bool:
    """Return whether a hit needs other blocks than all before a boundary."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) > 1 or window_blocks(groups[0].kv_cache_spec) > 0


def groups_of(kv_cache_config: Any, namespace: Namespace) -> tuple[KvGroup, ...]:
    """Return the groups of an engine, in vLLM's order. `namespace` is the first one's."""
    assert namespace.group == 0, namespace
    return tuple(
        KvGroup(Hasher(replace(namespace, group=at)), window_blocks(group.kv_cache_spec))
        for at, group in enumerate(kv_cache_config.kv_cache_groups)
    )


def grouping_of(kv_cache_config: Any) -> str:
    """Return what stands for how layers are grouped; empty for one group of full attention.

    Engines whose groups differ keep other layers in a block of the same group.
    """
    if not is_hybrid(kv_cache_config):
        return ""
    groups = [
        [sorted(kinds_of(one.kv_cache_spec)), window_blocks(one.kv_cache_spec), *one.layer_names]
        for one in kv_cache_config.kv_cache_groups
    ]
    digest = hashlib.blake2b(json.dumps(groups).encode(), digest_size=8).hexdigest()
    return f"/groups-{digest}"


def is_in_tail(place: int, window: int, boundaries: Collection[int]) -> bool:
    """Return whether a hit at one of these boundaries, or a regular one, needs a window's block.

    >>> [place for place in range(10) if is_in_tail(place, 1, {2})]
    [1, 3, 7]
    """
    every = TAILS_EVERY * window
    if every - place % every <= window:
        return True
    return any(boundary - window <= place < boundary for boundary in boundaries)


def runs_of(groups: Sequence[KvGroup], blocks: int) -> list[GroupRun]:
    """Return what a lookup for so many blocks of each group says of them."""
    return [group.run(blocks) for group in groups]
