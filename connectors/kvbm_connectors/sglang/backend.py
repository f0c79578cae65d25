"""Backend as SGLang knows it: `HiCacheStorage`, translated to `Storage`.

`--hicache-storage-backend dynamic` makes one of these in each rank, and another one whenever a
storage is attached while it serves.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from kvbm_common.errors import KvbmError
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvbm_connectors.sglang import event_hashes
from kvbm_connectors.sglang.adapters import process_start_ns
from kvbm_connectors.sglang.flushes import FlushWatch, marks_of_pushed_weights
from kvbm_connectors.sglang.options import Options, Stream, stream_of
from kvbm_connectors.sglang.pages import KV
from kvbm_connectors.sglang.pushes import pushes_seen
from kvbm_connectors.sglang.stops import watch_stops
from kvbm_connectors.sglang.storage import Storage
from kvbm_connectors.sglang.weights import revision_of

log = logging.getLogger(__name__)

NEEDED = "0.5.23"
"""The first release of SGLang that calls `on_host_pools_registered`."""
NOTED = frozenset({"weight_version", "model_path"})
"""Fields of SGLang's configuration that it sets when weights are updated."""


class KvbmHiCacheStorage(HiCacheStorage):  # type: ignore[misc]
    """One rank's storage. Pages are read and written where they are: zero copy, `interface_v1`."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        options = Options.read(storage_config.extra_config or {})
        arguments = _server_args()
        refusal = _too_old()
        replica = publisher_rank(storage_config.dp_rank)
        if not refusal:
            try:
                options = options.of_revision(_revision(arguments, options.revision, replica))
            except KvbmError as error:
                refusal = f"{error} ({error.code})"
        stream = Stream() if refusal else events_of(arguments, replica)
        flushes = _flushes(arguments, options.plain_reset, storage_config)
        watch_stops()
        self.storage = Storage(
            storage_config, options, stream, refusal=refusal, replica=replica, flushes=flushes
        )

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self.storage.register(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self.storage.register(host_pool, str(host_pool_name))

    def on_host_pools_registered(self) -> None:
        self.storage.start()

    def exists(self, key: str) -> bool:
        return self.storage.exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self.storage.exists(keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self.storage.get(keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self.storage.set(keys, host_indices, extra_info)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        hits = self.storage.exists_in_all(keys, pool_transfers or [])
        return PoolTransferResult(hits.pages, dict(hits.by_pool), list(hits.restorable))

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            transfer.name: self.storage.get(
                transfer.keys or [], transfer.host_indices, str(transfer.name)
            )
            for transfer in transfers
        }

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            transfer.name: self.storage.set(
                transfer.keys or [], transfer.host_indices, extra_info, str(transfer.name)
            )
            for transfer in transfers
        }

    def clear(self) -> None:
        self.storage.clear()

    def get_stats(self) -> Any:
        from sglang.srt.observability.metrics_collector import StorageMetrics

        found = self.storage.statistics()
        return StorageMetrics(
            prefetch_pgs=found.read_pages,
            backup_pgs=found.written_pages,
            prefetch_bandwidth=found.read_gb_per_s,
            backup_bandwidth=found.written_gb_per_s,
        )

    def close(self) -> None:
        """Detach; SGLang calls it when the storage is detached or could not be attached."""
        self.storage.close()

    # --- the copying interface, which is not served: attaching without `interface_v1` fails -----

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        self.storage.count_unsupported("get")

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        self.storage.count_unsupported("batch_get")
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        self.storage.count_unsupported("set")
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        self.storage.count_unsupported("batch_set")
        return False


def _too_old() -> str:
    """Return why this SGLang cannot be served; `""` if it can. Releases before 0.5.23 never tell a
    storage that all host pools are registered, where ours starts."""
    if hasattr(HiCacheStorage, "on_host_pools_registered"):
        return ""
    return f"SGLang {_version()} is too old: {NEEDED} or later is needed"


def _version() -> str:
    import sglang

    return str(getattr(sglang, "__version__", ""))


def _server_args() -> Any:
    """Return SGLang's arguments; None outside a server."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except Exception as error:  # Another SGLang may keep them elsewhere, and say so in any way.
        log.info("the server's arguments are not known: %r", error)
        return None


