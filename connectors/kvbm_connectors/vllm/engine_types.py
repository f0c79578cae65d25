"""Types of vLLM: the small part of its scheduler's objects that we read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol


class LoraRequest(Protocol):
    """vLLM's `LoRARequest` (vllm.lora.request), as used here."""

    @property
    def lora_name(self) -> str: ...
    @property
    def lora_int_id(self) -> int: ...


class Position(Protocol):
    """The place of a multimodal item in a prompt, in tokens."""

    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


class Feature(Protocol):
    """A multimodal item; `identifier` stands for its content."""

    @property
    def identifier(self) -> str: ...
    @property
    def mm_position(self) -> Position: ...


class EngineRequest(Protocol):
    """vLLM's `Request` (vllm.v1.request), as used here."""

    shared_prefix_boundary: int
    """Tokens at which vLLM ends a step, and keeps the recurrent state."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_in_flight_tokens(self) -> int:
        """The computed tokens whose step has not ended yet."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def lora_request(self) -> LoraRequest | None: ...
    @property
    def mm_features(self) -> Sequence[Feature]: ...
    @property
    def prompt_embeds(self) -> Any: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...


class BlockTable(Protocol):
    """vllm.v1.core.kv_cache_manager.KVCacheBlocks: the blocks of one request."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return block ids for each KV group."""
        ...


class SchedulerOutput(Protocol):
    """vLLM's `SchedulerOutput` (vllm.v1.core.sched.output), as used here."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...
    @property
    def scheduled_spec_decode_tokens(self) -> Mapping[str, Sequence[int]]: ...
    @property
    def preempted_req_ids(self) -> Iterable[str] | None: ...
    @property
    def kv_connector_block_state(self) -> Any:
        """KVConnectorBlockState of the same module; None without one."""
        ...
