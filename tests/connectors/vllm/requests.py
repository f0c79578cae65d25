"""vLLM's request and step without vLLM: the few numbers that the scheduler side reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Request:
    """vllm.v1.request.Request, with a prompt of two blocks of four tokens and one token more."""

    request_id: str = "r"
    all_token_ids: Sequence[int] = tuple(range(9))
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    shared_prefix_boundary: int = 0
    """Where vLLM ends a step, so that recurrent layers leave a state there."""

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def begin(self, tokens: int) -> None:
        """Count the tokens of a step that was scheduled, as vLLM does after the plan."""
        self.num_computed_tokens += tokens
        self.num_in_flight_tokens += tokens

    def end(self, tokens: int, *, rejected: int = 0) -> None:
        """Count the end of that step, in which so many speculative tokens were rejected."""
        self.num_in_flight_tokens -= tokens
        self.num_computed_tokens -= rejected


@dataclass
class Output:
    """vllm.v1.core.sched.output.SchedulerOutput, of a step that computes nothing."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    preempted_req_ids: Sequence[str] = ()
    kv_connector_block_state: Any = None


@dataclass
class BlockState:
    """vllm.v1.core.sched.output.KVConnectorBlockState, from vLLM 0.30 on."""

    tables: dict[str, list[int]]

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        found = self.tables.get(req_id)
        return None if found is None else (found,)


@dataclass
class BlockSnapshot:
    """The same class in vLLM 0.29."""

    block_ids: dict[str, tuple[list[int], ...]]
