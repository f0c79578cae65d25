"""Which KV groups are served, how they are named, and which blocks of a window are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_common.identity import Hasher
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_connectors.vllm.kv_groups import (
    KvGroup,
    attention_specs,
    chunk_tokens,
    decoded_together,
    first_group,
    grouping_of,
    groups_of,
    is_hybrid,
    refusal_of_groups,
    runs_of,
    tails_in,
    window_blocks,
)
from msgspec.structs import replace

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
class SlidingWindowMLASpec(SlidingWindowSpec):
    prefix_cacheable: bool = True
    prefix_replay_tokens: int = 0


@dataclass
class ChunkedLocalAttentionSpec:
    attention_chunk_size: int = 8
    block_size: int = 4


@dataclass
class MambaSpec:
    block_size: int = 4
    mamba_cache_mode: str = "align"
    shapes: tuple[tuple[int, ...], ...] = ((3, 8),)
    dtypes: tuple[str, ...] = ("float32",)
    page_size_padded: int | None = None


@dataclass
class CircularBufferSpec:
    """Scratch of one request."""

    block_size: int = 4
    prefix_cacheable: bool = False


@dataclass
class EncoderSpec:
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


def grouping(cache: Any) -> str:
    """The grouping of an engine with one pipeline stage."""
    return grouping_of(cache, [group.layer_names for group in cache.kv_cache_groups])


def hisparse(**facts: bool) -> Any:
    """A KVCacheConfig with a group that vLLM keeps elsewhere."""
    found = config(FullAttentionSpec(), FullAttentionSpec())
    vars(found.kv_cache_groups[1]).update(facts)
    return found


@pytest.mark.parametrize(
    "specs",
    [
        (FullAttentionSpec(),),
        (MLAAttentionSpec(),),
        (FullAttentionSpec(sliding_window=64),),
        (SlidingWindowSpec(),),
        (SlidingWindowSpec(), SlidingWindowSpec(), FullAttentionSpec()),
        (UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": MLAAttentionSpec()}),),
        (UniformTypeKVCacheSpecs({"a": SlidingWindowMLASpec()}), MLAAttentionSpec()),
        (ChunkedLocalAttentionSpec(), FullAttentionSpec()),
        (MambaSpec(), FullAttentionSpec()),
        (MambaSpec(mamba_cache_mode="all"),),
        (FullAttentionSpec(4), SlidingWindowSpec(9, 8), MambaSpec(12)),
        (SlidingWindowSpec(extra_retained_tokens=1), FullAttentionSpec()),
        (MLAAttentionSpec(), CircularBufferSpec()),
    ],
)
def test_kinds_that_are_served(specs: tuple[object, ...]) -> None:
    assert refusal_of_groups(config(*specs)) == ""


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (config(), "no KV cache"),
        (config(FullAttentionSpec(), EncoderSpec()), "a KV cache group is EncoderSpec; served are"),
        (
            config(UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": SlidingWindowSpec()})),
            "FullAttentionSpec, SlidingWindowSpec",
        ),
        (config(MambaSpec(mamba_cache_mode="none")), "mamba_cache_mode is 'none'"),
        (config(CircularBufferSpec()), "caches no KV cache group"),
        (config(FullAttentionSpec(4), CircularBufferSpec(6)), r"every 12 tokens.* at \[4\]"),
        (
            config(FullAttentionSpec(), SlidingWindowMLASpec(prefix_replay_tokens=9)),
            "bounded replay",
        ),
        (hisparse(host_resident=True), "HiSparse"),
        (hisparse(enable_kv_transfer=False), "HiSparse"),
    ],
)
def test_what_cannot_be_cached_has_a_reason(cache: Any, reason: str) -> None:
    import re

    assert re.search(reason, refusal_of_groups(cache))


@pytest.mark.parametrize(
    ("window", "blocks"), [(1, 1), (2, 1), (4, 1), (5, 1), (6, 2), (9, 2), (10, 3), (64, 16)]
)
def test_a_hit_needs_the_blocks_that_the_next_token_looks_at(window: int, blocks: int) -> None:
    """The token after a boundary looks at `window - 1` tokens before it; a block has four."""
    assert window_blocks(SlidingWindowSpec(window)) == blocks


def test_full_attention_with_a_window_keeps_all_blocks() -> None:
    assert window_blocks(FullAttentionSpec(sliding_window=64)) == 0
    assert not is_hybrid(config(FullAttentionSpec(sliding_window=64)))
    assert is_hybrid(config(SlidingWindowSpec()))
    assert is_hybrid(config(FullAttentionSpec(), FullAttentionSpec()))


def test_a_draft_model_of_several_layers_widens_a_window() -> None:
    """vLLM keeps a few tokens more, because it computes them again."""
    assert window_blocks(SlidingWindowSpec(9, 4, extra_retained_tokens=1)) == 3


def test_each_group_has_names_and_a_size_of_its_own() -> None:
    cache = config(
        FullAttentionSpec(),
        CircularBufferSpec(),
        SlidingWindowSpec(9, 2),
        ChunkedLocalAttentionSpec(),
        MambaSpec(12),
    )
    groups = groups_of(cache, NAMESPACE)
    full, window, chunked, state = groups
    assert full.hasher.namespace == NAMESPACE
    assert [group.hasher.namespace.group for group in groups] == [0, 2, 3, 4]
    assert [group.table for group in groups] == [0, 2, 3, 4]
    assert [group.block_tokens for group in groups] == [4, 2, 4, 12]
    assert (window.window_blocks, chunked.chunk_tokens, state.window_blocks) == (4, 8, 1)
    assert [group.handed_over for group in groups] == [False, False, False, True]
    assert full.hasher.chain([1, 2, 3, 4]) != chunked.hasher.chain([1, 2, 3, 4])
    assert runs_of(groups, 12, 24) == [
        GroupRun(4, 3, offset=12),
        GroupRun(2, 6, 4, offset=12),
        GroupRun(4, 3, 0, 8, 12),
        GroupRun(12, 1, 1, 0, 12),
    ]


def test_the_first_group_may_be_scratch() -> None:
    cache = config(CircularBufferSpec(), MambaSpec(8))
    [state] = groups_of(cache, replace(NAMESPACE, group=1, block_tokens=8))
    assert (state.table, first_group(cache)) == (1, (1, MambaSpec(8)))


def test_states_that_stay_in_their_table_are_a_window_of_one_block() -> None:
    [state] = groups_of(config(MambaSpec(mamba_cache_mode="all")), NAMESPACE)
    assert (state.window_blocks, state.handed_over) == (1, False)


def test_what_a_hit_needs_behind_what_the_device_has() -> None:
    """Blocks of four tokens; the device has eight."""
    [chunked] = groups_of(config(ChunkedLocalAttentionSpec(16)), NAMESPACE)
    [window] = groups_of(config(SlidingWindowSpec(9)), NAMESPACE)
    [full] = groups_of(config(FullAttentionSpec()), NAMESPACE)
    assert chunked.needed_indices(8, 28) == range(4, 7)
    assert chunked.needed_indices(8, 12) == range(2, 3)
    assert list(chunked.needed_indices(8, 16)) == []
    assert window.needed_indices(8, 28) == range(5, 7)
    assert window.needed_indices(8, 12) == range(2, 3)
    assert full.needed_indices(8, 28) == range(2, 7)


def test_engines_that_group_their_layers_otherwise_name_their_blocks_apart() -> None:
    assert grouping(config(FullAttentionSpec())) == ""
    one = grouping(config(FullAttentionSpec(), SlidingWindowSpec()))
    assert one == grouping(config(FullAttentionSpec(), SlidingWindowSpec()))
    others = {
        grouping(config(SlidingWindowSpec(), FullAttentionSpec())),
        grouping(config(FullAttentionSpec(), SlidingWindowSpec(17))),
        grouping(config(FullAttentionSpec(), SlidingWindowSpec(), SlidingWindowSpec())),
    }
    longer = config(FullAttentionSpec(), SlidingWindowSpec())
    longer.kv_cache_groups[1].layer_names.append("layer2")
    assert len(others | {one, grouping(longer)}) == 5


def kept(group: KvGroup, boundaries: set[int], step: int = 4) -> list[int]:
    """Of the first 20 blocks, which are the same piece by piece."""
    found = tails_in(range(20), group, boundaries, step)
    pieces = [tails_in(range(at, at + 2), group, boundaries, step) for at in range(0, 20, 2)]
    assert sorted(place for piece in pieces for place in piece) == found
    return found


def test_the_blocks_of_a_window_that_a_hit_may_need() -> None:
    """A window of two blocks: before token 20, and before every eighth block."""
    assert kept(KvGroup(Hasher(NAMESPACE), 2), {20}) == [3, 4, 6, 7, 14, 15]


def test_regular_boundaries_end_blocks_of_every_group() -> None:
    """Four windows are 32 tokens, and blocks of all groups end every 12."""
    assert kept(KvGroup(Hasher(NAMESPACE), 2), set(), 12) == [7, 8, 16, 17]


def test_the_blocks_of_a_chunk_that_a_hit_may_need() -> None:
    """A chunk has four blocks: a hit of 28 tokens needs three, and the end of a chunk none."""
    assert kept(KvGroup(Hasher(NAMESPACE), chunk_tokens=16), {28, 48}) == [4, 5, 6]


@dataclass
class OldSlidingWindowSpec:
    """A window of vLLM before draft models of several layers."""

    sliding_window: int = 9
    block_size: int = 4


OldSlidingWindowSpec.__name__ = "SlidingWindowSpec"


@pytest.mark.parametrize(
    ("spec", "window", "chunk"),
    [
        (OldSlidingWindowSpec(9), 2, 0),
        (OldSlidingWindowSpec(10), 3, 0),
        (SlidingWindowSpec(9, extra_retained_tokens=1), 3, 0),
        (UniformTypeKVCacheSpecs({"a": SlidingWindowSpec(), "b": SlidingWindowMLASpec()}), 2, 0),
        (UniformTypeKVCacheSpecs({"a": ChunkedLocalAttentionSpec()}), 0, 8),
        (UniformTypeKVCacheSpecs({"a": FullAttentionSpec()}), 0, 0),
    ],
)
def test_layers_of_several_specs_have_the_rule_of_the_first(
    spec: object, window: int, chunk: int
) -> None:
    assert (window_blocks(spec), chunk_tokens(spec)) == (window, chunk)


def test_a_model_is_hybrid_where_its_only_group_is_no_full_attention() -> None:
    both = UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": MLAAttentionSpec()})
    assert [is_hybrid(config(one)) for one in (both, SlidingWindowSpec())] == [False, True]


@pytest.mark.parametrize(
    "other",
    [
        MambaSpec(shapes=((3, 9),)),
        MambaSpec(dtypes=("float16",)),
        MambaSpec(page_size_padded=64),
        MambaSpec(block_size=8),
        SlidingWindowSpec(),
        ChunkedLocalAttentionSpec(attention_chunk_size=16),
    ],
)
def test_engines_with_other_states_share_nothing(other: object) -> None:
    """Goal: the same layers with states of another shape or type are other bytes."""
    named = grouping(config(FullAttentionSpec(), MambaSpec()))
    assert named != grouping(config(FullAttentionSpec(), other))
    assert named == grouping(config(FullAttentionSpec(), MambaSpec()))
    assert len(named) == len("/groups-") + 16
    chunked = config(FullAttentionSpec(), ChunkedLocalAttentionSpec())
    assert grouping(chunked) != grouping(config(FullAttentionSpec(), other))


def test_heads_are_those_of_the_groups_with_attention() -> None:
    """A group of two kinds of attention counts by its first layer, and states only where there is
    nothing else."""
    full, state, window = FullAttentionSpec(), MambaSpec(), SlidingWindowSpec()
    both = UniformTypeKVCacheSpecs({"a": window, "b": SlidingWindowMLASpec()})
    assert attention_specs(config(full, state, both)) == [full, window]
    assert attention_specs(config(state, MambaSpec(block_size=8))) == [state]


def groups_with(*specs: object) -> tuple[KvGroup, ...]:
    """The groups of an engine."""
    return groups_of(config(*specs), NAMESPACE)


@pytest.mark.parametrize(
    ("specs", "most"),
    [
        ((FullAttentionSpec(),), 8),
        ((FullAttentionSpec(), SlidingWindowSpec(21)), 4),
        ((FullAttentionSpec(), SlidingWindowSpec(21, block_size=8)), 4),
        ((FullAttentionSpec(), MambaSpec()), 1),
        ((FullAttentionSpec(), MambaSpec(), SlidingWindowSpec(5)), 0),
        ((FullAttentionSpec(), ChunkedLocalAttentionSpec()), 0),
    ],
)
def test_blocks_are_decoded_together_as_long_as_a_table_keeps_them(
    specs: tuple[object, ...], most: int
) -> None:
    """Of eight blocks of four tokens: a window of five blocks keeps four after the newest one, one
    of three blocks of eight tokens as many; a state is offered at each boundary; a chunk's blocks
    may leave with the step that fills them."""
    assert decoded_together(groups_with(*specs), 4, 8) == most


def test_what_is_decoded_one_by_one_stays_so() -> None:
    assert decoded_together(groups_with(FullAttentionSpec(), MambaSpec()), 4, 1) == 1
