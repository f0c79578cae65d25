"""Stages of a pipeline, as each process of an engine finds them.

The reference deals layers out to groups over the whole model, as vLLM's
`_get_kv_cache_groups_uniform_page_size` does, and cuts each group at the stages' borders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_connectors.vllm.kv_groups import grouping_of
from kvbm_connectors.vllm.stages import Stage, UncutShape, names_by_row, rows_of, stages_of

from tests.connectors.vllm.pipeline import divided

KV_LAYERS: Mapping[str, Sequence[tuple[str, str]]] = {
    "window": [("self_attn.attn", "window")],
    "full": [("self_attn.attn", "full")],
    "both": [("mamba", "state"), ("self_attn.attn", "full")],
    "none": [],
}
"""Type of a layer → the names of its KV layers, and the spec of each."""
NO_KV = {"none"}


@dataclass(frozen=True)
class Model:
    """A model's layers, their groups (spec, numbers and names), and where stages end."""

    types: Sequence[str]
    groups: Sequence[tuple[str, Sequence[tuple[int, str]]]]
    borders: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, types: Sequence[str], ends: Sequence[int], counts: Mapping[str, int]) -> Model:
        """Deal layers out to so many groups of each spec."""
        specs: dict[str, list[tuple[int, str]]] = {}
        for layer, kind in enumerate(types):
            for name, spec in KV_LAYERS[kind]:
                specs.setdefault(spec, []).append((layer, f"model.layers.{layer}.{name}"))
        groups = [
            (spec, layers[at :: counts.get(spec, 1)])
            for spec, layers in specs.items()
            for at in range(counts.get(spec, 1))
        ]
        return cls(types, groups, list(pairwise([0, *ends])))

    def told(self, stage: int) -> tuple[tuple[str, ...], ...]:
        """The names of a stage's layers in each group."""
        first, end = self.borders[stage]
        return tuple(
            tuple(name for layer, name in layers if first <= layer < end)
            for _, layers in self.groups
        )

    def found(
        self, stage: int, *, told: Any = None, packed: bool = False, large: Sequence[str] = ()
    ) -> tuple[Stage, ...]:
        """The stages as a process of that one finds them.

        `packed`: groups have the specs of all their layers, as a worker's may. `large` layers have
        more bytes than others.
        """
        groups = [
            SimpleNamespace(layer_names=list(names), kv_cache_spec=spec)
            for (spec, _), names in zip(self.groups, told or self.told(stage), strict=True)
        ]
        tensors = [
            SimpleNamespace(layers=[name], layer_stride=64 if name in large else 32)
            for group in groups
            for name in group.layer_names
        ]
        for (spec, layers), group in zip(self.groups, groups, strict=True):
            if packed:
                names = group.layer_names or [name for _, name in layers]
                group.kv_cache_spec = SimpleNamespace(kv_cache_specs=dict.fromkeys(names, spec))
        model = SimpleNamespace(
            get_total_num_hidden_layers=lambda: len(self.types),
            get_layers_start_end_indices=lambda _: self.borders[stage],
            hf_text_config=SimpleNamespace(layer_types=self.types),
        )
        parallel = SimpleNamespace(pipeline_parallel_size=len(self.borders))
        config = SimpleNamespace(model_config=model, parallel_config=parallel)
        with divided(self.borders):
            cache = SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=tensors)
            return stages_of(config, cache)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """A model in which each stage has layers of all types."""
    kinds = draw(st.sets(st.sampled_from([*KV_LAYERS]), min_size=1).filter(lambda one: one - NO_KV))
    stage = st.lists(st.sampled_from(sorted(kinds)), max_size=6).map(
        lambda one: [*sorted(kinds), *one]
    )
    stages = draw(st.lists(stage.flatmap(st.permutations), min_size=2, max_size=4))
    counts = draw(st.fixed_dictionaries(dict.fromkeys(("window", "state"), st.integers(1, 2))))
    ends = list(accumulate(map(len, stages)))
    return Model.of([kind for one in stages for kind in one], ends, counts)


