"""Requests and steps as vLLM's scheduler has them, as far as the connector meets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from kvbm_common.identity import SequenceHash
from kvbm_connectors.core.messages import LoadResult
from kvbm_connectors.vllm.plan import StepPlan


class Status(Enum):
    """Where a request is; `LOADING` is vLLM's WAITING_FOR_REMOTE_KVS."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """vllm.v1.request.Request. What the model will say is drawn before, and known step by step."""

    request_id: str
    tokens: list[int]
    """The prompt and all that will be sampled."""
    names: list[SequenceHash]
    """Of all full blocks of these tokens."""
    known: int
    """How many of them the scheduler knows."""
    stop_at: int
    """It is over when so many are known."""
    stops_by_surprise: bool
    """The scheduler cannot foresee that, and may schedule one step too many."""
    since_ms: float
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    """Leading blocks that can be found in the device's cache."""
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    stale_tokens: int = 0
    """In flight since before a preemption."""
    placeholders: int = 0
    """Tokens that steps in flight will sample."""
    last_step: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    shared_prefix_boundary: int = 0
    """Without recurrent layers no step ends there."""
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        """Return how many tokens are known."""
        return self.known

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Return the tokens that are known."""
        return self.tokens[: self.known]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the block table, as KVCacheBlocks does."""
        return (self.blocks,)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part of a step."""

    request: Request
    start: int
    count: int
    blocks: tuple[int, ...]
    samples: bool


@dataclass(slots=True)
class BlockState:
    """vllm.v1.core.sched.output.KVConnectorBlockState."""

    tables: dict[str, list[int]]

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        """Return the block table of a request of this step."""
        table = self.tables.get(req_id)
        return None if table is None else (table,)


@dataclass(slots=True)
class Output:
    """vllm.v1.core.sched.output.SchedulerOutput."""

    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: list[str]
    kv_connector_block_state: BlockState
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """One step, from its schedule to its output."""

    number: int
    parts: list[Scheduled]
    plan: StepPlan
    results: list[list[LoadResult]] = field(default_factory=list)
    """What each rank reports of loads that have ended since its last report."""
    bad_blocks: set[int] = field(default_factory=set)

    @property
    def token_count(self) -> int:
        """Return how many tokens it computes."""
        return sum(part.count for part in self.parts)


class Cache(Protocol):
    """What the scheduler says of its prefix cache."""

    def say_removed(self, names: Sequence[SequenceHash]) -> None: ...
    def say_stored(
        self, names: Sequence[SequenceHash], first: int, end: int, tokens: Sequence[int]
    ) -> None: ...
    def say_cleared(self) -> None: ...


def cut_at_bad(request: Request, bad: set[int], block_tokens: int) -> bool:
    """Cut what counts as computed at a request's first bad block; tell whether it has any."""
    count = -(-request.num_computed_tokens // block_tokens)
    mine = [index for index, block in enumerate(request.blocks[:count]) if block in bad]
    if mine:
        request.num_computed_tokens = mine[0] * block_tokens
    return bool(mine)
