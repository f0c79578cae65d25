"""What versions of vLLM do differently: 0.29 to 0.33.

    0.29         loads cannot fail as a whole, so models with several KV groups pass through; a step
                 hands out the block tables of requests with new blocks alone
    before 0.32  vLLM's metrics have no sources of hits
    before 0.33  vLLM does not say when it unmaps KV tensors

What is called by newer versions alone, older ones never call: it needs no question here.

vLLM is imported inside of functions: this module is read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbm_connectors.core.messages import Hit


def takes_failed_requests() -> bool:
    """Return whether this vLLM takes failures of whole requests (from 0.30 on)."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")


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
        return self._blocks[index].block_id


def tables_in(manager: Any) -> Callable[[Any, str], Sequence[Sequence[int]]]:
    """Return what `tables_of` returns, out of vLLM's KV cache manager (from 0.30 on): without a
    list of all blocks of a request."""

    def read(block_state: Any, request: str) -> Sequence[Sequence[int]]:
        if block_state is None or request not in block_state.req_ids:
            return ()
        return [BlockIds(blocks) for blocks in manager.get_blocks(request).blocks]

    return read


def states_of(block_state: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Return the recurrent states that a step computes, by request: the KV group, the device block
    and the tokens before the state. All versions have them."""
    return block_state.boundary_state_offloads if block_state is not None else {}


def stop_at_boundary(request: Any, tokens: int) -> None:
    """Have vLLM end a step of a request at this number of tokens, and keep the recurrent state
    there. Versions without that field compute on: the prefix is a hit one prompt later."""
    if hasattr(request, "shared_prefix_boundary"):
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, tokens)


def cpu_packing(config: Any, spec: Any) -> str:
    """Return the instruction set by which K is packed inside a block on CPU."""
    # No version has a public name for it.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = config.model_config, config.cache_config
    head_size = getattr(spec, "head_size", None)
    return str(_get_attn_isa(model.dtype, spec.block_size, head_size, cache.cache_dtype))


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
