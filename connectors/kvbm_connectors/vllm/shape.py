"""Shape: how the ranks of a vLLM engine cut its blocks, and which parts each of them holds.

Tensor-parallel ranks hold KV heads: so many each, or, with fewer heads than ranks, the same head on
several. Latent attention is the same on all of them. Pipeline stages hold layers (`stages.py`).

Where a head's bytes of a block lie together (heads outside of tokens, or one head), blocks are cut
by KV heads: engines of every shape share them. Elsewhere they are cut by what ranks hold, so that
only shapes with as many distinct ranks share; `Namespace.tensor_parallel` is their number. So it is
with stages that do not end where parts do: those with layers alike have a part each.

vLLM says in `kv_tp_replicas` how many ranks hold the same, for latent attention alone (0.32): for
fewer heads than ranks it says 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbm_common.tier.parts import PARTS_MAX, Grid, Share, grid_for, share_of

from kvbm_connectors.vllm.kv_groups import RECURRENT, layer_spec
from kvbm_connectors.vllm.stages import Stage, UncutShape, rows_of, stages_of
from kvbm_connectors.vllm.versions import tp_replicas

LATENT = "MLAAttentionSpec"
HEADS_OUTSIDE = frozenset({"LBHNC", "LHBNC", "BLHNC", "BHLNC"})
"""Layouts that keep what a head has of a block in one run, or in one for each kernel block."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The way in which blocks are cut, and the share of each rank."""

    grid: Grid
    shares: tuple[Share, ...]
    """Rank → its share: the ranks of the first pipeline stage, then those of the next one."""
    heads: int
    """KV heads of a rank, by which its bytes are ordered, so that engines of other shapes read
    them; 0: they have another order."""
    distinct_ranks: int
    """Tensor-parallel ranks with distinct bytes, where blocks are not cut by heads; else 1."""
    layers: int
    """Rows of a block: layers of all stages, or of the largest KV group."""
    row_bytes: int = 0
    """Bytes of a row that a rank has; 0: rows differ."""

    @property
    def name(self) -> str:
        """The grid's name in a namespace."""
        return f"{self.grid.ranges}x{self.grid.layers}x{self.grid.heads}"

    @property
    def is_cut_by_heads(self) -> bool:
        """Tell whether the order of a rank's heads matters."""
        return self.heads > 0 and self.grid.heads > 1

    def share_bytes(self, rank: int) -> int:
        """Return what a rank has of a block; 0: that cannot be told."""
        share = self.shares[rank]
        return (share.end_range - share.first_range) * self.grid.layers * self.row_bytes


@dataclass(frozen=True, slots=True)
class _Heads:
    """The KV heads of all ranks, or what stands for them."""

    count: int
    per_rank: int
    replicas: int
    """Consecutive ranks that hold the same."""

    def of_rank(self, rank: int) -> tuple[int, int]:
        """Return the first head of a tensor-parallel rank, and the one after its last."""
        first = rank // self.replicas * self.per_rank
        return first, first + self.per_rank


