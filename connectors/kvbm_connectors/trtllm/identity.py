"""Identity: what TensorRT-LLM's arguments say about the bytes of a block, and about this engine."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvbm_common.errors import KvbmError
from kvbm_common.identity import Namespace
from kvbm_common.tier.parts import PARTS_MAX
from kvbm_common.wire.consolidator import Attach

from kvbm_connectors.client.variables import contents_of_files, variables_in_name
from kvbm_connectors.client.weights import UnreadableWeights, fingerprint, label_of, resolve
from kvbm_connectors.trtllm.arguments import changes_of, plain
from kvbm_connectors.trtllm.harmless import (
    HARMLESS,
    HARMLESS_OF_CACHE,
    HARMLESS_VARIABLES,
    OTHER_VARIABLES,
    PREFIXES,
)
from kvbm_connectors.trtllm.protocols import LlmArgs

REPLAY_OFFSET = 1000
"""From the port of events to that of replays, as between the consolidator's own two."""
LIVES_MAX = 16
"""Engines of one process that are remembered: their two halves are built at the same time."""


CHECKPOINTS = ("hf", "mistral", "mistral_large_3")
"""Formats of checkpoints that are read from the model's files."""
WHOLE_BLOCKS = ("skip_softmax",)
"""Kinds of sparse attention that keep nothing beside the KV."""


class Leader(Protocol):
    """LeaderSide, as far as the worker beside it asks."""

    def saved(self, requests: Iterable[int]) -> list[int]: ...


@dataclass(slots=True)
class Life:
    """One life of an engine, the same in all its ranks. `leader` is set where there is one: in the
    process of rank 0."""

    incarnation: str
    args: LlmArgs
    leader: Leader | None = field(default=None, repr=False)

    @property
    def engine(self) -> str:
        return f"trtllm-{self.incarnation[:8]}"


