"""How the ranks of a vLLM engine cut its blocks, and which parts each of them holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_common.tier.parts import Grid, Share
from kvbm_connectors.vllm.shape import Shape, rank_here, shape_of
from kvbm_connectors.vllm.stages import UncutShape

from tests.connectors.vllm.pipeline import divided

LAYERS, HEADS, PAGE = 4, 4, 1024
"""Of a model; bytes that one head has of a layer's block."""


@dataclass
class FullAttentionSpec:
    """vllm.v1.kv_cache_interface, by the names of its classes."""

    num_kv_heads: int
    page_size_bytes: int
    block_size: int = 16


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 64


@dataclass
class MambaSpec:
    page_size_bytes: int = PAGE
    block_size: int = 16


def spec_of(ranks: int, heads: int = HEADS) -> FullAttentionSpec:
    """The spec of a layer on one of so many ranks."""
    here = max(1, heads // ranks)
    return FullAttentionSpec(here, here * PAGE)


def cache_of(
    *specs: Any, layers: int = LAYERS, layout: str = "LBHNC", first: int = 0, replicas: int = 1
) -> Any:
    """A KVCacheConfig with a group for each spec, and a tensor for each group."""
    names = [f"model.layers.{number}.self_attn.attn" for number in range(first, first + layers)]
    groups = [SimpleNamespace(layer_names=names, kv_cache_spec=spec) for spec in specs]
    tensors = [SimpleNamespace(layers=names, layer_stride=PAGE) for _ in groups]
    return SimpleNamespace(
        kv_cache_groups=groups, kv_cache_tensors=tensors, kv_cache_layout=layout,
        kv_tp_replicas=replicas,
    )  # fmt: skip


def config_of(
    ranks: int = 1,
    stages: int = 1,
    *,
    heads: int = HEADS,
    stage: int = 0,
    types: Sequence[str] = (),
) -> Any:
    """A VllmConfig."""
    each = LAYERS // stages
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: heads,
        get_total_num_hidden_layers=lambda: LAYERS,
        get_layers_start_end_indices=lambda _: (stage * each, (stage + 1) * each),
        hf_text_config=SimpleNamespace(layer_types=types),
    )
    parallel = SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=stages)
    return SimpleNamespace(
        model_config=model, parallel_config=parallel,
        cache_config=SimpleNamespace(kv_cache_layout=None),
    )  # fmt: skip


def parts(shape: Shape) -> list[tuple[int, ...]]:
    """The parts of each rank."""
    return [share.parts for share in shape.shares]


@pytest.fixture
def pipeline() -> Iterator[list[tuple[int, int]]]:
    """vLLM's own division of layers, which the test may change."""
    borders = [(0, 2), (2, 4)]
    with divided(borders):
        yield borders


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_tensor_parallel_ranks_hold_heads(ranks: int) -> None:
    """Goal: one name and one grid for every number of ranks; with more ranks than heads some are
    replicas."""
    shape = shape_of(config_of(ranks), cache_of(spec_of(ranks)), drafts=False)
    assert shape.grid == Grid(ranges=4, layers=1, heads=4)
    assert shape.name == "4x1x4"
    assert shape.distinct_ranks == 1
    assert shape.is_cut_by_heads
    once = [share for share in shape.shares if share.replica == 0]
    assert sorted(part for share in once for part in share.parts) == list(range(16))
    assert len(once) == min(ranks, HEADS)
    assert shape.share_bytes(0) * len(once) == LAYERS * HEADS * PAGE


@pytest.mark.parametrize("replicas", [0, 2])
def test_latent_attention_is_the_same_on_all_ranks(replicas: int) -> None:
    """Goal: stored once. 0: a vLLM that does not say `kv_tp_replicas`."""
    cache = cache_of(MLAAttentionSpec(1, PAGE), replicas=replicas)
    shape = shape_of(config_of(2, heads=16), cache, drafts=False)
    alone = shape_of(config_of(1), cache_of(MLAAttentionSpec(1, PAGE)), drafts=False)
    assert shape.grid == alone.grid == Grid(ranges=4, layers=1, heads=1)
    assert [share.replica for share in shape.shares] == [0, 1]
    assert parts(shape) == [(0, 1, 2, 3), (0, 1, 2, 3)]
    assert not shape.is_cut_by_heads


