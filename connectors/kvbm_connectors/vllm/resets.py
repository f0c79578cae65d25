"""Resets of an engine's caches: its blocks have other names from then on.

vLLM calls a connector's `reset_cache` only for a reset with `reset_connector`. RL frameworks write
new weights into a running engine, and reset vLLM's prefix cache alone, as they do without a
connector. What the tiers hold was computed with the old weights: in an engine that is made for such
updates, a reset of the prefix cache alone begins another generation, too.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any

from kvbm_connectors.client.scheduler import SchedulerHalf
from kvbm_connectors.vllm.block_holds import is_cleared
from kvbm_connectors.vllm.scheduler_side import SchedulerSide

log = logging.getLogger(__name__)

RESET_WAIT_S = 1.0
"""For the consolidator's answer to a reset."""


def begin_generation(side: SchedulerSide, half: SchedulerHalf, pool: Any) -> bool:
    """Name blocks afresh: nothing that was stored so far is found again.

    Returns whether vLLM has cleared its device cache (`pool` is its block pool).
    """
    generation = secrets.token_hex(8)
    cleared = side.reset(generation, cleared=is_cleared(pool))
    half.describe(generation=generation, adapters=[])
    # vLLM publishes that its cache is cleared with its next step: the consolidator takes that
    # for the beginning of the generation, and must have heard of it by then.
    if not half.wait_described(RESET_WAIT_S):
        log.warning("the consolidator has not heard of generation %s: device blocks may be "
                    "missing in the index until the next reset", generation)  # fmt: skip
    if not cleared:
        log.warning("vLLM has not cleared its device cache: requests that hit it pass through "
                    "until a reset succeeds")  # fmt: skip
    log.info("generation %s begins", generation)
    return cleared


def weights_are_pushed(config: Any) -> bool:
    """Return whether an engine is made for weights that change while it runs.

    `config` is vLLM's VllmConfig. A worker's extension or another class of workers may write
    weights, a weight transfer does, and a program that launches its workers itself holds them.
    """
    parallel = config.parallel_config
    workers = str(getattr(parallel, "worker_cls", "") or "auto")
    return bool(
        getattr(config, "weight_transfer_config", None) is not None
        or getattr(parallel, "worker_extension_cls", "")
        or getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
        or not (workers == "auto" or workers.startswith("vllm"))
    )


class PrefixCacheWatch:
    """Sees that vLLM has emptied its prefix cache: it makes a new map of hashes each time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._map: Any = None

    def bind(self, pool: Any) -> None:
        """Watch this pool (vllm.v1.core.block_pool.BlockPool) from now on."""
        self._pool = pool
        self.emptied()

    def emptied(self) -> bool:
        """Return whether vLLM has emptied its prefix cache since the last call."""
        before, self._map = self._map, getattr(self._pool, "cached_block_hash_to_block", None)
        return self._map is not before
