"""TensorRT-LLM's interface, as far as the connector relies on it, in small protocols of our own.

The package cannot be installed where this is developed, so each protocol names the source that it
mirrors (github.com/NVIDIA/TensorRT-LLM, below `tensorrt_llm/`), of release 1.2 unless another
one is named. What an older or newer release may lack is read with `getattr`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

SOURCES = (
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
)
"""Modules of the two base classes: up to 1.2, and in the candidates of 1.3."""
BAD_PAGE = -1
"""`BAD_PAGE_INDEX` (1.3, runtime/kv_cache_manager_v2): a block that has no page."""
DEFAULT_PRIORITY = 35
"""The priority of a block whose request has no retention configuration: `KvCacheRetentionConfig`'s
`kDefaultRetentionPriority` (cpp/include/tensorrt_llm/executor/executor.h)."""


class Request(Protocol):
    """`LlmRequest` as the C++ manager hands it over (cpp/tensorrt_llm/nanobind/batch_manager/
    bindings.cpp). Read if they are there: `cache_salt`, `cache_salt_id`, `lora_task_id`,
    `is_dummy_request`, and the fields that tracked.py lists; `py_multimodal_data` is Python's
    (_torch/pyexecutor/llm_request.py)."""

    @property
    def request_id(self) -> int: ...
    @property
    def prompt_len(self) -> int: ...
    def get_tokens(self, beam: int) -> Sequence[int]:
        """Return the tokens of the prompt and what was generated so far."""
        ...


class RequestData(Protocol):
    """`RequestData` (_torch/pyexecutor/kv_cache_connector.py): one scheduled request. Read if it is
    there: `priorities`, of the new blocks."""

    @property
    def request_id(self) -> int: ...
    @property
    def new_block_ids(self) -> Sequence[int]:
        """Blocks that were added to its table since it was reported last."""
        ...


class SchedulerOutput(Protocol):
    """`SchedulerOutput` (the same file): who is scheduled in this step."""

    @property
    def new_requests(self) -> Sequence[RequestData]: ...
    @property
    def cached_requests(self) -> Sequence[RequestData]: ...


class Mapping(Protocol):
    """`Mapping` (mapping.py), of `parallel_config.to_mapping()`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def cp_size(self) -> int: ...


class ParallelConfig(Protocol):
    """The part of TensorRT-LLM's `_ParallelConfig` that we read (llmapi/llm_args.py)."""

    def to_mapping(self) -> Mapping: ...


class KvCacheConfig(Protocol):
    """`KvCacheConfig` (the same file). Read if they are there: `kv_events_config` (1.3),
    `use_kv_cache_manager_v2` (1.3)."""

    @property
    def tokens_per_block(self) -> int: ...
    @property
    def enable_block_reuse(self) -> bool: ...
    @property
    def enable_partial_reuse(self) -> bool: ...
    @property
    def host_cache_size(self) -> int | None: ...
    @property
    def max_attention_window(self) -> Sequence[int] | None: ...
    @property
    def dtype(self) -> str: ...


class LlmArgs(Protocol):
    """`TorchLlmArgs` (the same file). All that is set is read, but for what harmless.py lists."""

    @property
    def model(self) -> object:
        """A name on the hub, or a directory."""
        ...

    @property
    def kv_cache_config(self) -> KvCacheConfig: ...
    @property
    def parallel_config(self) -> ParallelConfig: ...


class Device(Protocol):
    """The part of torch.device that we read."""

    @property
    def type(self) -> str: ...


class Tensor(Protocol):
    """torch.Tensor: of `register_kv_caches`, shaped [blocks, layers, K and V, rest]
    (_torch/pyexecutor/resource_manager.py, `get_unique_primary_pool`)."""

    @property
    def device(self) -> Device: ...
    @property
    def shape(self) -> Sequence[int]: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...
