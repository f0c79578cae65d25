"""Versions of vLLM, 0.29 to 0.33, and how they differ.

    0.29         loads cannot fail as a whole, so models with several KV groups, or with one that
                 is not full attention, pass through; a step hands out the block tables of requests
                 with new blocks alone; no group is in host memory
    before 0.31  a request has no field for hints; no window is computed again before a hit; vLLM
                 does not say how far its draft models read, nor which ranks hold the same heads
    before 0.32  vLLM's metrics have no sources of hits
    before 0.33  vLLM does not say when it unmaps KV tensors

Methods that only newer versions of vLLM call need no check here.

vLLM is imported inside functions, so that this module can be imported without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbm_connectors.core.messages import Hit


def takes_failed_requests() -> bool:
    """Return whether this vLLM takes failures of whole requests (from 0.30 on)."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")


def tells_of_sleep() -> bool:
    """Return whether this vLLM says when it unmaps KV tensors (from 0.33 on)."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")


def repeats_request_ids() -> bool:
    """Return whether a request may have the id of one that has ended: vLLM makes ids unique unless
    a variable forbids it. All versions have it."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False))


def has_all_tables() -> bool:
    """Return whether a step has the block tables of all its requests (from 0.30 on). Before, it has
    those of requests that get a block in it."""
    from vllm.v1.core.sched.output import KVConnectorBlockState

    return hasattr(KVConnectorBlockState, "get_block_ids")


def tables_of(block_state: Any, request: str) -> tuple[list[int], ...]:
    """Return the device blocks of a request, KV group by KV group, as a step's block state has
    them; empty where they are not known.

    vLLM 0.29 hands out the tables of requests that got blocks in this step; later versions resolve
    those of every request that the step schedules.
    """
    if block_state is None:
        return ()
    tables = getattr(block_state, "block_ids", None)
    found = tables.get(request) if tables is not None else block_state.get_block_ids(request)
    return found if found is not None else ()


class BlockIds(Sequence[int]):
    """The device blocks of a request in one KV group, read when they are asked for."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [block.block_id for block in self._blocks[index]]
        return self._blocks[index].block_id


def tables_in(manager: Any) -> Callable[[Any, str], Sequence[Sequence[int]]]:
    """Return a function like `tables_of` that reads vLLM's KV cache manager (from 0.30 on).

    It makes no list of all blocks of a request.
    """

    def read(block_state: Any, request: str) -> Sequence[Sequence[int]]:
        if block_state is None or request not in block_state.req_ids:
            return ()
        return [BlockIds(blocks) for blocks in manager.get_blocks(request).blocks]

    return read


def states_of(block_state: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Return the recurrent states that a step computes, by request: the KV group, the device block
    and the tokens before the state. All versions have them."""
    return block_state.boundary_state_offloads if block_state is not None else {}


def hints_in(request: Any) -> Any:
    """Return the envelope of hints of a request; None: it has none (before 0.31: none has)."""
    return getattr(request, "kv_hints", None)


def is_host_resident(group: Any) -> bool:
    """Return whether vLLM keeps a KV group in host memory (from 0.30 on)."""
    return bool(getattr(group, "host_resident", False))


def replayed_tokens(spec: Any) -> int:
    """Return how many tokens before a hit are computed again (from 0.31 on)."""
    return int(getattr(spec, "prefix_replay_tokens", 0))


def lookahead_tokens(config: Any) -> int:
    """Return how many tokens draft models read ahead of a prompt; 0: vLLM does not say (before
    0.31)."""
    return int(getattr(config, "num_prefill_lookahead_tokens", 0))


def tp_replicas(kv_cache_config: Any) -> int:
    """Return how many ranks hold the same heads; 0: vLLM does not say (before 0.31)."""
    return int(getattr(kv_cache_config, "kv_tp_replicas", 0))


def cpu_packing(config: Any, spec: Any, cache_dtype: str) -> str:
    """Return the instruction set by which K is packed inside a block on CPU."""
    # No version has a public name for it.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    head_size = getattr(spec, "head_size", None)
    return str(_get_attn_isa(config.model_config.dtype, spec.block_size, head_size, cache_dtype))


def sources_of(hit: Hit, tokens: int) -> dict[Any, int]:
    """Return how many of a hit's tokens were in which tier, by vLLM's CacheHitSource.

    A block's share of the tokens is the same for all blocks of the hit.
    """
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    blocks = max(1, hit.blocks)  # vLLM may ask when the hit has been forgotten.
    disk, remote = tokens * hit.disk // blocks, tokens * hit.remote // blocks
    split = {
        CacheHitSource.HOST: tokens - disk - remote,
        CacheHitSource.DISK: disk,
        CacheHitSource.P2P: remote,
    }
    return {source: count for source, count in split.items() if count}
