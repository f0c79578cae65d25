"""Resets of an engine's caches: its blocks have other names from then on.

vLLM calls a connector's `reset_cache` only for a reset with `reset_connector`. RL frameworks write
new weights into a running engine, and reset vLLM's prefix cache alone, as they do without a
connector, or not at all. What the tiers hold was computed with the old weights. So weights that are
seen to be written (`weight_writes.py`) begin another generation. In an engine that is made for such
updates a reset of the prefix cache alone does, too.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

from kvbm_common.wire.local_fields import Adapter

from kvbm_connectors.client.scheduler import SchedulerHalf
from kvbm_connectors.vllm.block_holds import is_cleared, is_empty
from kvbm_connectors.vllm.scheduler_side import SchedulerSide

log = logging.getLogger(__name__)

RESET_WAIT_S = 1.0
"""For the consolidator's answer to a reset."""


def begin_generation(
    side: SchedulerSide, half: SchedulerHalf, watch: PrefixCacheWatch, *, cleared: bool | None,
    level: int = logging.WARNING,
) -> bool:  # fmt: skip
    """Name blocks afresh: nothing that was stored so far is found again.

    Returns whether vLLM has `cleared` its device cache; None: not known. If not, the consolidator
    hears of the generation when it has (`watch`); that is logged at `level`.
    """
    generation = secrets.token_hex(8)
    cleared = side.reset(generation, cleared=cleared)
    watch.awaited = generation
    if cleared:
        watch.announce_awaited(half, adapters=[])
    else:
        half.describe(adapters=[])
        log.log(level, "vLLM has not cleared its device cache: requests that hit it pass through "
                "until a reset succeeds")  # fmt: skip
    log.log(min(level, logging.INFO), "generation %s begins", generation)
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
        self.awaited = ""
        """The generation that begins when the cache is emptied: vLLM has refused to do so."""
        self._unpublished: object = None
        """vLLM's events of an announced clear. It makes a new list when it publishes them."""
        self._announced_us = 0

    @property
    def pool(self) -> Any:
        return self._pool

    def bind(self, pool: Any) -> None:
        """Watch this pool (vllm.v1.core.block_pool.BlockPool) from now on."""
        self._pool = pool
        self.emptied()

    def emptied(self) -> bool:
        """Return whether vLLM has emptied its prefix cache since the last call."""
        before, self._map = self._map, getattr(self._pool, "cached_block_hash_to_block", None)
        return self._map is not before

    def announce_awaited(
        self, half: SchedulerHalf, adapters: Sequence[Adapter] | None = None
    ) -> None:
        """Tell the consolidator of a generation that has waited for it: the cache is empty now.

        vLLM publishes that with its next step. A consolidator that hears of the generation later
        has named blocks by the one before, and has to ask vLLM for them again.
        """
        if not self.awaited:
            return
        now_us = time.time_ns() // 1_000
        half.describe(generation=self.awaited, generation_us=now_us, adapters=adapters)
        if not half.wait_described(RESET_WAIT_S):
            log.warning("the consolidator has not heard of generation %s: the index has this "
                        "engine's device blocks when it has", self.awaited)  # fmt: skip
        self.awaited = ""
        self._announced_us = now_us
        self._unpublished = getattr(self._pool, "kv_event_queue", None)

    def follow(self, half: SchedulerHalf, *, emptied: bool) -> None:
        """Announce a generation that waits for an emptied cache; or the last one again, if the
        clock was set back before vLLM has published the clear. An older clear begins nothing."""
        if emptied:
            self.announce_awaited(half)
        elif self._unpublished:
            now_us = time.time_ns() // 1_000
            if self._unpublished is not self._pool.kv_event_queue:
                self._unpublished = None
            elif now_us < self._announced_us:
                self._announced_us = now_us
                half.describe(generation_us=now_us)


class Generations:
    """Generations of an engine's names. Used by the scheduler's thread alone."""

    def __init__(
        self, side: SchedulerSide, half: SchedulerHalf, watch: PrefixCacheWatch, *, forgets: bool,
        harmless: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Create those of one engine. `forgets`: a reset of vLLM's prefix cache alone begins one,
        too. Calls of workers by `harmless` names begin none."""
        self._harmless = harmless
        self._side, self._half, self._watch, self._forgets = side, half, watch, forgets
        self._are_written = False

    def reset(self) -> bool:
        """Begin a generation, as vLLM asks for one; return whether it has cleared its cache."""
        self._watch.emptied()  # This reset is answered, and what was written before it.
        self._are_written = False
        cleared = is_cleared(self._watch.pool)
        return begin_generation(self._side, self._half, self._watch, cleared=cleared)

    def weights_written(self, name: str) -> bool:
        """Note that a call of this name may have written weights: what is computed from the next
        step on has other names. False: its name is known as harmless here."""
        is_write = name not in self._harmless
        self._are_written |= is_write
        return is_write

    def look(self) -> None:
        """Find nothing of before if weights were written, or vLLM has emptied its cache alone and
        they may be others. To be called before a step computes or finds anything."""
        emptied = self._watch.emptied()
        if self._are_written:
            self._are_written = False
            log.debug("weights were written")
            # vLLM goes on with what its requests and its device cache have of the old weights.
            cleared = is_empty(self._watch.pool)
            # Weights may come a tensor at a time, each by a call of its own: one line tells.
            level = logging.DEBUG if self._watch.awaited else logging.WARNING
            begin_generation(self._side, self._half, self._watch, cleared=cleared, level=level)
        elif emptied and self._forgets:
            log.info("vLLM's prefix cache was reset, and weights may be others")
            self.reset()
        else:
            if emptied:
                self._side.device_cleared()
            self._watch.follow(self._half, emptied=emptied)
