"""A package `tensorrt_llm` with what the connector imports of it: the base classes of release 1.2
(_torch/pyexecutor/kv_cache_connector.py) and the broadcast, and the arguments that it is built
with. The real one cannot be installed here."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

from kvbm_connectors.trtllm.protocols import SOURCES

CONNECTOR = "kvbm_connectors.trtllm.connector"


class KvCacheConnectorScheduler(ABC):
    """The methods that a leader must have."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...
    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any: ...
    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...
    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


class KvCacheConnectorWorker(ABC):
    """The methods that a worker must have; a plan stays bound until the next one comes."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: Any) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> Any:
        return self._metadata

    def register_forward_pass_callable(self) -> None:
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...
    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...
    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...
    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...
    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...
    @abstractmethod
    def get_finished(self, finished: list[int], loading: list[int]) -> Any: ...


class Broadcast:
    """`mpi_broadcast`, for ranks that are built one after the other: rank 0 first."""

    def __init__(self) -> None:
        self.rank = 0
        self.broken: Exception | None = None
        self.calls: list[int] = []
        self._said: Any = None

    def __call__(self, value: Any, root: int) -> Any:
        self.calls.append(self.rank)
        if self.broken is not None:
            raise self.broken
        if self.rank == root:
            self._said = value
        return self._said


@contextmanager
def installed(*, source: str = SOURCES[0], version: str = "1.2.1") -> Iterator[Broadcast]:
    """The package can be imported, and our connector is imported anew on top of it."""
    before = dict(sys.modules)
    broadcast = Broadcast()
    names = source.split(".")
    for end in range(1, len(names) + 1):
        name = ".".join(names[:end])
        module = ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
    vars(sys.modules["tensorrt_llm"])["__version__"] = version
    vars(sys.modules[source]).update(
        KvCacheConnectorScheduler=KvCacheConnectorScheduler,
        KvCacheConnectorWorker=KvCacheConnectorWorker,
    )
    utils = ModuleType("tensorrt_llm._utils")
    vars(utils)["mpi_broadcast"] = broadcast
    sys.modules[utils.__name__] = utils
    sys.modules.pop(CONNECTOR, None)
    try:
        importlib.import_module(CONNECTOR)
        yield broadcast
    finally:
        for name in set(sys.modules) - set(before):
            if name.startswith("tensorrt_llm") or name == CONNECTOR:
                del sys.modules[name]


@dataclass
class Mapping:
    rank: int = 0
    world_size: int = 1
    pp_size: int = 1
    cp_size: int = 1

    @property
    def tp_size(self) -> int:
        return self.world_size


@dataclass
class ParallelConfig:
    mapping: Mapping = field(default_factory=Mapping)

    def to_mapping(self) -> Mapping:
        return self.mapping


@dataclass
class KvCacheConfig:
    """Of llmapi/llm_args.py, with `enable_partial_reuse` as our guide demands it."""

    tokens_per_block: int = 4
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = False
    host_cache_size: int | None = None
    max_attention_window: list[int] | None = None
    dtype: str = "auto"
    kv_events_config: Any = None


class LoadFormat(Enum):
    """TensorRT-LLM's own (llmapi/llm_args.py): numbers, and the text of one is no format."""

    AUTO = 0
    DUMMY = 1
    VISION_ONLY = 2


@dataclass
class LlmArgs:
    """TorchLlmArgs."""

    model: Any = "test"
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    enable_attention_dp: bool = False
    max_beam_width: int = 1
    dtype: str = "bfloat16"
    revision: str | None = None
    load_format: Any = LoadFormat.DUMMY
    checkpoint_format: str | None = None
    checkpoint_loader: Any = None
    speculative_config: Any = None
    model_kwargs: Any = None
    attn_backend: str = "TRTLLM"
    quant_config: Any = None


def args_of(rank: int = 0, world_size: int = 1, **cache: Any) -> LlmArgs:
    """The arguments as one rank has them."""
    return LlmArgs(
        kv_cache_config=KvCacheConfig(**cache),
        parallel_config=ParallelConfig(Mapping(rank, world_size)),
    )