def test_latent_attention_whose_ranks_differ_is_cut_by_ranks() -> None:
    """Goal: where vLLM says that ranks hold other bytes, nothing is taken for a replica."""
    cache = cache_of(MLAAttentionSpec(1, PAGE), replicas=1)
    shape = shape_of(config_of(2), cache, drafts=False)
    assert shape.distinct_ranks == 2
    assert [share.replica for share in shape.shares] == [0, 0]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_heads_inside_of_tokens_are_cut_by_ranks(ranks: int) -> None:
    """Goal: a head's bytes are scattered; only shapes with as many distinct ranks share names."""
    cache = cache_of(spec_of(ranks), layout="LBNHC")
    shape = shape_of(config_of(ranks), cache, drafts=False)
    assert shape.distinct_ranks == shape.grid.heads == min(ranks, HEADS)
    assert not shape.is_cut_by_heads
    assert [share.replica for share in shape.shares] == [n % max(1, ranks // 4) for n in
                                                         range(ranks)]  # fmt: skip


def test_pipeline_stages_hold_layers(pipeline: Sequence[tuple[int, int]]) -> None:
    """Goal: both stages and the scheduler say the same, in names that one rank has too."""
    shapes = [
        shape_of(
            config_of(2, 2, stage=stage), cache_of(spec_of(2), layers=2, first=first), drafts=False
        )
        for stage, (first, _) in enumerate(pipeline)
    ]
    assert shapes[0] == shapes[1]
    alone = shape_of(config_of(), cache_of(spec_of(1)), drafts=False)
    assert (shapes[0].name, shapes[0].layers) == (alone.name, alone.layers)
    assert shapes[0].shares == tuple(
        Share(alone.grid, stage * 2, stage * 2 + 2, rank * 2, rank * 2 + 2)
        for stage in range(2)
        for rank in range(2)
    )
    assert rank_here() == 3


def alternating(stage: int, ranks: int, *specs: Any) -> Any:
    """A KVCacheConfig of one of two stages whose layers are in the groups in turn."""
    cache = cache_of(*specs)
    for number, group in enumerate(cache.kv_cache_groups):
        group.layer_names = group.layer_names[number + 2 * stage : 2 + 2 * stage : len(specs)]
    return cache


def test_stages_of_several_groups_hold_rows(pipeline: Sequence[tuple[int, int]]) -> None:
    """Goal: windows beside full attention are cut as in one stage, where each group's layers are
    half and half."""
    shapes = [
        shape_of(
            config_of(2, 2, stage=stage, types=["window", "full"] * 2),
            alternating(stage, 2, SlidingWindowSpec(2, 2 * PAGE), spec_of(2)),
            drafts=False,
        )
        for stage in range(len(pipeline))
    ]
    assert shapes[0] == shapes[1]
    windows = SlidingWindowSpec(HEADS, HEADS * PAGE)
    alone = shape_of(config_of(), cache_of(windows, spec_of(1), layers=2), drafts=False)
    assert (shapes[0].name, shapes[0].layers) == (alone.name, alone.layers) == ("2x1x4", 2)
    assert parts(shapes[0]) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert shapes[0].share_bytes(0) * 4 == alone.share_bytes(0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stages_with_states_are_a_part_each(pipeline: list[tuple[int, int]], ranks: int) -> None:
    """Goal: what is no row of tokens is stored and loaded in stages, too."""
    types = ["mamba", "attention"] * 2
    shapes = [
        shape_of(
            config_of(ranks, 2, stage=stage, types=types),
            alternating(stage, ranks, MambaSpec(ranks * PAGE), spec_of(ranks)),
            drafts=False,
        )
        for stage in range(2)
    ]
    assert shapes[0] == shapes[1]
    assert parts(shapes[0]) == [(rank,) for rank in range(2 * ranks)]
    assert (shapes[0].name, shapes[0].distinct_ranks) == (f"2x1x{ranks}", ranks)
    pipeline[:] = [(0, 3), (3, 5)]
    cache = cache_of(MambaSpec(), spec_of(1), layers=3)
    cache.kv_cache_groups[0].layer_names = cache.kv_cache_groups[0].layer_names[::2]
    cache.kv_cache_groups[1].layer_names = cache.kv_cache_groups[1].layer_names[1:2]
    config = config_of(1, 2, types=[*types, "mamba"])
    config.model_config.get_total_num_hidden_layers = lambda: 5
    config.model_config.get_layers_start_end_indices = lambda _: (0, 3)
    with pytest.raises(UncutShape, match="not alike: they end after 2"):
        shape_of(config, cache, drafts=False)


def test_stages_that_cannot_be_cut_pass_through(pipeline: list[tuple[int, int]]) -> None:
    """Goal: a type and a reason, not a wrong block."""
    config, cache = config_of(1, 2), cache_of(spec_of(1), layers=2)
    with pytest.raises(UncutShape, match="one type have different KV layers"):
        shape_of(config, cache_of(spec_of(1), layers=1), drafts=False)
    with pytest.raises(UncutShape, match="draft model"):
        shape_of(config, cache, drafts=True)


@pytest.mark.parametrize(
    "specs", [(spec_of(2), FullAttentionSpec(2, 512)), (spec_of(2), MambaSpec(2 * PAGE))]
)
def test_layers_of_several_kinds_are_a_part_for_each_rank(specs: Sequence[Any]) -> None:
    """Goal: rows of other sizes, and states, are not cut; shapes do not share."""
    shape = shape_of(config_of(2), cache_of(*specs), drafts=False)
    assert shape.grid == Grid(heads=2)
    assert parts(shape) == [(0,), (1,)]
    assert shape.distinct_ranks == 2
    assert shape.share_bytes(0) == 0


def test_heads_that_are_not_alike_on_ranks_are_not_cut() -> None:
    """Goal: draft models, packed pages and heads that ranks cannot share evenly go by ranks."""
    cache = cache_of(spec_of(2))
    assert shape_of(config_of(2), cache, drafts=True).distinct_ranks == 2
    assert shape_of(config_of(2, heads=3), cache, drafts=False).distinct_ranks == 2
    packed = cache_of(spec_of(2))
    mode = SimpleNamespace(is_per_token_head=True)
    packed.kv_cache_groups[0].kv_cache_spec.__dict__["kv_quant_mode"] = mode
    assert shape_of(config_of(2), packed, drafts=False).distinct_ranks == 2
