"""The storage of one rank: its pools' stores, under SGLang's calls, without SGLang.

Every call is safe to make from any thread, at any time after `register`. What goes wrong here is a
miss for SGLang, which swallows exceptions: so each is logged and counted here.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvbm_common.identity import SequenceHash, of_tenant
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.wire.consolidator import Attach

from kvbm_connectors.client.affinity import unbound
from kvbm_connectors.client.scheduler import new_incarnation
from kvbm_connectors.sglang.engine_life import life_of_engine
from kvbm_connectors.sglang.engine_types import (
    ExtraInfo,
    HostPool,
    Indices,
    PoolTransfer,
    StorageConfig,
)
from kvbm_connectors.sglang.flushes import EngineGeneration, FlushWatch, flushed_path
from kvbm_connectors.sglang.generation import Generation, unwritable
from kvbm_connectors.sglang.hits import (
    ALL_PAGES,
    TRAILING_PAGES,
    Hits,
    combine,
    trailing_lengths,
)
from kvbm_connectors.sglang.options import CALL_MAX_S, Options, Stream
from kvbm_connectors.sglang.pages import (
    KV,
    UnknownPool,
    is_shared,
    names_of,
    namespace_of,
    pages_of,
    refusal_of_pool,
    regions_of,
)
from kvbm_connectors.sglang.stops import STOPS
from kvbm_connectors.sglang.store import Store

log = logging.getLogger(__name__)

STATISTICS_MAX = 1_024
"""Batches that are remembered until SGLang asks for them, which it does several times a second."""
FIRST_ATTACH_S = 5.0
"""Wait for the first attachment: the pool with the largest pages may have to cut the arena."""
WRITE_PAUSE_S = 1.0
"""Time without writes after one that waited for its whole deadline in vain. SGLang writes the parts
of a prompt one after the other, and its scheduler ends where a flush waits 10 s for that thread."""
T = TypeVar("T")


@dataclass(slots=True)
class StorageStatistics:
    """Batches since the last question: pages, and GB/s."""

    read_pages: list[int] = field(default_factory=list)
    read_gb_per_s: list[float] = field(default_factory=list)
    written_pages: list[int] = field(default_factory=list)
    written_gb_per_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool that SGLang has registered."""

    pool: HostPool
    store: Store
    namespace: bytes
    """The digest."""
    generation: Generation
    engine_generation: EngineGeneration
    is_writer: bool

    def names(self, keys: Sequence[str]) -> list[SequenceHash]:
        generation = self.generation.read() + self.engine_generation.read()
        return names_of(self.namespace, generation, keys)


