"""Which KV groups are served, how they are named, and which blocks of a window are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_connectors.vllm.kv_groups import (
    grouping_of,
    groups_of,
    is_hybrid,
    is_in_tail,
    refusal_of_groups,
    runs_of,
    window_blocks,
)

from tests.connectors.helpers import NAMESPACE


@dataclass
class FullAttentionSpec:
    """vllm.v1.kv_cache_interface, by the names of its classes."""

    block_size: int = 4
    sliding_window: int | None = None


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class SlidingWindowSpec:
    sliding_window: int = 9
    block_size: int = 4
    extra_retained_tokens: int = 0


@dataclass
class MambaSpec:
    block_size: int = 4


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, object] = field(default_factory=dict)
    block_size: int = 4


def config(*specs: object, **more: Any) -> Any:
    """A KVCacheConfig with one layer in each group."""
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer{number}"])
        for number, spec in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups, **more)


@pytest.mark.parametrize(
    "specs",
    [
        (FullAttentionSpec(),),
        (MLAAttentionSpec(),),
        (FullAttentionSpec(sliding_window=64),),
        (SlidingWindowSpec(),),
        (SlidingWindowSpec(), SlidingWindowSpec(), FullAttentionSpec()),
        (UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": MLAAttentionSpec()}),),
    ],
)
def test_full_attention_and_windows_are_served(specs: tuple[object, ...]) -> None:
    assert refusal_of_groups(config(*specs)) == ""


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (config(), "no KV cache"),
        (config(FullAttentionSpec(), MambaSpec()), "a KV cache group is MambaSpec"),
        (
            config(UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": SlidingWindowSpec()})),
            "FullAttentionSpec, SlidingWindowSpec",
        ),
        (config(SlidingWindowSpec(extra_retained_tokens=1)), "keeps more tokens"),
        (config(FullAttentionSpec(4), SlidingWindowSpec(9, 8)), r"blocks of \[4, 8\] tokens"),
        (config(FullAttentionSpec(), SlidingWindowSpec(), hash_block_size=2), "hashes 2 tokens"),
    ],
)
def test_what_cannot_be_cached_has_a_reason(cache: Any, reason: str) -> None:
    import re

    assert re.search(reason, refusal_of_groups(cache))


@pytest.mark.parametrize(
    ("window", "blocks"), [(1, 1), (2, 1), (4, 1), (5, 1), (6, 2), (9, 2), (10, 3), (64, 16)]
)
def test_a_hit_needs_the_blocks_that_the_next_token_looks_at(window: int, blocks: int) -> None:
    """The token behind a boundary looks at `window - 1` tokens before it; a block has four."""
    assert window_blocks(SlidingWindowSpec(window)) == blocks


def test_full_attention_with_a_window_keeps_all_blocks() -> None:
    assert window_blocks(FullAttentionSpec(sliding_window=64)) == 0
    assert not is_hybrid(config(FullAttentionSpec(sliding_window=64)))
    assert is_hybrid(config(SlidingWindowSpec()))
    assert is_hybrid(config(FullAttentionSpec(), FullAttentionSpec()))


def test_each_group_has_names_of_its_own() -> None:
    first, second = groups_of(config(FullAttentionSpec(), SlidingWindowSpec()), NAMESPACE)
    assert first.hasher.namespace == NAMESPACE
    assert (second.hasher.namespace.group, second.window) == (1, 2)
    assert first.hasher.chain([1, 2, 3, 4]) != second.hasher.chain([1, 2, 3, 4])
    assert runs_of([first, second], 3) == [GroupRun(4, 3), GroupRun(4, 3, 2)]


def test_engines_that_group_their_layers_otherwise_name_their_blocks_apart() -> None:
    assert grouping_of(config(FullAttentionSpec())) == ""
    one = grouping_of(config(FullAttentionSpec(), SlidingWindowSpec()))
    assert one == grouping_of(config(FullAttentionSpec(), SlidingWindowSpec()))
    others = {
        grouping_of(config(SlidingWindowSpec(), FullAttentionSpec())),
        grouping_of(config(FullAttentionSpec(), SlidingWindowSpec(17))),
        grouping_of(config(FullAttentionSpec(), SlidingWindowSpec(), SlidingWindowSpec())),
    }
    assert len(others | {one}) == 4


def test_the_blocks_of_a_window_that_a_hit_may_need() -> None:
    """A window of two blocks: before 5, and before every multiple of eight."""
    kept = [place for place in range(20) if is_in_tail(place, 2, {5})]
    assert kept == [3, 4, 6, 7, 14, 15]
