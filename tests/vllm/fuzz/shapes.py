"""Shapes of engines: each is started once, and many programs run on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.vllm.fuzz.judge import ROUNDING

BLOCK_BYTES = 98_304
"""Of 32 tokens of the model that make_model.py makes."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """vLLM's arguments, the stack's settings, and what is drawn for them."""

    name: str
    kind: str = "full"
    """Of the model: see make_model.py."""
    blocks: int = 96
    block_tokens: int = 32
    model_tokens: int = 1024
    """Of a prompt and its answer together."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Of vLLM's, beyond those that follow from the fields above."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """The connector's: no shape but those that are named after it has any."""
    stack: Mapping[str, object] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    drafts: int = 0
    """Tokens that a draft model guesses: the same model, so that most are right."""
    only_greedy: bool = False
    """Speculation draws other random numbers."""
    repeats: bool = False
    adapters: bool = False
    priorities: bool = False
    grammars: bool = True
    reloads: bool = True
    """vLLM answers after `reload_weights` as when it was started with those weights. With attention
    sinks it does not."""
    runner_v2: bool = False
    """vLLM's newer model runner, its default on GPUs. Triton's interpreter runs its kernels,
    but for those of grammars and random samples."""
    second: bool = False
    """Another engine on the same stack answers some requests."""
    slow: float = 1.0
    """How often acts that take seconds are drawn, beside other shapes."""
    services: tuple[str, ...] = (
        "host-tier", "host-tier", "host-tier", "disk-tier", "nats", "index", "consolidator"
    )  # fmt: skip
    threads: str = "0"
    rounding: float = ROUNDING
    """Of a logprob, between batches."""

    @property
    def options(self) -> dict[str, object]:
        """What vLLM's LLM is made with."""
        return {
            "dtype": "float32",
            "block_size": self.block_tokens,
            "num_gpu_blocks_override": self.blocks,
            "max_model_len": self.model_tokens,
            "max_num_batched_tokens": 256,
            "disable_log_stats": True,
        } | dict(self.arguments)


# In so small an arena the scrubber finds every spoilt block before a load does: half of the shapes
# go without it.
MEMORY = {"cpu_cache_gb": 600 * BLOCK_BYTES / 1e9, "scrub_cpu_percent": 0}
EVICTING = {
    "cpu_cache_gb": 40 * BLOCK_BYTES / 1e9,
    "disk_cache_gb": 600 * BLOCK_BYTES / 1e9,
    "disable_disk_offload_filter": True,
}
SMALL = {
    "cpu_cache_gb": 40 * 32_768 / 1e9,
    "disk_cache_gb": 600 * 65_536 / 1e9,
    "disable_disk_offload_filter": True,
}
"""Of models with one or two layers in a group, whose blocks are smaller."""
STATES: dict[str, object] = {"max_num_batched_tokens": 64}
"""vLLM's Mamba-2 on CPU cannot leave a state in the middle of a step."""
DISK_ONLY = {"staging_gb": 40 * BLOCK_BYTES / 1e9, "disk_cache_gb": 600 * BLOCK_BYTES / 1e9}
NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3
}  # fmt: skip

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="chunked", stack=MEMORY),
        Shape(
            name="tiny", blocks=22, model_tokens=640, stack=MEMORY,
            arguments={"max_num_batched_tokens": 128},
        ),
        Shape(
            name="spec", blocks=64, stack=MEMORY, only_greedy=True, repeats=True, grammars=False,
            arguments={"speculative_config": NGRAM},
        ),
        Shape(
            name="drafting", blocks=64, stack=MEMORY, drafts=2, only_greedy=True, grammars=False
        ),
        Shape(
            name="lora", stack=MEMORY, adapters=True,
            arguments={"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
        ),
        Shape(
            name="priority", blocks=28, model_tokens=768, stack=MEMORY, priorities=True,
            arguments={"scheduling_policy": "priority", "long_prefill_token_threshold": 96},
        ),
        Shape(
            name="large", blocks=24, block_tokens=128,
            arguments={"max_num_batched_tokens": 2048},
            stack={"cpu_cache_gb": 0.1},
        ),
        Shape(name="hybrid", kind="windowed", stack=MEMORY),
        Shape(
            name="hybrid-tiny", kind="windowed", blocks=72, model_tokens=640, second=True,
            stack=EVICTING, arguments={"max_num_batched_tokens": 128},
        ),
        Shape(
            name="hybrid-spec", kind="windowed", stack=MEMORY, only_greedy=True, repeats=True,
            grammars=False, arguments={"speculative_config": NGRAM},
        ),
        Shape(name="sinks", kind="sinks", stack=MEMORY, reloads=False),
        Shape(name="chunks", kind="chunks", stack=SMALL, second=True),
        Shape(name="sizes", kind="sizes", stack=SMALL, second=True),
        Shape(name="shared", kind="shared", stack=SMALL, second=True),
        Shape(name="states", kind="states", block_tokens=64, stack=MEMORY, arguments=STATES),
        Shape(
            name="states-tiny", kind="states", block_tokens=64, blocks=28, model_tokens=640,
            second=True, stack=SMALL, arguments=STATES | {"prefix_match_unit": 32},
        ),
        Shape(
            name="delta", kind="delta", block_tokens=64, blocks=48, stack=EVICTING,
            arguments={"dtype": "bfloat16"}, rounding=0.1,
        ),
        Shape(
            name="v2", blocks=64, stack=MEMORY, runner_v2=True, only_greedy=True, grammars=False
        ),
        Shape(
            name="v2-spec", blocks=64, stack=MEMORY, runner_v2=True, drafts=2, only_greedy=True,
            grammars=False,
        ),
        Shape(
            name="v2-hybrid", kind="windowed", blocks=72, model_tokens=640, stack=EVICTING,
            runner_v2=True, only_greedy=True, grammars=False,
            arguments={"max_num_batched_tokens": 128},
        ),
        Shape(name="evicting", blocks=64, stack=EVICTING, second=True),
        Shape(name="disk", blocks=64, stack=DISK_ONLY),
        Shape(
            name="nixl", blocks=64, stack=MEMORY, slow=3.0,
            environ={"KVBM_ONBOARD_MOVER": "nixl", "UCX_TLS": "tcp,self"},
        ),
        Shape(
            name="tp2", blocks=64, stack=MEMORY, threads="0|1", grammars=False, slow=0.5,
            arguments={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        ),
    )
}  # fmt: skip

ALONE: dict[str, object] = {
    "max_num_batched_tokens": 4096, "enable_prefix_caching": False, "max_num_seqs": 64
}  # fmt: skip
ADAPTERS: dict[str, object] = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8}
DTYPES: dict[str, dict[str, object]] = {"delta": {"dtype": "bfloat16"}}
"""Of kinds that the CPU build computes in one type alone."""


def reference(kind: str, *, adapters: bool) -> Shape:
    """vLLM alone, which computes all of every prompt."""
    return Shape(
        name=f"reference-{kind}{'-lora' if adapters else ''}", kind=kind, blocks=1200,
        model_tokens=2048, block_tokens=64 if kind in ("states", "delta") else 32,
        arguments=ALONE | (ADAPTERS if adapters else {}) | DTYPES.get(kind, {}),
    )  # fmt: skip