class Lives:
    """The engines of this process, by the arguments object that both halves are built with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lives: list[Life] = []

    def of(self, args: LlmArgs) -> Life:
        """Return the life that these arguments stand for; the first call with them begins it."""
        with self._lock:
            for life in self._lives:
                if life.args is args:
                    return life
            life = Life(secrets.token_hex(8), args)
            self._lives = [*self._lives, life][-LIVES_MAX:]
            return life


def agree(
    life: Life, world_size: int, broadcast: Callable[[str, int], str], *, refuses: bool = False
) -> bool:
    """Take the name that rank 0 has drawn, in all ranks; False where rank 0 refuses, and sends
    none.

    Each rank's worker calls it once, whether it refuses or not: a broadcast without one of its
    ranks leaves the others waiting, or has them take the engine's next message for a name.
    """
    if world_size > 1:
        name = broadcast("" if refuses else life.incarnation, 0)
        life.incarnation = name or life.incarnation
        return bool(name)
    return not refuses


def refusal_of(args: LlmArgs) -> str:
    """Return why blocks of such an engine cannot be cached; `""` if they can."""
    cache, mapping = args.kv_cache_config, args.parallel_config.to_mapping()
    window = cache.max_attention_window
    refusals = {
        "block reuse is off: set kv_cache_config.enable_block_reuse to true":
            not cache.enable_block_reuse,
        "partial reuse is on: set kv_cache_config.enable_partial_reuse to false":
            cache.enable_partial_reuse,
        "the engine has a host cache of its own, which moves blocks behind their numbers: leave "
        "kv_cache_config.host_cache_size out":
            bool(cache.host_cache_size),
        "sliding windows are not supported (kv_cache_config.max_attention_window)":
            bool(window),
        "pipeline parallelism is not supported": mapping.pp_size != 1,
        "context parallelism is not supported": mapping.cp_size != 1,
        f"a block has at most {PARTS_MAX} parts, and each rank needs one":
            mapping.world_size > PARTS_MAX,
        "attention data parallelism is not supported": bool(_get(args, "enable_attention_dp")),
        "beam search is not supported": (_get(args, "max_beam_width") or 1) > 1,
        "sparse attention keeps more of a block than its KV (sparse_attention_config)":
            _is_sparse(args),
        "KV that is compressed or dropped afterwards is not supported "
        "(kv_cache_compression_config)":
            _get(args, "kv_cache_compression_config") is not None,
        "KV in NVFP4 has its scales in pools of their own": _has_fp4_cache(args),
    }  # fmt: skip
    found = next((text for text, applies in refusals.items() if applies), "")
    return found or _unnameable(args)


def _unnameable(args: LlmArgs) -> str:
    try:
        namespace_of(args, "", "")
    except UnreadableWeights as error:
        return f"the weights are not known: {error}"
    except KvbmError as error:  # The engine goes on without us, whatever is not to be named.
        return f"{error} ({error.code})"
    return ""


def namespace_of(args: LlmArgs, version: str, life: str) -> Namespace:
    """Return everything that makes the bytes of two engines incompatible.

    The engine's version stands for its layout: blocks do not outlive an update. `life` names the
    weights of an engine that draws them (`load_format: dummy`): its incarnation, which all of its
    ranks have agreed on.
    """
    cache, mapping = args.kv_cache_config, args.parallel_config.to_mapping()
    quant = _get(args, "quant_config")
    algorithms = [_get(quant, name) for name in ("quant_algo", "kv_cache_quant_algo")]
    manager = "v2" if _get(cache, "use_kv_cache_manager_v2") else "v1"
    backend = _get(args, "attn_backend") or "TRTLLM"
    return Namespace(
        model=label_of(str(args.model)),
        revision=_revision(args, life),
        block_tokens=int(cache.tokens_per_block),
        dtype=f"{_get(args, 'dtype') or 'auto'}/{cache.dtype}",
        quantisation="/".join(_text(algorithm) for algorithm in algorithms if algorithm),
        layout=f"trtllm-{version}/{manager}/{backend}",
        tensor_parallel=int(mapping.tp_size),
    )


def _revision(args: LlmArgs, life: str) -> str:
    """Return the weights by their content, and what changes what is computed with them. Raises
    UnreadableWeights."""
    weights = _weights(args, life)
    draft = _draft_of(_get(args, "speculative_config"))
    if draft and not weights.startswith("dummy"):
        weights += f"/{fingerprint(resolve(draft))}"
    changes = {
        "": changes_of(args, HARMLESS),
        "kv_cache_config": changes_of(args.kv_cache_config, HARMLESS_OF_CACHE),
        "quant_config": plain(_get(args, "quant_config")),
        "lora_dir": [fingerprint(resolve(str(path))) for path in _adapters_of(args)],
    }
    if variables := variables_in_name(
        os.environ, PREFIXES, harmless=HARMLESS_VARIABLES, others=OTHER_VARIABLES
    ):
        changes["variables"] = variables | contents_of_files(variables)
    text = json.dumps(changes, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return "+".join([weights, load_format_of(args), digest])


def _weights(args: LlmArgs, life: str) -> str:
    """Return the fingerprint of a model's files, or the engine's life for what is drawn or pushed.
    Raises UnreadableWeights."""
    load_format = load_format_of(args)
    if load_format == "dummy":
        return f"dummy:{life}"
    if load_format != "auto":
        raise UnreadableWeights(f"load_format is {load_format}, and auto or dummy is supported")
    if _get(args, "checkpoint_loader") is not None:
        kind = type(_get(args, "checkpoint_loader")).__qualname__
        raise UnreadableWeights(f"checkpoint_loader is {kind}, which may read them elsewhere")
    checkpoint = str(_get(args, "checkpoint_format") or "HF")
    if checkpoint.lower() not in CHECKPOINTS:
        raise UnreadableWeights(
            f"checkpoint_format is {checkpoint}, and {', '.join(CHECKPOINTS)} are supported"
        )
    return fingerprint(resolve(str(args.model), _get(args, "revision")))


def load_format_of(args: LlmArgs) -> str:
    """Return the load format in small letters: the engine's enumeration counts its members."""
    value = _get(args, "load_format")
    return str(getattr(value, "name", value) or "auto").rpartition(".")[2].lower()


