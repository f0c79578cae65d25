"""Pipeline stages of drawn models, as vLLM's own KV cache configurations tell them to processes.

`python -m tests.vllm.stages_process SEEDS` writes a JSON object: how many engines all processes
agree on, how many engines share names, the seeds where something is wrong, and what a worker
reports that refuses alone. No model runs.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

ENGINES = 4
"""Ways in which each model is cut into stages."""
MEMORY = 1 << 28
PAGE = 8192
"""Bytes of a full layer's block, to which states are padded."""
MIXES = (
    "f", "w", "fw", "fw", "fwv", "sf", "sf", "b", "bs", "fwn", "sfn", "fi", "i", "iw",
)  # fmt: skip
"""Types of layers of a model: full attention, two windows, states, both in one layer, none, and
full attention with an indexer."""
KvLayers = list[tuple[str, Any]]


def main() -> None:
    """vLLM writes to stdout too: the answer goes to a copy of it."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    counts: Counter[str] = Counter()
    wrong = [
        [seed, text]
        for seed in range(int(sys.argv[1]))
        for text in faults(random.Random(seed), counts)
    ]
    json.dump({"wrong": wrong, "counts": counts, "reports": refused_alone()}, ours)
    ours.close()


def kv_layers() -> dict[str, KvLayers]:
    """Return the names and specs of the KV layers of each type."""
    import torch
    from vllm.v1 import kv_cache_interface as specs

    shape: Any = {"block_size": 16, "num_kv_heads": 2, "dtype": torch.bfloat16}
    full = specs.FullAttentionSpec(head_size=64, **shape)
    index = specs.FullAttentionSpec(head_size=16, **shape)
    half = specs.FullAttentionSpec(head_size=64, **shape | {"dtype": torch.uint8})
    windows = [
        specs.SlidingWindowSpec(head_size=64, sliding_window=tokens, **shape)
        for tokens in (64, 128)
    ]
    states = specs.MambaSpec(
        block_size=16, shapes=((64, 64),), dtypes=(torch.bfloat16,), page_size_padded=PAGE,
        mamba_cache_mode="align",
    )  # fmt: skip
    name = "self_attn.attn"
    return {
        "f": [(name, full)], "h": [(name, half)], "w": [(name, windows[0])],
        "v": [(name, windows[1])], "s": [("linear_attn", states)],
        "b": [("mamba", states), (name, full)], "n": [],
        "i": [(name, full), ("indexer.k_cache", index)],
    }  # fmt: skip


@dataclass
class Model:
    """A model's layers, as its configuration says and as they are."""

    layers: Sequence[KvLayers]
    types: Sequence[str]
    """Empty: the configuration does not say."""
    layout: str
    hybrid: bool
    """Whether vLLM may make several groups."""

    @classmethod
    def drawn(cls, rng: random.Random) -> Model:
        """Draw a model: mostly a pattern that repeats, and at times a layer of another size."""
        known, mix = kv_layers(), rng.choice(MIXES)
        pattern = [rng.choice(mix) for _ in range(rng.randint(1, 4))]
        types = [
            pattern[at % len(pattern)] if rng.random() < 0.95 else rng.choice(mix)
            for at in range(rng.randint(2, 24))
        ]
        types[0] = types[0].replace("n", "f")  # A model without KV has no groups.
        layers = [known[one] for one in types]
        if rng.random() < 0.1 and (at := rng.randrange(len(types))) and types[at] == "f":
            layers[at] = known["h"]
        layout = rng.choice(["LBHNC", "LBHNC", "BLHNC"])
        return cls(layers, types if rng.random() < 0.8 else (), layout, rng.random() < 0.85)