@given(models())
def test_each_process_finds_the_stages_of_all(model: Model) -> None:
    """Goal: the scheduler and the ranks of every stage agree on rows and names, also where ranks
    know the specs of all layers, and the scheduler one of each group."""
    reference = [model.told(stage) for stage in range(len(model.borders))]
    for stage in range(len(model.borders)):
        assert [one.groups for one in model.found(stage)] == reference
        assert model.found(stage, packed=True) == model.found(stage)
    stages = model.found(0)
    for group, rows in enumerate(names_by_row(stages)):
        for (first, end), one in zip(rows_of(stages), reference, strict=True):
            assert [name for name in rows[first:end] if name] == list(one[group])
            assert end - first == max(map(len, one))


def test_rows_without_gaps_are_those_of_one_stage() -> None:
    """Goal: such engines share blocks; where a group leaves a row empty, names differ."""
    halves = Model.of(["window", "full"] * 4, [4, 8], {})
    assert names_by_row(halves.found(0)) == [
        [name for _, name in layers] for _, layers in halves.groups
    ]
    gap = Model.of(["window", "full", "window", "full", "window"], [2, 5], {}).found(1)
    assert names_by_row(gap) == [
        [f"model.layers.{layer}.self_attn.attn" for layer in (0, 2, 4)],
        [f"model.layers.{layer}.self_attn.attn" for layer in (1, 3)],
    ]
    more = Model.of(["full", "window", "window", "full", "window"], [3, 5], {}).found(0)
    assert names_by_row(more)[0] == [
        "model.layers.0.self_attn.attn", "", "model.layers.3.self_attn.attn"
    ]  # fmt: skip


@dataclass
class SlidingWindowSpec:
    """vllm.v1.kv_cache_interface, by the name of its class."""

    block_size: int = 4
    sliding_window: int = 9


def test_windows_in_every_layer_have_one_name_on_all_stages() -> None:
    """Goal: the host tier takes the ranks of all stages for one engine; one without stages shares
    its blocks."""
    halves, alone = (Model.of(["window"] * 4, ends, {}) for ends in ([2, 4], [4]))
    found = set()
    for model, stage in ((halves, 0), (halves, 1), (alone, 0)):
        [names] = model.told(stage)
        group = SimpleNamespace(kv_cache_spec=SlidingWindowSpec(), layer_names=list(names))
        cache = SimpleNamespace(kv_cache_groups=[group])
        found.add(grouping_of(cache, names_by_row(model.found(stage))))
    [grouping] = found
    assert grouping.startswith("/groups-")


def test_layers_alike_in_one_group_need_no_types() -> None:
    """Goal: where all layers have one kind of KV, stages may have types that others have not."""
    names = [(layer, f"model.layers.{layer}.self_attn.attn") for layer in range(4)]
    model = Model(["window"] * 2 + ["full"] * 2, [("full", names)], [(0, 2), (2, 4)])
    for stage in range(2):
        assert [one.groups for one in model.found(stage)] == [model.told(0), model.told(1)]
    assert model.found(0) == model.found(1)
    gap = Model([*model.types[:3], "none"], [("full", names[:3])], model.borders)
    with pytest.raises(UncutShape, match="no layer of some type"):
        gap.found(1)


def test_what_cannot_be_told_is_refused() -> None:
    """Goal: no stage is guessed.

    1. A type that a stage does not have, in all processes alike. 2. Layers in other groups than
    they are dealt to. 3. A layer of another stage, and one without a number. 4. One type with
    several sets of KV layers, or KV layers of several sizes.
    """
    lacking = Model.of(["window", "full", "window", "window"], [2, 4], {})
    for stage in range(2):
        with pytest.raises(UncutShape, match="no layer of some type"):
            lacking.found(stage)
    model = Model.of(["window", "full"] * 4, [4, 8], {"window": 2})
    first, second, full = model.told(0)
    with pytest.raises(UncutShape, match="cannot be told"):
        model.found(0, told=(second, first, full))
    for name in ("model.layers.7.self_attn.attn", "draft.attn"):
        with pytest.raises(UncutShape, match="no layer of this stage"):
            model.found(0, told=((name,), second, full))
    with pytest.raises(UncutShape, match="different KV layers"):
        model.found(0, told=((), second, full))
    for large in (first[:1], full[:1]):
        with pytest.raises(UncutShape, match="different KV layers"):
            model.found(0, large=large)
    assert model.found(0, large=full) == model.found(0)