class Storage:
    """All pools of one rank."""

    def __init__(
        self, config: StorageConfig, options: Options, stream: Stream, *, refusal: str = "",
        replica: int | None = None, flushes: FlushWatch | None = None,
    ) -> None:  # fmt: skip
        """Create the pools of one rank. `refusal` says why pages have no names: then nothing is
        stored, and nothing found. `replica` is its data-parallel rank; None: the configuration's.
        `flushes` sees when SGLang flushes its caches; None: by the options alone.
        """
        self.counts: Counter[str] = Counter()
        self._flushes = FlushWatch(options.plain_reset) if flushes is None else flushes
        self._pass_through_reason = ""
        self._config, self._options = config, options
        self._stream = stream
        self._replica = config.dp_rank if replica is None else replica
        self._incarnation = new_incarnation()
        self._limiter = OncePerKind(log)
        self._lock = threading.Lock()
        self._pools: dict[str, _Pool] = {}
        self._waiting: list[Store] = []
        """Stores that start together, when SGLang has named all pools."""
        self._batches: deque[tuple[str, int, float]] = deque(maxlen=STATISTICS_MAX)
        self._started = False
        self._writes_from_s = 0.0
        """No write begins before this time, of the monotonic clock."""
        if refusal:
            self._pass_through(refusal)
        elif reason := unwritable(options.settings.state_dir):
            log.error("`clear` will fail, KVBM_STATE_DIR cannot be written: %s", reason)

    # --- attach and detach ------------------------------------------------------------------

    def register(self, pool: HostPool, name: str) -> None:
        """Take a pool in. Raises UnknownPool, or KvbmError when its memory cannot be lent."""
        if self._pass_through_reason:
            return
        if refusal := refusal_of_pool(self._config, name, pool):
            self._pass_through(refusal)
            return
        known = self._pools.get(name)
        if known is not None:
            if known.pool is not pool:
                raise UnknownPool(f"a second pool of the name {name!r}")
            return
        with unbound():
            made = self._make(pool, name)
        with self._lock:
            self._flushes.add(pool)
            self._pools[name] = made
            if not self._started:
                self._waiting.append(made.store)
        if self._started:
            made.store.start()

    def _pass_through(self, refusal: str) -> None:
        """Pass through from now on: nothing is stored, and nothing found."""
        log.error("KVBM passes through: %s", refusal)
        self._pass_through_reason = refusal
        self.close()

    def _make(self, pool: HostPool, name: str) -> _Pool:
        config = self._config
        regions = regions_of(pool)
        revision = self._options.revision
        namespace = namespace_of(config, name, pool, regions, revision=revision)
        namespace = of_tenant(namespace, self._options.settings.tenant)
        engine = f"sglang-{self._incarnation[:8]}-{name}"
        is_first = config.tp_rank == config.pp_rank == config.attn_cp_rank == 0  # It publishes.
        followed = self._stream if name == KV and is_first else Stream()
        stream = Attach(
            engine=engine,
            incarnation=self._incarnation,
            endpoint=followed.endpoint,
            replay_endpoint=followed.replay_endpoint,
            topic=followed.topic,
            rank=self._replica,
            namespace=namespace,
            shows_extra_keys=followed.shows_extra_keys,
        )
        store = Store(
            engine=engine,
            incarnation=self._incarnation,
            namespace=namespace,
            regions=regions,
            options=self._options,
            stream=stream,
        )
        log.info(
            "pool %s: %d pages of %d bytes in %d pieces are lent as %s",
            name, regions[0].blocks, store.block_bytes, len(regions), namespace.layout,
        )  # fmt: skip
        is_one_copy = is_shared(config, name, pool)
        writer = config.is_storage_writer or not is_one_copy
        digest = namespace.digest
        life = life_of_engine() if is_one_copy else None
        state_dir = self._options.settings.state_dir
        generation = Generation(state_dir, digest, life)
        told = None  # Ranks that share pages, and no others, have to agree.
        if life is not None and config.tp_size * config.attn_cp_size > 1:
            told = flushed_path(state_dir, digest, life, self._replica)
        since_flush = EngineGeneration(told, is_writer=writer)
        return _Pool(pool, store, digest, generation, since_flush, writer)

    def start(self) -> None:
        """Start the stores when all pools of the beginning are named: the one with the largest
        pages attaches first."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._started = True
            if self._flushes.forgets and self._flushes.is_blind and not self._pass_through_reason:
                log.warning("flushes of this SGLang's caches are not seen: call `clear` after each "
                            "update of its weights")  # fmt: skip
        waiting.sort(key=lambda store: -store.block_bytes)
        with unbound():
            for number, store in enumerate(waiting):
                store.start()
                if number == 0 and len(waiting) > 1:
                    store.wait_attached(FIRST_ATTACH_S)

    def close(self) -> None:
        """Detach. SGLang's threads have ended by then, or are told that nothing is found."""
        with self._lock:
            pools, self._pools = self._pools, {}
            self._waiting = []
        for entry in pools.values():
            entry.store.close()
            entry.engine_generation.close()
        if pools:
            log.info("detached: %s", self.all_counts(pools))

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait until all pools are attached; for tests and for those who must know."""
        give_up_s = time.monotonic() + timeout_s
        return all(
            entry.store.wait_attached(max(0.0, give_up_s - time.monotonic()))
            for entry in self._pools.values()
        )

    # --- the calls --------------------------------------------------------------------------

    def exists(self, keys: Sequence[str], name: str = KV) -> int:
        """Return the number of consecutive hits from the first key on."""
        return self._guarded("exists", 0, lambda: self._exists(keys, name))

    def _exists(self, keys: Sequence[str], name: str, give_up_s: float = math.inf) -> int:
        entry = self._pools[name]
        return entry.store.find(entry.names(keys), give_up_s)

    def get(self, keys: Sequence[str], indices: Indices, name: str = KV) -> list[bool]:
        """Fill the pages of these token slots."""
        return self._guarded("get", [False] * len(keys), lambda: self._get(keys, indices, name))

    def _get(self, keys: Sequence[str], indices: Indices, name: str) -> list[bool]:
        entry = self._pools[name]
        blocks = pages_of(entry.pool, indices, len(keys))
        started_s = time.perf_counter()
        flags = entry.store.load(entry.names(keys), blocks)
        self._took("read", sum(flags), entry.store.block_bytes, started_s)
        return flags

    def set(
        self, keys: Sequence[str], indices: Indices, extra: ExtraInfo | None, name: str = KV
    ) -> list[bool]:
        """Store the pages of these token slots: all, or SGLang hears that none was."""
        stored = self._guarded("set", False, lambda: self._set(keys, indices, extra, name))
        return [stored] * len(keys)

    def _set(
        self, keys: Sequence[str], indices: Indices, extra: ExtraInfo | None, name: str
    ) -> bool:
        entry = self._pools[name]
        if not entry.is_writer:
            return True  # Another rank stores the same bytes under the same name.
        blocks = pages_of(entry.pool, indices, len(keys))
        if time.monotonic() < self._writes_from_s:
            self.counts["paused_writes"] += 1
            return False
        started_s = time.perf_counter()
        before = extra.prefix_keys if extra is not None and name == KV else None
        parents = entry.names(before[-1:]) if before else [entry.store.namespace.root]
        stored = entry.store.store(parents[0], entry.names(keys), blocks)
        self._took("written", len(keys) if stored else 0, entry.store.block_bytes, started_s)
        deadline_s = self._options.settings.offer_deadline_ms / 1000
        if not stored and time.perf_counter() - started_s >= deadline_s:
            self._writes_from_s = time.monotonic() + WRITE_PAUSE_S
        return stored

    def exists_in_all(self, keys: Sequence[str], transfers: Sequence[PoolTransfer]) -> Hits:
        """Return how far a prefix can be restored with its part in every pool."""
        nothing = Hits(0, {}, [])
        return self._guarded("exists", nothing, lambda: self._exists_in_all(keys, transfers))

    def _exists_in_all(self, keys: Sequence[str], transfers: Sequence[PoolTransfer]) -> Hits:
        give_up_s = time.monotonic() + CALL_MAX_S
        pages = self._exists(keys, KV, give_up_s)
        pools = [
            (_text(transfer.name), self._lengths(keys[:pages], transfer, give_up_s))
            for transfer in transfers
            if pages
        ]
        return combine(KV, pages, pools)

    def _lengths(
        self, keys: Sequence[str], transfer: PoolTransfer, give_up_s: float
    ) -> Sequence[int]:
        """Return the prefix lengths that a pool has its part of; raises UnknownPool for an unknown
        hit policy."""
        name, policy = _text(transfer.name), _text(transfer.hit_policy)
        if policy == ALL_PAGES:
            return range(1, self._exists(keys, name, give_up_s) + 1)
        if policy == TRAILING_PAGES:
            entry = self._pools[name]
            window = max(1, len(transfer.keys or ()))
            # Ranks intersect their lengths: the longest one of each may be none of all.
            ranks = self._config.tp_size * self._config.pp_size * self._config.attn_cp_size
            found = entry.store.present(
                entry.names(keys), window, every=ranks > 1, give_up_s=give_up_s
            )
            return trailing_lengths(found, window)
        raise UnknownPool(f"pool {name!r} has the hit policy {policy!r}")

    def _took(self, what: str, pages: int, block_bytes: int, started_s: float) -> None:
        if pages:
            seconds = time.perf_counter() - started_s
            self._batches.append((what, pages, pages * block_bytes / seconds / 1e9))

    def _guarded(self, what: str, instead: T, call: Callable[[], T]) -> T:
        if self._pass_through_reason or (STOPS.count and what != "set"):
            self.counts[f"{'refused' if self._pass_through_reason else 'stopped'}.{what}"] += 1
            return instead
        try:
            self._look_for_flush()
            return call()
        except Exception as error:  # SGLang would swallow it, and no log would tell.
            self.counts[f"failed.{what}.{type(error).__name__}"] += 1
            self._limiter.warning(what, f"a call failed and counts as a miss: {error!r}")
            return instead

    def _look_for_flush(self) -> None:
        """Name pages afresh before the first call after a flush, if this engine forgets then."""
        with self._lock:
            seen = self._flushes.counts.total()
            if self._flushes.is_due():
                for entry in self._pools.values():
                    entry.engine_generation.renew()
                log.info("SGLang has flushed its caches, or serves other weights: nothing that was "
                         "stored so far is found by this engine")  # fmt: skip
            elif self._flushes.counts.total() > seen:
                self._limiter.warning(
                    "flush", "SGLang has flushed its caches, and finds what was stored before: if "
                    "its weights are others now, call `clear`, or set plain_reset to forget",
                )  # fmt: skip

    def count_unsupported(self, what: str) -> None:
        """Count a call that we do not serve, and warn; the call is a miss."""
        self.counts[f"unsupported.{what}"] += 1
        self._limiter.warning("unsupported", f"{what} is not served: set interface_v1 to 1")

    def clear(self) -> None:
        """Clear all pools: nothing that was stored so far is found again, by any engine of this
        host.

        Raises OSError where that cannot be told to the others: SGLang says that it has failed. This
        process finds nothing from before all the same.
        """
        if self._pass_through_reason:
            self.counts["refused.clear"] += 1
            return
        failed: list[OSError] = []
        for entry in self._pools.values():
            try:
                entry.generation.renew()
            except OSError as error:  # No pool of this process keeps what was before.
                failed.append(error)
        if failed:
            self.counts[f"failed.clear.{type(failed[0]).__name__}"] += 1
            log.error("clear failed: other engines find what was stored before: %r", failed[0])
            raise failed[0]

    # --- figures ----------------------------------------------------------------------------

    def statistics(self) -> StorageStatistics:
        """Return the batches since the last call, and forget them."""
        found = StorageStatistics()
        while self._batches:
            what, pages, rate = self._batches.popleft()
            if what == "read":
                found.read_pages.append(pages)
                found.read_gb_per_s.append(rate)
            else:
                found.written_pages.append(pages)
                found.written_gb_per_s.append(rate)
        return found

    def all_counts(self, pools: Mapping[str, _Pool] | None = None) -> dict[str, int]:
        """Return all counters, those of each pool under its name."""
        found = dict(self.counts + self._flushes.counts)
        for name, entry in (self._pools if pools is None else pools).items():
            found |= {f"{name}.{what}": n for what, n in entry.store.all_counts().items()}
        return found


def _text(value: str) -> str:
    """Return one of SGLang's names as text: they are enums that are strings."""
    return str(getattr(value, "value", value))
