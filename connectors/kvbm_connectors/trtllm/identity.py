"""Identity: what TensorRT-LLM's arguments say about the bytes of a block, and about this engine."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvbm_common.identity import Namespace
from kvbm_common.wire.local import Attach

from kvbm_connectors.trtllm.protocols import LlmArgs
from kvbm_connectors.weights import fingerprint

log = logging.getLogger(__name__)

REPLAY_OFFSET = 1000
"""From the port of events to that of replays, as between the consolidator's own two."""
LIVES_MAX = 16
"""Engines of one process that are remembered: their two halves are built at the same time."""


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
        """The life that these arguments stand for; the first who asks begins it."""
        with self._lock:
            for life in self._lives:
                if life.args is args:
                    return life
            life = Life(secrets.token_hex(8), args)
            self._lives = [*self._lives, life][-LIVES_MAX:]
            return life


def agree(life: Life, world_size: int, broadcast: Callable[[str, int], str]) -> None:
    """All ranks take the name that rank 0 has drawn: called once by each rank's worker."""
    if world_size > 1:
        life.incarnation = broadcast(life.incarnation, 0)


def refusal_of(args: LlmArgs) -> str:
    """Why blocks of such an engine cannot be cached; `""` if they can."""
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
        "attention data parallelism is not supported": bool(_get(args, "enable_attention_dp")),
        "beam search is not supported": (_get(args, "max_beam_width") or 1) > 1,
    }  # fmt: skip
    return next((text for text, applies in refusals.items() if applies), "")


def namespace_of(args: LlmArgs, version: str) -> Namespace:
    """Everything that makes the bytes of two engines incompatible. The engine's version stands for
    its layout: blocks do not outlive an update."""
    cache, mapping = args.kv_cache_config, args.parallel_config.to_mapping()
    quant = _get(args, "quant_config")
    algorithms = [_get(quant, name) for name in ("quant_algo", "kv_cache_quant_algo")]
    manager = "v2" if _get(cache, "use_kv_cache_manager_v2") else "v1"
    backend = _get(args, "attn_backend") or "TRTLLM"
    return Namespace(
        model=str(args.model),
        revision=_revision(args),
        block_tokens=int(cache.tokens_per_block),
        dtype=f"{_get(args, 'dtype') or 'auto'}/{cache.dtype}",
        quantisation="/".join(_text(algorithm) for algorithm in algorithms if algorithm),
        layout=f"trtllm-{version}/{manager}/{backend}",
        tensor_parallel=int(mapping.tp_size),
    )


def _revision(args: LlmArgs) -> str:
    """The weights: a fingerprint of a directory. Of a hub model only what the arguments say."""
    directory = Path(str(args.model))
    return fingerprint(directory) if directory.is_dir() else str(_get(args, "revision") or "")


def stream_of(args: LlmArgs, life: Life, namespace: Namespace, port: int | None) -> Attach:
    """Where the engine's KV events are published: by the engine itself (1.3), or on the port that
    somebody who pulls them has been given. Otherwise an attachment for offers alone."""
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
    """Where pulled events are published, and where replays of them are asked for."""
    return f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + REPLAY_OFFSET}"


def _reachable(endpoint: str | None) -> str:
    """An endpoint that the engine binds, as one that a process of this host can connect to."""
    for wildcard in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"):
        if endpoint and endpoint.startswith(wildcard):
            return "tcp://127.0.0.1:" + endpoint.removeprefix(wildcard)
    return endpoint or ""


def _get(holder: object, name: str) -> Any:
    """A field that not every release has."""
    return getattr(holder, name, None)


def _text(algorithm: object) -> str:
    return str(getattr(algorithm, "value", algorithm))
