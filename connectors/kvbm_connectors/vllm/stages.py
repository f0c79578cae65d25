"""Stages of a pipeline: the layers that each has of every KV group, found alike in all processes.

vLLM deals the layers of one spec out to as many groups as it needs, over the whole model. Then it
tells each process the layers of its own stage, and the scheduler those of the first one. The rest
follows from these: layers of one type have the same KV layers, of the same bytes. The model's
configuration has the types. Without them all layers are of one, and so they are where the layers of
this stage are alike and all in one group.

    layers    0 window   1 window   2 full  |  3 window   4 window   5 full
    groups    a          b          c       |  a          b          c
    rows      0          0          0       |  1          1          1

A block has a row for each layer of its group. All groups of a stage lie over each other, so a stage
has as many rows as its largest group there, and other groups leave some empty.

All processes refuse alike where a stage has no layer of some type: it cannot tell the others'. One
refuses alone that finds other layers on its stage than vLLM has told it, or has one group whose
layers are not alike there. A worker that refuses alone tells the scheduler so.

The stages are part of the namespace: processes that find different ones never share a block. The
host tier compares the bytes of parts, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvbm_common.errors import KvbmError

from kvbm_connectors.vllm.kv_groups import layer_spec

EMPTY = ""
"""The name in a row that a group leaves empty."""
Pattern = tuple[int, str, int]
"""The first group with a layer's spec, the layer's name without its number, and what stands for its
bytes."""


class UncutShape(KvbmError):
    """An engine whose blocks cannot be cut into parts that its ranks hold."""

    code = "uncut_shape"


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one pipeline stage."""

    groups: tuple[tuple[str, ...], ...]
    """Names of the KV layers in each group."""
    types: tuple[str, ...] = ()
    """The type of each layer of the model."""

    @property
    def rows(self) -> int:
        """The rows that the stage has of a block."""
        return max(map(len, self.groups))

    def has_layers_like(self, other: Stage) -> bool:
        """Tell whether another stage has as many layers of each type, and of each group: then it
        has as many bytes of a block."""
        counts, others = ([len(names) for names in one.groups] for one in (self, other))
        return counts == others and Counter(self.types) == Counter(other.types)


def stages_of(config: Any, kv_cache_config: Any) -> tuple[Stage, ...]:
    """Return the stages of an engine. Raises UncutShape."""
    groups = kv_cache_config.kv_cache_groups
    told = tuple(tuple(group.layer_names) for group in groups)
    count = int(config.parallel_config.pipeline_parallel_size)
    if count == 1:
        return (Stage(told),)
    from vllm.distributed.utils import get_pp_indices

    model = config.model_config
    layers = int(model.get_total_num_hidden_layers())
    types = _types(model, layers)
    borders = [get_pp_indices(layers, stage, count) for stage in range(count)]
    first, end = here = tuple(model.get_layers_start_end_indices(config.parallel_config))
    specs = [layer_spec(group.kv_cache_spec) for group in groups]
    firsts = [specs.index(spec) for spec in specs]
    found = _kv_layers(firsts, told, _strides(kv_cache_config), range(first, end))
    if len(groups) == 1 and told[0] and len({*found.values()}) == 1:
        types = ("",) * layers
    if any(set(types[slice(*border)]) != set(types) for border in borders):
        raise UncutShape("pipeline parallelism: a stage has no layer of some type")
    patterns = _patterns(found, types)
    dealt = _dealt(firsts, [patterns[one] for one in types])
    stages = tuple(
        Stage(tuple(_between(group, *border) for group in dealt), types[slice(*border)])
        for border in borders
    )
    if here not in borders or stages[borders.index(here)].groups != told:
        raise UncutShape("pipeline parallelism: the KV layers of other stages cannot be told")
    return stages


def rows_of(stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """Return the rows of each stage: the first one, and the one after its last."""
    ends = list(accumulate(stage.rows for stage in stages))
    return list(zip([0, *ends], ends, strict=False))


def names_by_row(stages: Sequence[Stage]) -> list[list[str]]:
    """Return for each group the name of the KV layer in each row, up to its last one."""
    groups: list[list[str]] = [[] for _ in stages[0].groups]
    for (first, _), stage in zip(rows_of(stages), stages, strict=True):
        for rows, names in zip(groups, stage.groups, strict=True):
            if names:
                rows += [EMPTY] * (first - len(rows))
                rows += names
    return groups


def _types(model: Any, layers: int) -> tuple[str, ...]:
    """Return the type of each layer, as far as the model's configuration says it."""
    text = getattr(model, "hf_text_config", None)
    for field in ("layer_types", "layers_block_type"):
        types = getattr(text, field, None) or ()
        if len(types) >= layers:
            return tuple(map(str, types[:layers]))
    return ("",) * layers


def _strides(kv_cache_config: Any) -> dict[str, int]:
    """Return the bytes from one KV layer to the next in the tensor that has it, which differ for
    layers of other sizes. vLLM's scheduler knows no spec but that of a group's first layer."""
    tensors = getattr(kv_cache_config, "kv_cache_tensors", ())
    return {name: int(one.layer_stride) for one in tensors for name in one.layers}


def _kv_layers(
    firsts: Sequence[int], told: Sequence[Sequence[str]], strides: Mapping[str, int], here: range
) -> dict[int, tuple[Pattern, ...]]:
    """Return which KV layers each layer of this stage has."""
    found: dict[int, list[Pattern]] = {layer: [] for layer in here}
    for first, names in zip(firsts, told, strict=True):
        for name in names:
            words = name.split(".")
            numbers = [int(word) for word in words if word.isdigit()]
            if len(numbers) != 1 or numbers[0] not in found:
                raise UncutShape(f"pipeline parallelism: {name} is no layer of this stage")
            plain = ".".join("*" if word.isdigit() else word for word in words)
            found[numbers[0]].append((first, plain, strides.get(name, 0)))
    return {layer: tuple(one) for layer, one in found.items()}


def _patterns(
    found: Mapping[int, tuple[Pattern, ...]], types: Sequence[str]
) -> dict[str, tuple[Pattern, ...]]:
    """Return which KV layers a layer of each type has, by those of this stage."""
    patterns: dict[str, tuple[Pattern, ...]] = {}
    for layer, one in found.items():
        if sorted(patterns.setdefault(types[layer], one)) != sorted(one):
            raise UncutShape("pipeline parallelism: layers of one type have different KV layers")
    return patterns


def _dealt(
    firsts: Sequence[int], patterns: Sequence[Sequence[Pattern]]
) -> list[list[tuple[int, str]]]:
    """Return the layers of each group over the whole model, as vLLM deals them out."""
    by_spec: dict[int, list[tuple[int, str]]] = {first: [] for first in firsts}
    for layer, pattern in enumerate(patterns):
        for first, plain, _ in pattern:
            by_spec[first].append((layer, plain.replace("*", str(layer))))
    counts = Counter(firsts)
    return [
        by_spec[first][firsts[:at].count(first) :: counts[first]] for at, first in enumerate(firsts)
    ]


def _between(group: Sequence[tuple[int, str]], first: int, end: int) -> tuple[str, ...]:
    return tuple(name for layer, name in group if first <= layer < end)
