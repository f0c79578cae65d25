"""Namespace: what vLLM's configuration says about the bytes of a block, and about this engine."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbm_common.identity import Namespace
from kvbm_common.wire.consolidator import Attach

from kvbm_connectors.client.weights import label_of
from kvbm_connectors.vllm.computation import digest_of
from kvbm_connectors.vllm.kv_groups import (
    attention_specs,
    first_group,
    grouping_of,
    is_hybrid,
    kinds_of,
    layer_spec,
    refusal_of_groups,
)
from kvbm_connectors.vllm.loading import Loaders, beside, weights_of
from kvbm_connectors.vllm.shape import shape_of
from kvbm_connectors.vllm.stages import UncutShape, names_by_row, stages_of
from kvbm_connectors.vllm.versions import (
    cpu_packing,
    lookahead_tokens,
    takes_failed_requests,
    tells_of_sleep,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Life:
    """One engine (one data-parallel rank of it) in one of its lives: the same in all its
    processes."""

    engine: str
    incarnation: str
    data_parallel_rank: int

    @classmethod
    def of(cls, config: Any) -> Life:
        """Derive the life from a VllmConfig: from the engine's id, and the moment at which it was
        configured."""
        rank = int(config.parallel_config.data_parallel_index)
        engine_id = str(config.kv_transfer_config.engine_id)
        text = f"{engine_id}/{config.instance_id}/{rank}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        suffix = f"-dp{rank}" if config.parallel_config.data_parallel_size > 1 else ""
        return cls(f"vllm-{digest[:8]}{suffix}", digest, rank)


LATENT_FP8 = "fp8_ds_mla"
"""The format of latent attention that vLLM chooses for other formats of 8 bits."""
UNQUANTISED = "NONE"
DRAFTS_WITHOUT_KV = {"ngram", "ngram_gpu", "suffix"}
"""Speculative methods that compute nothing: they look into the tokens."""


def drafts_write_kv(config: Any) -> bool:
    """Tell whether a draft model of this engine writes KV of its own."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method not in DRAFTS_WITHOUT_KV


def rewritten_by_drafts(config: Any) -> int | None:
    """Return the tokens at a request's end whose KV a draft model writes again with the next step:
    each of its modules reads one token further than the one before, and some of these are guesses.

    None: no draft model writes KV.
    """
    if not drafts_write_kv(config):
        return None
    return max(0, lookahead_tokens(config) - 1)


def refusal_of(config: Any, kv_cache_config: Any) -> str:
    """Return why blocks of such an engine cannot be cached; `""` if they can."""
    if refusal := refusal_of_engine(config) or refusal_of_groups(kv_cache_config):
        return refusal
    if is_hybrid(kv_cache_config) and not takes_failed_requests():
        return "this vLLM cannot be told that a load of several KV groups has failed"
    try:
        shape_of(config, kv_cache_config, drafts=drafts_write_kv(config))
    except UncutShape as error:
        return str(error)
    return ""


def refusal_of_engine(config: Any) -> str:
    """Return why an engine cannot be cached, whatever KV groups it has; `""` if it can."""
    parallel = config.parallel_config
    if not config.cache_config.enable_prefix_caching:
        # vLLM turns it off where a kernel cannot begin after a prefix (latent attention on CPU):
        # blocks from us would be as wrong there as its own.
        return "prefix caching is off"
    if getattr(config.model_config, "is_diffusion", False):
        return "a diffusion model computes the KV of its last tokens again with each step"
    if getattr(config.model_config, "enable_sleep_mode", False) and not tells_of_sleep():
        # An offer or a load in flight would touch memory that is gone, or is another's by now.
        return "sleep mode, and this vLLM does not say when it unmaps KV tensors (0.33 does)"
    if getattr(getattr(config, "aux_output_config", None), "enabled", False):
        return "routed experts are returned, which vLLM keeps only of blocks that it has computed"
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return "each rank has a scheduler of its own, which hears of no other rank"
    if getattr(parallel, "decode_context_parallel_size", 1) != 1:
        return "context parallelism is not supported"
    if getattr(parallel, "prefill_context_parallel_size", 1) != 1:
        return "context parallelism is not supported"
    return ""


def namespace_of(config: Any, kv_cache_config: Any, weights: str = "") -> Namespace:
    """Return everything that makes the bytes of two engines incompatible.

    `weights` is what an operator calls them, if their content cannot be read here. Raises
    UnreadableWeights otherwise, and UncutShape: in doubt an engine passes through.
    """
    model = config.model_config
    at, spec = first_group(kv_cache_config)
    dtype = str(model.dtype).removeprefix("torch.")
    cache_dtype = cache_dtype_of(config, kv_cache_config)
    shape = shape_of(config, kv_cache_config, drafts=drafts_write_kv(config))
    layout = kv_cache_config.kv_cache_layout or config.cache_config.kv_cache_layout or "unknown"
    grouping = grouping_of(kv_cache_config, names_by_row(stages_of(config, kv_cache_config)))
    return Namespace(
        model=label_of(str(model.model)),
        revision=_revision(config, weights),
        block_tokens=int(spec.block_size),
        dtype=dtype if cache_dtype == "auto" else f"{dtype}/{cache_dtype}",
        quantisation=str(model.quantization or ""),
        layout=f"{layout}{packing_of(config, kv_cache_config)}{grouping}",
        group=at,
        layers=shape.layers,
        heads=int(model.get_total_num_kv_heads()),
        head_dim=int(model.get_head_size()),
        tensor_parallel=shape.distinct_ranks,
        parts=shape.name,
    )


