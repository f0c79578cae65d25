"""Every setting: its variable, default, type, place in the file and help."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvbm_common.config import schema
from kvbm_common.config.access_declarations import SECTION, AccessSettings
from kvbm_common.config.schema import Setting, setting
from kvbm_common.eviction import POLICIES

PARTITIONS_MAX = 64

# ruff: noqa: RUF009 - `setting` returns a dataclass field, as dataclasses.field does.


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredSettings(AccessSettings):
    """The settings by section. Sizes in GB mean 1e9 bytes."""

    # fmt: off
    # -- host tier (G2) --
    cpu_cache_gb: float = setting(
        "DYN_KVBM_CPU_CACHE_GB", 0.0, schema.number(0), section="host_tier", unit="GB",
        help="Size of the host tier's arena, for all ranks together.")
    cpu_cache_override_num_blocks: int | None = setting(
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", None, schema.integer(0), section="host_tier",
        unit="blocks", help="Size of the arena in blocks; wins over the size in GB unless 0.")
    staging_gb: float = setting(
        "KVBM_STAGING_GB", 0.25, schema.number(0, inclusive=False), section="host_tier",
        unit="GB", help="Size of the arena when only the disk cache has a size.")
    host_offload_prefix_min_priority: int = setting(
        "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY", 0, schema.integer(0, 100),
        section="host_tier",
        help="Offload a request's blocks up to the first one below this priority (TensorRT-LLM).")
    eviction_policy: str = setting(
        "KVBM_EVICTION_POLICY", "lru", schema.choice(*POLICIES),
        section="host_tier",
        help="Which block leaves a full host tier first; `kvbm simulate` compares them.")
    verify_host_reads: str = setting(
        "KVBM_VERIFY_HOST_READS", "always", schema.choice("never", "sampled", "always"),
        section="host_tier",
        help="Which loads from host memory are compared with checksums: all, one in 16, or none.")
    scrub_cpu_percent: float = setting(
        "KVBM_SCRUB_CPU_PERCENT", 1.0, schema.number(0, maximum=100), section="host_tier",
        unit="% of a core", help="What comparing idle blocks with checksums may cost; 0: off.")
    scrub_round_s: float = setting(
        "KVBM_SCRUB_ROUND_S", 600.0, schema.number(0, maximum=31 * 86_400), section="host_tier",
        unit="s", help="The least time between two beginnings of this, all through the arena.")
    host_tiers: int = setting(
        "KVBM_HOST_TIERS", 1, schema.integer(1, 64), section="host_tier",
        help="How many host tiers `kvbm up` starts. Engines are shared out among them, and the "
        "size is: one host tier keeps one core busy.")
    host_tier_endpoint: str = setting(
        "KVBM_HOST_TIER_ENDPOINT", "", schema.ENDPOINT, section="host_tier",
        default_text="ipc://RUNTIME_DIR/host-tier.sock",
        help="Where the host tier listens for engines; over tcp:// with keys, or "
        "`KVBM_ENGINES_OPEN`.")

    # -- disk tier (G3) --
    disk_cache_gb: float = setting(
        "DYN_KVBM_DISK_CACHE_GB", 0.0, schema.number(0), section="disk_tier", unit="GB",
        help="Size of the disk tier's file.")
    disk_cache_override_num_blocks: int | None = setting(
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", None, schema.integer(0), section="disk_tier",
        unit="blocks", help="Size of the file in blocks; wins over the size in GB unless 0.")
    disk_cache_dirs: tuple[Path, ...] = setting(
        "DYN_KVBM_DISK_CACHE_DIR", (schema.UNSET_DIR,), schema.PATHS, section="disk_tier",
        default_text="`disk` in `KVBM_STATE_DIR`",
        help="Directory of the disk tier's files; of several, each gets a disk tier of its own and "
        "an equal share of the size.")
    disk_zerofill_fallback: bool = setting(
        "DYN_KVBM_DISK_ZEROFILL_FALLBACK", False, schema.BOOLEAN, section="disk_tier",
        help="Write zeros where the file system cannot preallocate.")
    disk_disable_o_direct: bool = setting(
        "DYN_KVBM_DISK_DISABLE_O_DIRECT", False, schema.BOOLEAN, section="disk_tier",
        help="Use the page cache, for file systems without O_DIRECT.")
    disable_disk_offload_filter: bool = setting(
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER", False, schema.BOOLEAN, section="disk_tier",
        help="Write every block to disk, not only those that were used again.")
    disk_write_budget_gb_per_day: float = setting(
        "KVBM_DISK_WRITE_BUDGET_GB_PER_DAY", 0.0, schema.number(0), section="disk_tier", unit="GB",
        help="Each disk tier writes no more than so much in any 24 hours; 0: no limit.")
    disk_eviction_policy: str = setting(
        "KVBM_DISK_EVICTION_POLICY", "lru", schema.choice(*POLICIES),
        section="disk_tier",
        help="Which block leaves a full disk or bucket first; `kvbm simulate` compares them.")
    disk_nixl_backend: str = setting(
        "KVBM_DISK_NIXL_BACKEND", "auto", schema.choice("auto", "gds", "gds_mt"),
        section="disk_tier", help="What moves blocks to and from disk: NIXL POSIX over io_uring, "
        "or AIO where that is forbidden (`auto`); GDS or GDS_MT, where they work.")
    disk_queue_depth: int | None = setting(
        "KVBM_DISK_QUEUE_DEPTH", None, schema.integer(1, 1024), section="disk_tier",
        default_text="measured when the store is opened",
        help="How many blocks are read from a disk, and written to it, at the same time.")
    disk_keys: str = setting(
        "KVBM_DISK_KEYS", "", schema.TEXT, section="disk_tier", secret=True,
        only_for=("disk-tier", "object-tier"),
        help="Keys that blocks are encrypted with, on disk and in the bucket: 64 hex digits for "
        "all namespaces, or NAMESPACE=64 hex digits, several with commas between; never printed.")
    disk_keys_file: Path | None = setting(
        "KVBM_DISK_KEYS_FILE", None, schema.PATH, section="disk_tier",
        help="A file with such keys, one a line.")
    disk_sync: str = setting(
        "KVBM_DISK_SYNC", "commit", schema.choice("commit", "interval", "never"),
        section="disk_tier", help="When the journal is synchronised: before each commit, every "
        "second, or by the operating system.")

    # -- object tier (G4) --
    object_enabled: bool = setting(
        "DYN_KVBM_OBJECT_ENABLED", False, schema.BOOLEAN, section="object_tier",
        help="Keep blocks in a bucket of an S3-compatible store, too.")
    object_bucket: str = setting(
        "DYN_KVBM_OBJECT_BUCKET", "", schema.TEXT, section="object_tier",
        help="Name of the bucket. It must exist; several hosts may share it.")
    object_endpoint: str = setting(
        "DYN_KVBM_OBJECT_ENDPOINT", "", schema.HTTP_URL, section="object_tier",
        default_text="AWS", help="Where the store is, unless it is AWS.")
    object_region: str = setting(
        "DYN_KVBM_OBJECT_REGION", "us-east-1", schema.TEXT, section="object_tier",
        help="Region of the bucket.")
    object_access_key: str = setting(
        "DYN_KVBM_OBJECT_ACCESS_KEY", "", schema.TEXT, section="object_tier", secret=True,
        only_for=("object-tier",),
        default_text="AWS' own chain of credentials", help="Access key; never printed.")
    object_secret_key: str = setting(
        "DYN_KVBM_OBJECT_SECRET_KEY", "", schema.TEXT, section="object_tier", secret=True,
        only_for=("object-tier",),
        default_text="AWS' own chain of credentials", help="Secret key; never printed.")
    object_url: str = setting(
        "KVBM_OBJECT_URL", "", schema.OBJECT_URL, section="object_tier",
        default_text="DYN_KVBM_OBJECT_BUCKET", help="Where blocks are kept for all hosts, in one "
        "word: file:///DIRECTORY on a file system that they share, or s3://BUCKET. Switches the "
        "object tier on.")
    object_num_blocks: int = setting(
        "DYN_KVBM_OBJECT_NUM_BLOCKS", 100_000, schema.integer(1, 2**32 - 2),
        section="object_tier", unit="blocks", help="How many blocks the bucket holds, all hosts "
        "together: give all of them the same number. The oldest are deleted beyond it.")
    object_prefix: str = setting(
        "KVBM_OBJECT_PREFIX", "kvbm", schema.PREFIX, section="object_tier",
        help="Names of objects begin with it. Whatever else is in the bucket is left alone.")
    object_ttl_s: float = setting(
        "KVBM_OBJECT_TTL_S", 0.0, schema.number(0), section="object_tier", unit="s",
        help="Objects that were stored longer ago are deleted by the next listing; 0: none are.")
    object_list_s: float = setting(
        "KVBM_OBJECT_LIST_S", 300.0, schema.number(0.05), section="object_tier", unit="s",
        help="How often the bucket is listed, to find what other hosts have stored and deleted. A "
        "listing is one request for 1,000 objects.")
    object_concurrency: int = setting(
        "KVBM_OBJECT_CONCURRENCY", 16, schema.integer(1, 64), section="object_tier",
        help="Blocks in flight to and from the store; each has memory of its own for one block.")
    object_path_style: bool = setting(
        "KVBM_OBJECT_PATH_STYLE", True, schema.BOOLEAN, section="object_tier",
        help="Name the bucket in the path, not in the host name.")
    disable_object_offload_filter: bool = setting(
        "KVBM_DISABLE_OBJECT_OFFLOAD_FILTER", False, schema.BOOLEAN, section="object_tier",
        help="Store every block, not only those that were used again.")

    # -- tenants --
    tenant: str = setting(
        "KVBM_TENANT", "", schema.TENANT, section="tenants",
        help="Whose blocks an engine's are: engines of different tenants share none, and each "
        "tenant has a share of every tier. Empty: those of engines without a tenant.")
    tenant_shares: str = setting(
        "KVBM_TENANT_SHARES", "", schema.TENANT_SHARES, section="tenants",
        default_text="`*=1`: the same for each",
        help="What tenants weigh in host memory, on disk and in its write budget, as "
        "`gold=3,silver=1`; `*` is each tenant that is not listed. A tenant may use what others "
        "leave free, and keeps its share when they want all.")

    hint_pin_percent: float = setting(
        "KVBM_HINT_PIN_PERCENT", 40.0, schema.number(0, maximum=45), section="tenants", unit="%",
        help="What the hints of agents may pin of their tenant's share of host memory; 0: hints "
        "are not taken.")

    # -- transfers and leases --
    max_concurrent_transfers: int = setting(
        "DYN_KVBM_MAX_CONCURRENT_TRANSFERS", 4, schema.integer(1, 1024), section="transfers",
        help="How many batches a tier moves at the same time.")
    max_transfer_batch_size: int = setting(
        "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE", 16, schema.integer(1, 4096), section="transfers",
        unit="blocks", help="How many blocks one batch moves at most. Of smaller blocks, pulls, "
        "fills and writes move this many MiB, 256 blocks at most; writes to a fast disk four "
        "times that.")
    lease_ms: int = setting(
        "KVBM_LEASE_MS", 5000, schema.integer(100, 600_000), section="transfers", unit="ms",
        help="How long a lease pins blocks unless it is released earlier.")
    onboard_deadline_ms: int = setting(
        "KVBM_ONBOARD_DEADLINE_MS", 2000, schema.integer(10, 600_000), section="transfers",
        unit="ms", help="After this an onboard is a miss and the engine recomputes.")
    recompute_tokens_per_s: float = setting(
        "KVBM_RECOMPUTE_TOKENS_PER_S", 0.0, schema.number(0), section="transfers",
        unit="tokens/s", help="How fast an engine computes a prompt, instead of what its connector "
        "measures; 0: what it measures.")
    load_or_compute: bool = setting(
        "KVBM_LOAD_OR_COMPUTE", False, schema.BOOLEAN, section="transfers",
        help="Leave blocks on disk, in a bucket or on another host that would take longer to come "
        "than the engine takes to compute them, by what both took lately (vLLM). For the engine "
        "and the host tier. False: all are brought.")
    onboard_mover: str = setting(
        "KVBM_ONBOARD_MOVER", "auto", schema.choice("auto", "mapped", "nixl"),
        section="transfers", help="How an engine's worker reads the arena: by a copy out of its "
        "mapping, or by NIXL. auto: by NIXL where it cannot be mapped.")
    offer_deadline_ms: int = setting(
        "KVBM_OFFER_DEADLINE_MS", 5000, schema.integer(10, 600_000), section="transfers",
        unit="ms", help="How long an engine holds offered blocks for the pull.")
    promise_gb: float = setting(
        "KVBM_PROMISE_GB", 1.0, schema.number(0, inclusive=False), section="transfers", unit="GB",
        help="Shared memory of a TensorRT-LLM engine for blocks that it was promised and has not "
        "loaded yet, taken when used: what one step can load.")
    peer_pulls: bool = setting(
        "KVBM_PEER_PULLS", True, schema.BOOLEAN, section="transfers",
        help="Read blocks of other hosts, and let other hosts read those of this one.")
    peer_deadline_ms: int = setting(
        "KVBM_PEER_DEADLINE_MS", 1000, schema.integer(10, 60_000), section="transfers", unit="ms",
        help="How long a batch may take to come from another host, counted from its start.")
    peer_pulls_max: int = setting(
        "KVBM_PEER_PULLS_MAX", 4, schema.integer(1, 64), section="transfers",
        help="How many batches come from other hosts at the same time.")
    miss_filter: bool = setting(
        "KVBM_MISS_FILTER", True, schema.BOOLEAN, section="transfers",
        help="List in shared memory which blocks a lookup may find, so that an engine answers a "
        "lookup that finds nothing at once. When false, it asks.")
    leader_worker_init_timeout_s: int = setting(
        "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS", 1800, schema.integer(1), section="transfers",
        unit="s", help="How long the ranks of one engine wait for each other.")

    # -- metrics and admin API --
    metrics: bool = setting(
        "DYN_KVBM_METRICS", True, schema.BOOLEAN, section="metrics",
        help="Serve `/metrics`. When false, the admin API stays and `/metrics` answers 404; "
        "KVBM's own default is false.")
    metrics_port: int = setting(
        "DYN_KVBM_METRICS_PORT", 6880, schema.PORT, section="metrics",
        help="HTTP port of `/metrics` and the admin API.")
    metrics_bind: str = setting(
        "KVBM_METRICS_BIND", "127.0.0.1", schema.TEXT, section="metrics",
        help="Address that the HTTP port is opened on; another than loopback with a token, or "
        "`KVBM_ADMIN_OPEN`.")
    service_port: int = setting(
        "KVBM_SERVICE_PORT", 0, schema.integer(0, 65535), section="metrics",
        help="HTTP port of each service's own `/metrics`, `/healthz` and `/readyz`; 0: none. "
        "`kvbm up` gives its services this port and those above it, in the order in which it "
        "lists them.")
    service_bind: str = setting(
        "KVBM_SERVICE_BIND", "127.0.0.1", schema.TEXT, section="metrics",
        help="Address that these ports are opened on; another than loopback with "
        "`KVBM_SCRAPE_TOKEN_FILE`, or `KVBM_METRICS_OPEN`.")
    admin_token: str = setting(
        "KVBM_ADMIN_TOKEN", "", schema.SECRET_TOKEN, section="metrics", secret=True,
        only_for=("metrics",),
        help="Bearer token that may ask and change everything over HTTP. Better in a file.")
    admin_read_token: str = setting(
        "KVBM_ADMIN_READ_TOKEN", "", schema.SECRET_TOKEN, section="metrics", secret=True,
        only_for=("metrics",), help="Bearer token that may ask. Better in a file.")
    admin_open: str = setting(
        "KVBM_ADMIN_OPEN", "", schema.choice("none", "read", "admin"), section="metrics",
        default_text="none", help="What needs no token on the HTTP API.")
    cache_stats_max_requests: int = setting(
        "DYN_KVBM_CACHE_STATS_MAX_REQUESTS", 1000, schema.integer(1), section="metrics",
        unit="requests", help="The hit rates cover so many recent requests.")
    explain_requests: int = setting(
        "KVBM_EXPLAIN_REQUESTS", 100_000, schema.integer(0, 10_000_000), section="metrics",
        unit="requests", help="Each host tier keeps why so many recent lookups hit and missed, in "
        "384 bytes each on average; 0: none.")
    history_entries: int | None = setting(
        "KVBM_HISTORY_ENTRIES", None, schema.integer(1, 1_000_000), section="metrics",
        default_text="8 times a tier's slots, 4096 (first blocks 65536) to 262144",
        help="Each history that explains misses keeps so many blocks, in 60 bytes each at most: "
        "more reach further back. Host tiers have four, disk and object tiers one each.")
    otlp_endpoint: str = setting(
        "KVBM_OTLP_ENDPOINT", "", schema.HTTP_URL, section="metrics",
        default_text="off, unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set",
        help="Collector of OpenTelemetry that onboards are traced to, over OTLP/HTTP: "
        "`http://HOST:4318`.")

    # -- consolidator --
    consolidator_enabled: bool = setting(
        "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", True, schema.BOOLEAN, section="consolidator",
        help="Take the engines' event streams.")
    consolidator_mode: str = setting(
        "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE", "dedup", schema.choice("dedup", "passthrough"),
        section="consolidator", help="`dedup` announces the first store and the last removal of "
        "a block; `passthrough` everything.")
    consolidator_endpoint: str = setting(
        "KVBM_CONSOLIDATOR_ENDPOINT", "", schema.ENDPOINT, section="consolidator",
        default_text="ipc://RUNTIME_DIR/consolidator.sock",
        help="Where the consolidator listens for engines; over tcp:// with keys, or "
        "`KVBM_ENGINES_OPEN`.")
    trtllm_zmq_port: int | None = setting(
        "DYN_KVBM_TRTLLM_ZMQ_PORT", None, schema.integer(1, 64_535), section="consolidator",
        help="Port of this host on which the KV events of a TensorRT-LLM engine are published, by "
        "Dynamo or by `kvbm_connectors.trtllm.event_pump`; 1000 above it replays are asked for.")
    router_endpoint: str = setting(
        "KVBM_ROUTER_ENDPOINT", "", schema.PORT_OR_OFF, section="consolidator",
        default_text="ipc://RUNTIME_DIR/router.sock",
        help="Where the consolidator publishes in vLLM's format for routers: data-parallel rank r "
        "on the port plus r, or with `_dpR` after the path. `off` publishes on NATS only. What "
        "is published has the tokens of prompts: over tcp:// only with keys, or "
        "`KVBM_ROUTER_OPEN`.")
    router_replay_endpoint: str = setting(
        "KVBM_ROUTER_REPLAY_ENDPOINT", "", schema.PORT_OR_OFF, section="consolidator",
        default_text="ipc://RUNTIME_DIR/router-replay.sock",
        help="Where routers ask for what they have missed, rank by rank like the publisher.")

    # -- this machine and the bus --
    nats_url: str = setting(
        "KVBM_NATS_URL", "nats://127.0.0.1:4222", schema.NATS_URL, section="bus",
        help="Where NATS is; `tls://` for TLS. A user and password in it are never printed.")
    index_image_s: float = setting(
        "KVBM_INDEX_IMAGE_S", 30.0, schema.number(0.05), section="bus", unit="s",
        help="How often the index stores an image of what it knows. A replica that starts takes "
        "the newest, and reads the event stream from there on.")
    index_partitions: int = setting(
        "KVBM_INDEX_PARTITIONS", 1, schema.integer(1, PARTITIONS_MAX), section="bus",
        help="In how many streams the hosts' events are, and so how many groups of index replicas "
        "there are: docs/scaling.md. The same for all services; another number begins empty.")
    index_partition: int | None = setting(
        "KVBM_INDEX_PARTITION", None, schema.integer(0, PARTITIONS_MAX - 1), section="bus",
        default_text="the only one; with several there is no default",
        help="Which partition an index replica follows: 0 to the number of partitions less 1.")
    zones: tuple[str, ...] = setting(
        "KVBM_ZONES", (), schema.TOKENS, section="bus", default_text="none: streams stay",
        help="Zones whose streams are sources of this fleet's: docs/scaling.md. Not set in a zone.")
    stream_replicas: int = setting(
        "KVBM_STREAM_REPLICAS", 0, schema.integer(0, 5), section="bus",
        help="How many servers of a NATS cluster keep each stream: 3 survives the loss of one. "
        "0: 1 for a new stream, and a stream that is there stays as it is.")
    events_gb: float = setting(
        "KVBM_EVENTS_GB", 0.0, schema.number(0), section="bus", unit="GB",
        help="How much of the events is kept; the consolidated ones have the half. "
        "0: 0.27 for a new stream, and a stream that is there stays as it is.")
    events_age_s: float = setting(
        "KVBM_EVENTS_AGE_S", 0.0, schema.number(0), section="bus", unit="s",
        help="How long events are kept. 0: 6 hours, as above.")
    events_dedup_s: float = setting(
        "KVBM_EVENTS_DEDUP_S", 0.0, schema.number(0), section="bus", unit="s",
        help="For how long the server knows an event that is sent again. It costs some 220 bytes "
        "of the server's memory for each event of that time. 0: 120 s, as above.")
    index_images_gb: float = setting(
        "KVBM_INDEX_IMAGES_GB", 0.0, schema.number(0), section="bus", unit="GB",
        help="The bucket for images of the index: room for two images. 0: 1.07, as above.")
    events_form: str = setting(
        "KVBM_EVENTS_FORM", "packed", schema.choice("packed", "json"), section="bus",
        help="How sources publish what they store and remove. `packed`: many events in a message, "
        "with raw hashes, once every service that is present reads them. `json`: a message for "
        "each event.")
    registry_url: str = setting(
        "KVBM_REGISTRY_URL", "nats", schema.REGISTRY_URL, section="bus",
        help="Where services enter themselves: in NATS KV, or in etcd, there or where "
        "`ETCD_ENDPOINTS` says. The same for all services.")
    etcd_endpoints: str = setting(
        "ETCD_ENDPOINTS", "http://localhost:2379", schema.TEXT, section="bus",
        help="Where etcd is, as for Dynamo; read when `KVBM_REGISTRY_URL` is `etcd`.")
    registry_ttl_s: float = setting(
        "KVBM_REGISTRY_TTL_S", 5.0, schema.number(0.1), section="bus", unit="s",
        help="A service that is silent for so long is taken for dead. etcd takes whole seconds, "
        "and no less than 2 as it comes.")
    host: str = setting(
        "KVBM_HOST", schema.default_host, schema.TOKEN, section="general",
        default_text="the host name", help="Name of this machine in subjects.")
    instance: str = setting(
        "KVBM_INSTANCE", "0", schema.TOKEN, section="general",
        help="Tells several services of one kind on one host apart.")
    runtime_dir: Path = setting(
        "KVBM_RUNTIME_DIR", schema.default_runtime_dir, schema.PATH, section="general",
        default_text="/tmp/kvbm-UID", help="Directory of the sockets, mode 0700.")
    shm_dir: Path = setting(
        "KVBM_SHM_DIR", Path("/dev/shm"), schema.PATH, section="general",
        help="Directory of the arena; a file system in memory.")
    state_dir: Path = setting(
        "KVBM_STATE_DIR", schema.default_state_dir, schema.PATH, section="general",
        default_text="~/.local/state/kvbm", help="What survives a restart.")
    log_level: str = setting(
        "KVBM_LOG_LEVEL", "info", schema.choice("debug", "info", "warning", "error"),
        section="general", help="The least important log line that is written.")
    log_format: str = setting(
        "KVBM_LOG_FORMAT", "text", schema.choice("text", "json"), section="general",
        help="Log lines for people, or a JSON object each.")
    # fmt: on


@cache
def all_settings() -> tuple[Setting, ...]:
    """Return every setting in the order of declaration, those of access last."""
    fields = dataclasses.fields(DeclaredSettings)
    found = (Setting(name=field.name, **field.metadata) for field in fields)
    return tuple(sorted(found, key=lambda declared: declared.section == SECTION))


@cache
def settings_by_name() -> Mapping[str, Setting]:
    """Return every setting by attribute name."""
    return {declared.name: declared for declared in all_settings()}