def shape_of(config: Any, kv_cache_config: Any, *, drafts: bool) -> Shape:
    """Return the shape of an engine, the same in all its processes. Raises UncutShape.

    `drafts` says whether a draft model has KV of its own beside that of the model.
    """
    if drafts and int(config.parallel_config.pipeline_parallel_size) > 1:
        raise UncutShape("pipeline parallelism beside a draft model is not supported")
    stages = stages_of(config, kv_cache_config)
    rows = rows_of(stages)
    ranks = int(config.parallel_config.tensor_parallel_size)
    said = tp_replicas(kv_cache_config)
    specs = [layer_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    if not _has_even_layers(kv_cache_config, specs) or _has_states(specs):
        return _by_rank(stages, _distinct(ranks, said), ranks)
    by_head = _by_head(config, specs, said, drafts=drafts, ranks=ranks)
    distinct = _distinct(ranks, said if by_head is None else by_head.replicas)
    if by_head is not None and _has_heads_outside(config, kv_cache_config, by_head):
        shape = _cut(rows, by_head, ranks, by_head=True)
        if shape is not None:
            return replace(shape, row_bytes=_page_bytes(specs[0]))
    shape = _cut(rows, distinct, ranks, by_head=False)
    if shape is not None:
        return replace(shape, row_bytes=_page_bytes(specs[0]))
    return _by_rank(stages, distinct, ranks)


def rank_here() -> int:
    """Return the number of this rank: stage by stage, and in each by tensor-parallel rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    stage, ranks = get_pp_group(), get_tp_group()
    return int(stage.rank_in_group * ranks.world_size + ranks.rank_in_group)


def _cut(
    rows: Sequence[tuple[int, int]], heads: _Heads, ranks: int, *, by_head: bool
) -> Shape | None:
    """Return the shape whose grid has the stages' rows and these heads; None: ranks do not hold
    whole parts of it."""
    grid = grid_for(rows[-1][1], heads.count)
    if grid is None:
        return None
    shares = [
        share_of(grid, layers=layers, heads=heads.of_rank(rank), head_count=heads.count,
                 replica=rank % heads.replicas)
        for layers in rows
        for rank in range(ranks)
    ]  # fmt: skip
    known = tuple(share for share in shares if share is not None)
    if len(known) < len(shares):
        return None
    if by_head:
        return Shape(grid, known, heads.per_rank, 1, rows[-1][1])
    return Shape(grid, known, 0, heads.count, rows[-1][1])


def _by_rank(stages: Sequence[Stage], distinct: _Heads, ranks: int) -> Shape:
    """Return the shape of blocks that are one part for each distinct rank of each stage."""
    count = len(stages)
    if not all(stage.has_layers_like(stages[0]) for stage in stages):
        raise UncutShape(_text_of_stages(rows_of(stages), distinct.count))
    if count * distinct.count > PARTS_MAX:
        raise UncutShape(
            f"{count * distinct.count} distinct ranks, and a block has {PARTS_MAX} parts"
        )
    grid = Grid(ranges=count, heads=distinct.count)
    shares = tuple(
        Share(grid, stage, stage + 1, *distinct.of_rank(rank), rank % distinct.replicas)
        for stage in range(count)
        for rank in range(ranks)
    )
    return Shape(grid, shares, 0, distinct.count, rows_of(stages)[-1][1])


def _text_of_stages(rows: Sequence[tuple[int, int]], heads: int) -> str:
    count = rows[-1][1]
    grid = grid_for(count, heads)
    cut = "cannot be cut" if grid is None else f"are cut into ranges of {count // grid.ranges}"
    ends = ", ".join(str(end) for _, end in rows[:-1])
    return f"pipeline stages are not alike: they end after {ends} layers, and {count} layers {cut}"


# --- layers ---------------------------------------------------------------------------------


def _has_even_layers(kv_cache_config: Any, specs: Sequence[Any]) -> bool:
    """Return whether all layers have equally many bytes of a block.

    vLLM places the layers of a group with one spec as one tensor. What the specs are, its scheduler
    does not know of groups with several.
    """
    tensors = getattr(kv_cache_config, "kv_cache_tensors", ())
    groups = [group for group in kv_cache_config.kv_cache_groups if group.layer_names]
    return len(tensors) == len(groups) and len({_page_bytes(spec) for spec in specs}) == 1


def _has_states(specs: Sequence[Any]) -> bool:
    """Return whether layers have recurrent states, which are no rows of tokens."""
    return any(type(spec).__name__ in RECURRENT for spec in specs)


def _page_bytes(spec: Any) -> int:
    """Return the bytes that a layer has of a block on one rank, without padding."""
    return int(getattr(spec, "unpadded_page_size_bytes", None) or spec.page_size_bytes)


# --- heads ----------------------------------------------------------------------------------


def _distinct(ranks: int, replicas: int) -> _Heads:
    """Return ranks in the place of heads, which are unknown: `replicas` of them hold the same."""
    return _Heads(ranks // max(1, replicas), 1, max(1, replicas))


def _by_head(
    config: Any, specs: Sequence[Any], said: int, *, drafts: bool, ranks: int
) -> _Heads | None:
    """Return the KV heads of the ranks; None: they are not what ranks hold of every layer.

    `said` is how many ranks hold the same, as vLLM says; 0: it does not.
    """
    if all(type(spec).__name__ == LATENT for spec in specs):
        return _Heads(1, 1, ranks) if said in (0, ranks) else None
    count = int(config.model_config.get_total_num_kv_heads())
    if drafts or (count % ranks and ranks % count):
        return None
    heads = _Heads(count, max(1, count // ranks), max(1, ranks // count))
    is_known = said in (0, 1, heads.replicas)
    alike = all(_heads_of(spec) == heads.per_rank for spec in specs)
    return heads if is_known and alike else None


def _heads_of(spec: Any) -> int:
    """Return how many KV heads a rank has of a layer; 0 where a page is packed in another way."""
    quantised = getattr(spec, "kv_quant_mode", None)
    if getattr(quantised, "is_per_token_head", False):
        return 0
    heads = int(getattr(spec, "num_kv_heads", 0))
    return heads if int(getattr(spec, "num_heads", heads)) == heads else 0


def _has_heads_outside(config: Any, kv_cache_config: Any, heads: _Heads) -> bool:
    """Return whether what a head has of a block lies together on the device."""
    layout = kv_cache_config.kv_cache_layout or config.cache_config.kv_cache_layout
    return heads.count == 1 or str(layout) in HEADS_OUTSIDE
