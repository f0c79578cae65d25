"""Kinds of models, by the KV groups that vLLM makes of them. Small numbers: a block has 4 tokens.

Only what vLLM's managers read of a spec counts: pages have any size. Runs in vLLM's environment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.v1 import kv_cache_interface as specs

TOKENS = 4
ANSWER_MAX = 20
SPARE = 12
"""Blocks beside those of one request, of most kinds: several run, and preempt each other."""
FEATURES: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8}


@dataclass(frozen=True)
class Kind:
    """The groups of one kind of model, and how its engine is set up."""

    groups: Callable[[], list[Any]]
    """A spec for each group."""
    hash_tokens: int | None = None
    """vLLM's `prefix_match_unit`."""
    drafts: int = 0
    """Tokens that are guessed for each step."""
    draft_groups: tuple[int, ...] = ()
    """Groups of a draft model."""
    aborts_preempted: bool = False
    """Resets are more frequent, and a request that one has preempted is aborted at once. Offers are
    pulled late."""
    layout: str = "LBHNC"
    """Where heads lie, of an engine whose pages have one size."""
    repeats_names: bool = False
    """A request may have the name of one that has ended, as vLLM allows by a variable."""
    gathers: bool = False
    """Few decoded blocks wait for others, and looks at few requests are taken in turn."""
    spare: int = SPARE
    """Blocks beside those of one request."""
    answer_max: int = ANSWER_MAX
    """Every answer has fewer tokens."""
    arguments: dict[str, Any] = field(default_factory=dict)


def _attention() -> dict[str, Any]:
    import torch

    return FEATURES | {"dtype": torch.float32}


def full(tokens: int = TOKENS, heads: int = 1) -> Any:
    """Full attention."""
    features = _attention() | {"num_kv_heads": heads}
    return specs.FullAttentionSpec(block_size=tokens, **features)


def window(size: int = 9, tokens: int = TOKENS, **more: Any) -> Any:
    """A sliding window."""
    return specs.SlidingWindowSpec(block_size=tokens, sliding_window=size, **_attention(), **more)


def chunked(size: int = 16) -> Any:
    """Chunked local attention."""
    return specs.ChunkedLocalAttentionSpec(
        block_size=TOKENS, attention_chunk_size=size, **_attention()
    )


def states(tokens: int = 8, mode: str = "align", **more: Any) -> Any:
    """A recurrent layer."""
    import torch

    return specs.MambaSpec(
        block_size=tokens, shapes=((3, 8),), dtypes=(torch.float32,), mamba_cache_mode=mode, **more
    )


def latent(role: str = "SPARSE", size: int = 8, **more: Any) -> Any:
    """Latent attention, or the indexer that chooses what it looks at."""
    features = _attention() | {"head_size": size} | more
    return specs.MLAAttentionSpec(
        block_size=TOKENS, cache_role=specs.SparseCacheRole[role], **features
    )


def indexed() -> Any:
    """Latent attention and its indexer, in one group: their pages have different sizes."""
    layers = {"mla": latent(), "indexer": latent("INDEXER", 4)}
    return specs.UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=layers)


def scratch() -> Any:
    """A ring of one block for each request, which vLLM does not cache."""
    return specs.CircularBufferSpec(block_size=TOKENS, **_attention())


def latent_window() -> Any:
    """A sliding window over latents."""
    features = _attention() | {"sliding_window": 9}
    return specs.SlidingWindowMLASpec(block_size=TOKENS, **features)


KINDS: dict[str, Kind] = {
    "plain": Kind(lambda: [full()]),
    "heads outside": Kind(lambda: [full(heads=2)]),
    "heads inside": Kind(lambda: [full(heads=2)], layout="LBNHC"),
    "repeated names": Kind(lambda: [full()], repeats_names=True),
    "repeated names, drafts": Kind(
        lambda: [full()], drafts=2, draft_groups=(0,), repeats_names=True
    ),
    "gemma3": Kind(lambda: [window(), window(), full()]),
    "gptoss": Kind(lambda: [window(8), full()]),
    "gemma4": Kind(lambda: [window(9, 8), window(9, 8), full()]),
    "mistral": Kind(lambda: [window()]),
    "gathered": Kind(
        lambda: [window(21), window(21), full()], gathers=True, answer_max=38, spare=2
    ),
    "retained": Kind(lambda: [window(extra_retained_tokens=3), full()]),
    "llama4": Kind(lambda: [chunked(), chunked(), full()]),
    "chunks": Kind(lambda: [chunked(24)]),
    "gdn": Kind(lambda: [states(), states(), full(8)]),
    "mamba2": Kind(
        lambda: [
            states(num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1), full(8)
        ]
    ),
    "partial": Kind(lambda: [states(), full(8)], hash_tokens=4),
    "mamba": Kind(lambda: [states()]),
    "dense states": Kind(
        lambda: [states(), full(8)], arguments={"prefix_cache_retention_interval": 8}
    ),
    "every state": Kind(lambda: [states(4, "all"), full()]),
    "deepseek v3.2": Kind(lambda: [indexed()]),
    "deepseek v4": Kind(lambda: [latent_window(), latent(tokens_per_state=2), scratch()]),
    "short windows": Kind(lambda: [window(2), window(4), full()]),
    "odd sizes": Kind(lambda: [window(14, 12), window(3, 4), full(8)]),
    "odd states": Kind(lambda: [states(12), window(9, 4), full(8)]),
    "all kinds": Kind(lambda: [states(8), window(9, 4), full(8), window(17, 8)]),
    "drafts": Kind(lambda: [full()], drafts=2),
    "drafting layers": Kind(lambda: [full()], drafts=2, draft_groups=(0,)),
    "guessing": Kind(lambda: [window(), full()], drafts=2),
    "draft model": Kind(lambda: [window(), full(), full()], drafts=2, draft_groups=(2,)),
    "aborted": Kind(lambda: [full()], aborts_preempted=True),
    "aborted drafts": Kind(lambda: [full()], drafts=2, draft_groups=(0,), aborts_preempted=True),
}  # fmt: skip


def blocks_of(spec: Any, tokens: int, in_flight: int) -> int:
    """Return how many blocks one request of so many tokens may have at a time."""
    inner = getattr(spec, "kv_cache_specs", None)
    one = next(iter(inner.values())) if inner else spec
    if isinstance(one, specs.MambaSpec) and one.mamba_cache_mode == "align":
        return 4
    if isinstance(one, specs.SlidingWindowSpec | specs.ChunkedLocalAttentionSpec):
        return int(one.max_admission_blocks_per_request(in_flight, tokens))
    return int(-(-tokens // spec.block_size))


def config_of(kind: Kind, tokens: int, in_flight: int) -> Any:
    """Return the KVCacheConfig of a kind: room for the longest request, and a little more."""
    groups = [
        specs.KVCacheGroupSpec([f"layer{number}"], spec)
        for number, spec in enumerate(kind.groups())
    ]
    for number in kind.draft_groups:
        groups[number] = replace(groups[number], is_eagle_group=True)
    blocks = sum(blocks_of(spec, tokens, in_flight) for spec in kind.groups()) + kind.spare
    return specs.KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=kind.arguments.get("prefix_cache_retention_interval", 0),
        kv_cache_layout=kind.layout,
    )