class Engine:
    """One engine: a model, cut into stages of so many layers."""

    def __init__(self, model: Model, stages: Sequence[int]) -> None:
        """Have vLLM make the configurations of all processes; it refuses some models."""
        from vllm.v1.core import kv_cache_utils as utils

        self.model, self.stages = model, stages
        self.borders = list(pairwise([0, *accumulate(stages)]))
        specs = [
            {
                f"model.layers.{layer}.{name}": spec
                for layer in range(first, end)
                for name, spec in model.layers[layer]
            }
            for first, end in self.borders
        ]
        workers = utils.get_kv_cache_configs(self.config(0), specs, [MEMORY] * len(specs))
        self.caches = [utils.generate_scheduler_kv_cache_config(workers), *workers]
        for cache in self.caches:
            cache.kv_cache_layout = model.layout

    def config(self, process: int) -> Any:
        """What a VllmConfig says in the scheduler, process 0, or in the worker of a stage."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        layout, borders = KVCacheLayout[self.model.layout], self.borders[max(0, process - 1)]
        cache = SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout, kv_cache_layout=self.model.layout,
            num_gpu_blocks_override=None, prefix_cache_retention_interval=None,
            enable_prefix_caching=True, mamba_cache_mode="align", block_size=16,
        )  # fmt: skip
        model = SimpleNamespace(
            original_max_model_len=64, max_model_len=64, get_total_num_kv_heads=lambda: 2,
            hf_config=SimpleNamespace(model_type="drawn"),
            hf_text_config=SimpleNamespace(layer_types=self.model.types),
            get_total_num_hidden_layers=lambda: len(self.model.layers),
            get_layers_start_end_indices=lambda _: borders,
        )  # fmt: skip
        parallel = SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=len(self.stages), rank=0,
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
            distributed_executor_backend="mp", world_size=len(self.stages),
        )  # fmt: skip
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(
                disable_hybrid_kv_cache_manager=not self.model.hybrid, max_num_batched_tokens=64,
                max_num_seqs=4,
            ),
            attention_config=SimpleNamespace(hisparse_config=None), speculative_config=None,
            num_prefill_lookahead_tokens=0, max_in_flight_tokens=64, num_speculative_tokens=0,
            cache_config=cache, model_config=model, parallel_config=parallel,
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        )  # fmt: skip

    def found(self, process: int) -> tuple[Any, ...] | str:
        """What a process makes of it: grouping, rows and shape; or why it refuses."""
        from kvbm_connectors.vllm.kv_groups import grouping_of
        from kvbm_connectors.vllm.shape import shape_of
        from kvbm_connectors.vllm.stages import UncutShape, names_by_row, stages_of

        os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, self.stages))
        config, cache = self.config(process), self.caches[process]
        try:
            shape = shape_of(config, cache, drafts=False)
            grouping = grouping_of(cache, names_by_row(stages_of(config, cache)))
        except UncutShape as error:
            return str(error)
        return grouping, shape.layers, shape.name, shape.distinct_ranks

    def image(self) -> list[dict[int, str]]:
        """The layer in each row of each group, by what vLLM tells the workers."""
        images: list[dict[int, str]] = [{} for _ in self.caches[0].kv_cache_groups]
        begin = 0
        for cache in self.caches[1:]:
            told = [group.layer_names for group in cache.kv_cache_groups]
            for image, names in zip(images, told, strict=True):
                image.update(enumerate(names, begin))
            begin += max(map(len, told))
        return images


def engines(rng: random.Random) -> Iterator[Engine]:
    """Cut a drawn model into stages, as far as vLLM takes it."""
    model = Model.drawn(rng)
    count = len(model.layers)
    for _ in range(ENGINES):
        stages = min(count, rng.choice([1, 2, 2, 3, 4]))
        cuts = [count * at // stages for at in range(1, stages)]
        if rng.random() < 0.5:
            cuts = sorted(rng.sample(range(1, count), stages - 1))
        try:
            yield Engine(model, [end - first for first, end in pairwise([0, *cuts, count])])
        except (ValueError, ZeroDivisionError, AssertionError):
            continue


def faults(rng: random.Random, counts: Counter[str]) -> Iterator[str]:
    """Yield where processes of an engine name blocks differently, and where two engines have other
    layers under one name."""
    images: dict[Any, Any] = {}
    for engine in engines(rng):
        found = [engine.found(process) for process in range(len(engine.caches))]
        refusals = [one for one in found if isinstance(one, str)]
        said = f"{engine.model.types}, stages of {engine.stages}: {found}"
        if refusals:
            everywhere = len(refusals) == len(found)
            counts["refused" if everywhere else "refused by some"] += 1
            one_group = len(engine.caches[0].kv_cache_groups) == 1
            told = engine.model.types and known_by_type(engine.model)
            if told and not one_group and not everywhere:
                yield f"refused by some: {said}"
        elif len({*found}) > 1:
            yield f"not agreed on: {said}"
        else:
            counts["agreed"] += 1
            image = engine.image()
            counts["shared"] += found[0] in images
            if images.setdefault(found[0], image) != image:
                yield f"other layers than another engine's: {said}"


def known_by_type(model: Model) -> bool:
    """Tell whether layers of one type are alike."""
    pairs = zip(model.types, model.layers, strict=True)
    return all(layer == kv_layers()[kind] for kind, layer in pairs)


def refused_alone() -> list[str]:
    """Return what the worker of the last stage reports in three steps, where it alone finds a layer
    of another size; the scheduler's answer is before them."""
    from kvbm_connectors.vllm.connector import KvbmConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    known = kv_layers()
    engine = Engine(Model([known["f"]] * 7 + [known["h"]], (), "LBHNC", hybrid=True), [4, 4])
    os.environ["VLLM_PP_LAYER_PARTITION"] = "4,4"
    worker = KvbmConnector(engine.config(2), KVConnectorRole.WORKER, engine.caches[2])
    worker.register_kv_caches({})
    said = [worker.build_connector_worker_meta() for _ in range(3)]
    reasons = ["" if one is None else one.report.passes_through for one in said]
    worker.shutdown()
    return [str(engine.found(0)), *reasons]


if __name__ == "__main__":
    main()
