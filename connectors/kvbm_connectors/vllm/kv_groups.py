"""KV groups of a vLLM engine: which kinds of attention are served, and how each group is named.

vLLM's hybrid KV cache manager gives each kind of attention its own groups. All groups take
their blocks from one pool: block `b` is the same bytes in every group, and belongs to one of them
at a time. So one set of regions is lent, and a block is offered and loaded in the same way whatever
its group is. Names differ by `Namespace.group`, and each group has as many tokens in a block as
vLLM gives it: smaller pages are filled with more tokens.

    full, latent attention     all blocks before a boundary
    sliding window             the last blocks before it
    chunked local attention    the blocks of the chunk in which the boundary lies
    recurrent state            the block that holds the state after the boundary's last token
    scratch                    groups that vLLM itself finds no hits in: not named, not loaded

Of windows and chunks, only blocks before some boundaries are kept in the tiers (`tails_in`): a
hit needs no others, and they would take as much room as full attention. The boundaries are

    the end of the prompt and of the request: the next turn of a conversation begins there
    where a device hit or a shared prefix ended: other prompts part there, too
    every TAILS_EVERY windows: a prompt that parts from all others elsewhere

The end of a chunk needs no block, so a prompt that parts elsewhere can begin at the chunk's begin.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from kvbm_common.copying.naming import NAMING
from kvbm_common.identity import Hasher, Namespace
from kvbm_common.tier.kv_groups import GroupRun
from msgspec.structs import replace

from kvbm_connectors.vllm.versions import is_host_resident, replayed_tokens

FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
WINDOWS = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
CHUNKED = frozenset({"ChunkedLocalAttentionSpec"})
RECURRENT = frozenset({"MambaSpec"})
SERVED = (FULL, WINDOWS, CHUNKED, RECURRENT)
TAILS_EVERY = 4
"""Windows from one regular boundary to the next: a quarter of a window group's blocks is kept."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One KV group: how its blocks are named, and which of them a hit needs."""

    hasher: Hasher
    window_blocks: int = 0
    """Blocks before a boundary, of windows and states; 0, without a chunk: all blocks."""
    chunk_tokens: int = 0
    """Tokens of a chunk, of chunked attention."""
    table: int = 0
    """The index of its block table among vLLM's."""
    handed_over: bool = False
    """Blocks are states, which vLLM hands over one by one: its table moves them."""

    @property
    def block_tokens(self) -> int:
        """Return the tokens of one block."""
        return self.hasher.namespace.block_tokens

    @property
    def is_prefix(self) -> bool:
        """Return whether a hit needs every block before its boundary."""
        return not self.window_blocks and not self.chunk_tokens

    def run(self, first: int, end: int) -> GroupRun:
        """Return what a lookup for the tokens from `first` to `end` says of this group."""
        size = self.block_tokens
        return GroupRun(size, (end - first) // size, self.window_blocks, self.chunk_tokens, first)

    def needed_indices(self, first: int, end: int) -> range:
        """Return which blocks a hit up to `end` needs, beside those before `first`."""
        run = self.run(first, end)
        before = first // self.block_tokens
        return range(before + run.first_needed(end - first), before + run.blocks)


def refusal_of_groups(kv_cache_config: Any) -> str:
    """Return why the groups of an engine cannot be cached; `""` if they can."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "the model has no KV cache"
    for group in groups:
        if is_host_resident(group) or not getattr(group, "enable_kv_transfer", True):
            return "vLLM keeps a KV cache group in host memory of its own (HiSparse)"
        spec = group.kv_cache_spec
        if replayed_tokens(spec):
            return "vLLM computes the last window before each hit again (bounded replay)"
        if is_cacheable(spec) and (refusal := _refusal_of_spec(spec)):
            return refusal
    return _refusal_of_sizes([group.kv_cache_spec for group in groups])


def _refusal_of_spec(spec: Any) -> str:
    kinds = kinds_of(spec)
    if not any(kinds <= known for known in SERVED):
        allowed = sorted(frozenset().union(*SERVED))
        return f"a KV cache group is {', '.join(sorted(kinds))}; served are {', '.join(allowed)}"
    mode = getattr(layer_spec(spec), "mamba_cache_mode", "")
    if kinds <= RECURRENT and mode not in ("align", "all"):
        return f"vLLM caches no recurrent states (mamba_cache_mode is {mode!r})"
    return ""


def _refusal_of_sizes(specs: Sequence[Any]) -> str:
    cacheable = [int(spec.block_size) for spec in specs if is_cacheable(spec)]
    if not cacheable:
        return "vLLM caches no KV cache group of the model"
    if (step := lcm(*(int(spec.block_size) for spec in specs))) != lcm(*cacheable):
        # vLLM cuts hits to this number, and a hit over groups is loaded as a whole.
        return f"vLLM's hits end every {step} tokens, and cached blocks at {sorted(cacheable)}"
    return ""


def is_cacheable(spec: Any) -> bool:
    """Return whether vLLM itself finds hits in a group: it does not in scratch memory."""
    return bool(getattr(spec, "prefix_cacheable", True))


def kinds_of(spec: Any) -> set[str]:
    """Return the kinds of a group's spec. A full-attention spec may have a window: its layers look
    back so far, and keep all blocks."""
    inner = getattr(spec, "kv_cache_specs", None)
    specs = inner.values() if isinstance(inner, dict) else [spec]
    return {type(one).__name__ for one in specs}


def layer_spec(spec: Any) -> Any:
    """Return the spec of a group's first layer: those of one group have the same window."""
    inner = getattr(spec, "kv_cache_specs", None)
    return next(iter(inner.values())) if isinstance(inner, dict) and inner else spec


def window_blocks(spec: Any) -> int:
    """Return how many blocks before a boundary a hit needs; 0: another rule than that.

    The first token after the boundary looks at itself and `sliding_window - 1` tokens before it.
    A draft model of several layers may compute a few tokens before it again.
    """
    kinds, one = kinds_of(spec), layer_spec(spec)
    if kinds <= RECURRENT:
        return 1
    if not kinds <= WINDOWS:
        return 0
    tokens = int(one.sliding_window) - 1 + int(getattr(one, "extra_retained_tokens", 0))
    return max(1, -(-tokens // int(spec.block_size)))


def chunk_tokens(spec: Any) -> int:
    """Return the tokens of a chunk of chunked attention; 0: another kind."""
    return int(layer_spec(spec).attention_chunk_size) if kinds_of(spec) <= CHUNKED else 0


def is_hybrid(kv_cache_config: Any) -> bool:
    """Return whether a hit needs other blocks than all before a boundary, or of several groups."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) > 1 or not kinds_of(groups[0].kv_cache_spec) <= FULL


def first_group(kv_cache_config: Any) -> tuple[int, Any]:
    """Return the index and the spec of the first group with a prefix cache."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return next(
        (at, group.kv_cache_spec) for at, group in groups if is_cacheable(group.kv_cache_spec)
    )


def attention_specs(kv_cache_config: Any) -> list[Any]:
    """Return a spec for each group with attention; of a model without any, that of its states."""
    specs = [layer_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    return [spec for spec in specs if not kinds_of(spec) <= RECURRENT] or specs[:1]


def groups_of(kv_cache_config: Any, namespace: Namespace) -> tuple[KvGroup, ...]:
    """Return the groups of an engine, in vLLM's order, as far as they are cached.

    `namespace` is the first one's.
    """
    found: list[KvGroup] = []
    for at, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if not is_cacheable(spec):
            continue
        own = replace(namespace, group=at, block_tokens=int(spec.block_size))
        mode = getattr(layer_spec(spec), "mamba_cache_mode", "")
        found.append(
            KvGroup(
                NAMING.hasher(own),
                window_blocks(spec),
                chunk_tokens(spec),
                at,
                handed_over=mode == "align",
            )
        )
    assert found[0].hasher.namespace == namespace, namespace
    return tuple(found)


def grouping_of(kv_cache_config: Any, names_by_row: Sequence[Sequence[str]]) -> str:
    """Return what stands for how layers are grouped; empty for one group of full attention.

    Engines whose groups differ keep other layers in a block of the same group. `names_by_row` has
    the layers of each group in the whole model (`stages.py`).
    """
    if not is_hybrid(kv_cache_config):
        return ""
    pairs = zip(kv_cache_config.kv_cache_groups, names_by_row, strict=True)
    groups = [[*_shape_of(group.kv_cache_spec), *names] for group, names in pairs]
    digest = hashlib.blake2b(json.dumps(groups).encode(), digest_size=8).hexdigest()
    return f"/groups-{digest}"


def _shape_of(spec: Any) -> list[Any]:
    """Return what a group is by its first layer: vLLM's scheduler knows no other."""
    one = layer_spec(spec)
    state = [str(getattr(one, name, "")) for name in ("shapes", "dtypes", "page_size_padded")]
    rule = [type(one).__name__, int(one.block_size), window_blocks(one), chunk_tokens(one)]
    return [*rule, *state]


def tails_in(indices: range, group: KvGroup, boundaries: Collection[int], step: int) -> list[int]:
    """Return which of these blocks a hit at one of the boundaries, or a regular one, needs.

    Boundaries are numbers of tokens, multiples of `step`.
    """
    assert indices.step == 1, indices
    found: set[int] = set()
    if group.window_blocks:
        every = -(-TAILS_EVERY * group.window_blocks * group.block_tokens // step) * step
        every //= group.block_tokens
        found.update(index for index in indices if every - index % every <= group.window_blocks)
    for boundary in boundaries:
        needed = group.needed_indices(0, boundary)
        first, end = max(needed.start, indices.start), min(needed.stop, indices.stop)
        found.update(range(first, end))
    return sorted(found)


def decoded_together(groups: Sequence[KvGroup], block_tokens: int, most: int) -> int:
    """Return how many blocks of so many tokens a request may decode before they are looked at, up
    to `most`. 0: each must be held by the very step that fills it.

    A window's block is in its table until the window has passed it. While these blocks are decoded,
    and one more, it has not: the last step may be planned two tokens after the last block. What
    fills up after a request's last look is in its last window, which is held when it ends.
    """
    assert most > 0, f"{most} blocks are offered together"
    for group in groups:
        if group.handed_over:
            most = min(most, 1)  # A state is held from the beginning: let that be short.
        elif group.chunk_tokens:
            most = 0  # Its blocks leave with the chunk, whatever their age.
        elif group.window_blocks:
            most = min(most, (group.window_blocks - 1) * group.block_tokens // block_tokens)
    return most


def runs_of(groups: Sequence[KvGroup], first: int, end: int) -> list[GroupRun]:
    """Return what a lookup for the tokens from `first` to `end` says of each group."""
    return [group.run(first, end) for group in groups]