def publisher_rank(configured: int) -> int:
    """Return the data-parallel rank that SGLang adds to the port of its events.

    The configuration of a storage has it with DP attention alone.
    """
    try:
        from sglang.srt.disaggregation.kv_events import select_kv_publisher_dp_rank
        from sglang.srt.runtime_context import get_parallel

        here = get_parallel()
        found = select_kv_publisher_dp_rank(here.attn_dp_size, here.attn_dp_rank, here.dp_rank)
        return int(found) or configured
    except Exception as error:  # Another SGLang, or no server: of any type.
        log.info("the data-parallel rank is the configuration's, %d: %r", configured, error)
        return configured


def _revision(arguments: Any, named: str, replica: int) -> str:
    """Return what stands for the weights and all that changes what is computed with them."""
    late = is_late(arguments)
    if late and not named:
        log.warning(
            "attached while the engine serves, and its weights may have been updated: its pages "
            "are found by this attachment alone, unless `revision` names the weights"
        )
    return revision_of(
        arguments, named=named, since_ns=process_start_ns(), version=_version(), is_late=late,
        replica=replica,
    )  # fmt: skip


def is_late(arguments: Any) -> bool:
    """Tell whether a storage is attached to an engine that serves: SGLang notes its kind
    afterwards, and at the engine's start before."""
    if arguments is None:
        return False
    try:
        from sglang.srt.runtime_context import get_memory

        return not get_memory().hicache_storage_backend
    except Exception:  # Another SGLang keeps it in its arguments.
        return not getattr(arguments, "hicache_storage_backend", None)


def _flushes(arguments: Any, choice: str, storage_config: Any) -> FlushWatch:
    """Return what sees flushes of SGLang's caches and weights that are pushed; log where the engine
    forgets with each flush."""
    marks = marks_of_pushed_weights(arguments)
    if (pushes := pushes_seen()) is None and choice == "auto":
        log.warning("weights that are pushed into this SGLang are not seen: each flush of its "
                    "caches counts as a push")  # fmt: skip
    watch = FlushWatch(
        choice, is_pushed=bool(marks) or pushes is None, serving=serving, updates=updates,
        pushes=pushes or int,
    )  # fmt: skip
    if watch.forgets:
        log.info("a flush of SGLang's caches hides what was stored before: plain_reset is %s, "
                 "marks of pushed weights are %s", choice, marks)  # fmt: skip
        if storage_config.is_mla_model and (getattr(arguments, "nnodes", None) or 1) > 1:
            log.warning("ranks on other hosts share pages until SGLang flushes its caches: no page "
                        "is loaded afterwards")  # fmt: skip
    return watch


def serving() -> tuple[str, str] | None:
    """Return the version and the path of the weights that SGLang serves now; None: not known."""
    try:
        from sglang.srt.runtime_context import get_model, get_serving

        return str(get_serving().weight_version), str(get_model().model_path)
    except Exception:  # Another SGLang, or no server: of any type.
        return None


def updates() -> int:
    """Return how often SGLang has noted other weights in this process."""
    try:
        from sglang.srt.runtime_context import get_context

        log_of_changes = get_context().overrides_log()
        return sum(not NOTED.isdisjoint(fields) for _, fields in log_of_changes)
    except Exception:  # As above.
        return 0


def events_of(arguments: Any, rank: int) -> Stream:
    """Return the stream of one data-parallel rank, whose extra keys are looked for only where
    SGLang's hashes are known to show them."""
    stream = stream_of(getattr(arguments, "kv_events_config", None), rank)
    if stream.shows_extra_keys and (reason := event_hashes.not_ours(arguments)):
        log.warning("blocks of requests with an extra_key look like those without: %s", reason)
        return msgspec.structs.replace(stream, shows_extra_keys=False)
    return stream