def cache_dtype_of(config: Any, kv_cache_config: Any) -> str:
    """Return the format of KV, alike in all processes of one engine.

    Where a model's configuration quantises its KV, or latent attention has a format of its own,
    vLLM writes so into the configuration of the processes that load the model, and of no other. The
    groups' specs come from there, and all processes have the first layer of each: what vLLM writes
    follows from them. If that layer is skipped, it follows from the checkpoint's scheme.
    """
    layers = [layer_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    configured = str(config.cache_config.cache_dtype)
    formats = {_format_of(one) for one in layers}
    if LATENT_FP8 in formats:
        return "+".join(sorted(formats))  # What is configured says nothing of the other groups.
    quantised = any(_mode_of(one) != UNQUANTISED for one in layers)
    quantised = quantised or _is_skipped(config, layers)
    return "fp8" if configured == "auto" and quantised else configured


def _mode_of(layer: Any) -> str:
    return str(getattr(getattr(layer, "kv_quant_mode", None), "name", UNQUANTISED))


def _format_of(layer: Any) -> str:
    """Return what a layer's spec says of its format."""
    if getattr(layer, "cache_dtype_str", None) == LATENT_FP8:
        return LATENT_FP8
    return f"{str(getattr(layer, 'dtype', '')).removeprefix('torch.')}-{_mode_of(layer)}"


def _is_skipped(config: Any, layers: Sequence[Any]) -> bool:
    """Tell whether vLLM quantises layers by the checkpoint's scheme, and these may be others. For
    latent attention it does not follow the scheme."""
    if getattr(getattr(config, "quant_config", None), "kv_cache_scheme", None) is None:
        return False
    skips = bool(getattr(config.cache_config, "kv_cache_dtype_skip_layers", ()))
    return skips and not any("MLA" in kind for one in layers for kind in kinds_of(one))


def _revision(config: Any, weights: str) -> str:
    """Return the weights by their content, and everything that changes what is computed with
    them."""
    from vllm import __version__

    weights = weights or weights_of(config, _loaders())
    return f"{weights}+{digest_of(config, str(__version__), beside=beside(config))}"


def _loaders() -> Loaders:
    """Return the loaders of vLLM and its plugins by format; a release may keep them elsewhere."""
    from vllm.model_executor import model_loader

    return getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})


def packing_of(config: Any, kv_cache_config: Any) -> str:
    """Return the part of the layout that names the packing: on CPU, K is packed by instruction set
    inside a block."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return ""
    cache_dtype = cache_dtype_of(config, kv_cache_config)
    packings = {
        cpu_packing(config, spec, "auto" if _mode_of(spec) == UNQUANTISED else cache_dtype)
        for spec in attention_specs(kv_cache_config)
    }
    return f"/{'+'.join(sorted(packings))}"


def pass_through_of(config: Any, reason: str) -> Attach:
    """Return what an engine without a cache says of itself: its name, its model, and the reason.

    What it computes may have no name, so the namespace has the model alone.
    """
    life = Life.of(config)
    namespace = Namespace(model=label_of(str(config.model_config.model)), block_tokens=1)
    return Attach(
        engine=life.engine, incarnation=life.incarnation, endpoint="",
        rank=life.data_parallel_rank, namespace=namespace, adapters=[], passes_through=reason,
    )  # fmt: skip


def stream_of(
    config: Any, life: Life, namespace: Namespace, group_namespaces: Sequence[Namespace] = ()
) -> Attach:
    """Return where vLLM publishes its KV events; without a publisher, an attachment for offers
    alone."""
    events = config.kv_events_config
    wanted = events is not None and events.enable_kv_cache_events and events.publisher == "zmq"
    rank = life.data_parallel_rank
    return Attach(
        engine=life.engine,
        incarnation=life.incarnation,
        endpoint=_reachable(events.endpoint, rank) if wanted else "",
        replay_endpoint=_reachable(events.replay_endpoint, rank) if wanted else "",
        topic=str(events.topic) if wanted else "",
        rank=rank,
        namespace=namespace,
        group_namespaces=list(group_namespaces),
        adapters=[],
    )


def _reachable(endpoint: str | None, rank: int) -> str:
    """Return an endpoint that vLLM binds as one that a process of this host can connect to. Empty
    if it cannot be followed."""
    from vllm.distributed.kv_events import ZmqEventPublisher

    if not endpoint:
        return ""
    own = str(ZmqEventPublisher.offset_endpoint_port(endpoint, rank))
    if own.startswith("ipc://"):
        return own
    # Of TCP, vLLM binds wildcards and connects to the rest. Port 0 is chosen by the system, and is
    # not reported.
    if own.endswith(":0") or not own.startswith(("tcp://*:", "tcp://[::]:")):
        log.warning("KV events at %s cannot be followed: use ipc://PATH or tcp://*:PORT", own)
        return ""
    return own.replace("*", "127.0.0.1").replace("[::]", "[::1]")