def _draft_of(speculative: object) -> str:
    """Return the draft model, which writes KV of its own into the same blocks; `""` without one."""
    names = ("speculative_model_dir", "speculative_model")  # Before 1.2, and since.
    return next((str(found) for name in names if (found := _get(speculative, name))), "")


def _adapters_of(args: LlmArgs) -> list[object]:
    """Return the adapters of the start: their embeddings serve every request."""
    return list(_get(_get(args, "lora_config"), "lora_dir") or ())


def _is_sparse(args: LlmArgs) -> bool:
    """Tell whether a block has more than its KV: an indexer's keys, for one. Skip-softmax has not;
    DeepSeek's models have it without an argument."""
    config = _get(args, "sparse_attention_config")
    if config is not None and str(_get(config, "algorithm")) not in WHOLE_BLOCKS:
        return True
    model = _file_of(args, "config.json")
    parts = (model, model.get("text_config"))  # A model of images has its language model's there.
    return any("index_topk" in part for part in parts if isinstance(part, dict))


def _has_fp4_cache(args: LlmArgs) -> bool:
    """Tell whether the cache, by the arguments or by the checkpoint, is in NVFP4."""
    checkpoint = _file_of(args, "hf_quant_config.json").get("quantization")
    kinds = [
        args.kv_cache_config.dtype,
        _get(_get(args, "quant_config"), "kv_cache_quant_algo"),
        checkpoint.get("kv_cache_quant_algo") if isinstance(checkpoint, dict) else None,
    ]
    return any("FP4" in _text(kind).upper() for kind in kinds)


def _file_of(args: LlmArgs, name: str) -> dict[str, Any]:
    """Return a description beside the model's weights; empty without one."""
    try:
        path = resolve(str(args.model), _get(args, "revision")) / name
        found = json.loads(path.read_bytes())
    except (KvbmError, OSError, ValueError):
        return {}  # Weights that cannot be read are refused elsewhere.
    return found if isinstance(found, dict) else {}


def stream_of(args: LlmArgs, life: Life, namespace: Namespace, port: int | None) -> Attach:
    """Return where the engine's KV events are published: by the engine itself (1.3), or on the port
    of the event pump. Otherwise it is an attachment for offers alone."""
    endpoint, replay_endpoint, topic = "", "", ""
    config = _get(args.kv_cache_config, "kv_events_config")
    if config is not None and _get(config, "publisher") == "zmq":
        endpoint = _reachable(_get(config, "endpoint"))
        replay_endpoint = _reachable(_get(config, "replay_endpoint"))
        topic = str(_get(config, "topic") or "")
    elif port is not None:
        endpoint, replay_endpoint = endpoints_of(port)
    return Attach(
        engine=life.engine, incarnation=life.incarnation, endpoint=endpoint,
        replay_endpoint=replay_endpoint, topic=topic, namespace=namespace,
    )  # fmt: skip


def endpoints_of(port: int) -> tuple[str, str]:
    """Return where pulled events are published, and where replays of them are asked for."""
    return f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + REPLAY_OFFSET}"


def _reachable(endpoint: str | None) -> str:
    """Return an endpoint that the engine binds as one that a process of this host can connect
    to."""
    for wildcard in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"):
        if endpoint and endpoint.startswith(wildcard):
            return "tcp://127.0.0.1:" + endpoint.removeprefix(wildcard)
    return endpoint or ""


def _get(holder: object, name: str) -> Any:
    """Return a field that not every release has, or None."""
    return getattr(holder, name, None)


def _text(algorithm: object) -> str:
    return str(getattr(algorithm, "value", algorithm))
