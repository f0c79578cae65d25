"""Checks of a host: what an operator should change about it, from the facts.

Pure: `doctor.gather` looks, this module judges. A finding is `ok`, `better` (it works; more is to
be had), or `wrong` (a service will not start, or will not do what the settings ask for).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvbm_common.config.schema import redacted
from kvbm_common.config.settings import Settings
from kvbm_common.nats.embedded_server import PAYLOAD_BYTES_MAX

from kvbm_cli.doctor.access_checks import access_checks
from kvbm_cli.doctor.disk_checks import disk_checks
from kvbm_cli.doctor.facts import Facts
from kvbm_cli.doctor.finding import Finding
from kvbm_cli.printing import size

CLOCK_ERROR_S_MAX = 1.0
"""Ages of events in metrics, and lists of a shared bucket, are no more exact than the clocks."""
NIXL_PLUGINS = ("UCX", "POSIX")
"""Without these no tier works."""
LEFT_MAX = 12
"""Files of killed processes that are named in one finding."""
SHM_SPARE_BYTES = 64 << 20
"""Room beside the arena: its table of committed blocks, and UCX's segments, which took 4.3 MB for
the host tier and as much for each worker."""


def examine(facts: Facts, settings: Settings) -> list[Finding]:
    """Return every finding, in the order in which things are needed."""
    return [finding for check in CHECKS for finding in check(facts, settings)]


def _settings(_facts: Facts, settings: Settings) -> Iterator[Finding]:
    for warning in settings.warnings:
        yield Finding("settings", "better", warning, "Correct or remove the variable.")
    if settings.cpu_cache_bytes == settings.disk_cache_bytes == 0 and not (
        settings.cpu_cache_override_num_blocks or settings.disk_cache_override_num_blocks
    ):
        yield Finding(
            "settings",
            "better",
            "no tier has a size",
            "Set DYN_KVBM_CPU_CACHE_GB, DYN_KVBM_DISK_CACHE_GB or both.",
        )


def _verification(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check that every block that engines read is verified, and at no extra pass."""
    if settings.verify_host_reads == "always":
        yield Finding("verification", "ok", "every block is verified")
    else:
        yield Finding(
            "verification",
            "better",
            f"KVBM_VERIFY_HOST_READS is {settings.verify_host_reads}",
            "Remove the variable, or set it to always: engines use blocks whose checksums "
            "were not compared.",
        )
    for engine in facts.engines:
        if engine.verify in ("sampled", "never"):
            yield Finding(
                "verification",
                "better",
                f"rank {engine.rank} of engine {engine.engine} verifies: {engine.verify}",
                "Remove verify_host_reads from the engine's connector configuration, and "
                "KVBM_VERIFY_HOST_READS from its environment.",
            )
    if facts.copier == "native":
        yield Finding("copies", "ok", "copy and checksum in one pass")
    else:
        yield Finding(
            "copies",
            "better",
            "by memmove and xxhash: the copying library is not there",
            "Install a C compiler, and kvbm-common again.",
        )


def _engines(facts: Facts, _settings: Settings) -> Iterator[Finding]:
    """Check that every engine of this host has a cache. Its ranks say the same."""
    for name, reason in dict.fromkeys((one.engine, one.passes_through) for one in facts.engines):
        if reason:
            yield Finding(
                "engines",
                "better",
                f"{name} computes without a cache: {reason}",
                "Change what the reason names; the document of its engine (docs/vllm.md, "
                "docs/sglang.md, docs/trtllm.md) says what is cached.",
            )


def _runtime(facts: Facts, settings: Settings) -> Iterator[Finding]:
    where = str(settings.runtime_dir)
    if facts.runtime_error:
        yield Finding(
            "runtime directory",
            "wrong",
            f"{where}: {facts.runtime_error}",
            "Give KVBM_RUNTIME_DIR a directory of the services' own user.",
        )
    else:
        yield Finding("runtime directory", "ok", where)


def _memlock(facts: Facts, _settings: Settings) -> Iterator[Finding]:
    limit = facts.memlock_bytes
    text = "unlimited" if limit is None else f"{size(limit)} may be locked"
    pins = bool(facts.gpus or facts.rdma_devices)
    if limit is None or not pins:
        why = "" if pins or limit is None else "; nothing here pins memory"
        yield Finding("memlock", "ok", text + why)
    else:
        yield Finding(
            "memlock",
            "better",
            f"{text}; GPU and RDMA transfers pin the arena",
            "ulimit -l unlimited, LimitMEMLOCK=infinity, or the engine's "
            "default-ulimits for containers.",
        )


def _shm(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Judge the room for the arena, which is allocated completely before the host tier is ready."""
    arena = settings.cpu_cache_bytes or settings.staging_bytes
    has_room = facts.shm_free_bytes + facts.shm_own_bytes
    found = f"{settings.shm_dir} is {facts.shm_fs} with {size(has_room)} for an arena of "
    found += size(arena)
    if blocks := settings.cpu_cache_override_num_blocks:
        arena = 0
        found = f"{settings.shm_dir} is {facts.shm_fs} with {size(has_room)} for {blocks} blocks"
    advice = (
        f"mount -o remount,size=… {settings.shm_dir}; in containers --ipc=host or --shm-size; "
        "or a smaller DYN_KVBM_CPU_CACHE_GB."
    )
    if has_room < arena:
        yield Finding("shared memory", "wrong", found, advice)
    elif facts.shm_own_bytes < arena and has_room < arena + SHM_SPARE_BYTES:
        found += "; UCX takes 4 MB for each process there, and copies more slowly without"
        yield Finding("shared memory", "better", found, advice)
    elif facts.shm_fs not in ("tmpfs", "hugetlbfs", "ramfs"):
        yield Finding(
            "shared memory", "wrong", found, "Point KVBM_SHM_DIR to a file system in memory."
        )
    else:
        yield Finding("shared memory", "ok", found)


def _left_memory(facts: Facts, _settings: Settings) -> Iterator[Finding]:
    """Name what killed processes have left in shared memory, and the command that removes it."""
    if facts.left_memory:
        paths = [str(left.path) for left in facts.left_memory]
        files = " ".join(paths[:LEFT_MAX]) + (" …" if len(paths) > LEFT_MAX else "")
        yield Finding(
            "left memory",
            "better",
            f"{size(sum(left.bytes for left in facts.left_memory))} of processes that were killed",
            f"The next start of a host tier removes it; or now: rm {files}",
        )


def _io_uring(facts: Facts, _settings: Settings) -> Iterator[Finding]:
    if not facts.io_uring:
        yield Finding("io_uring", "ok", "allowed")
    elif not facts.linux_aio:
        yield Finding(
            "io_uring",
            "better",
            f"{facts.io_uring}; Linux AIO is used instead",
            "sysctl kernel.io_uring_disabled=0; in containers a seccomp profile that "
            "allows io_uring_*.",
        )
    else:
        found = f"{facts.io_uring}, and no Linux AIO either ({facts.linux_aio})"
        yield Finding(
            "io_uring",
            "wrong",
            found,
            "Allow io_uring_* or io_* in the seccomp profile; look at fs.aio-max-nr.",
        )


def _between_processes(facts: Facts, _settings: Settings) -> Iterator[Finding]:
    if facts.cross_memory:
        yield Finding(
            "between processes",
            "better",
            f"process_vm_readv: {facts.cross_memory}; UCX uses TCP",
            "In containers: pid namespace of the host, and cap_add SYS_PTRACE, as in "
            "compose/docker-compose.yml.",
        )
    elif facts.ptrace_scope > 1:
        yield Finding(
            "between processes",
            "better",
            f"kernel.yama.ptrace_scope is {facts.ptrace_scope}; UCX uses TCP",
            "sysctl kernel.yama.ptrace_scope=0 or 1.",
        )
    else:
        yield Finding("between processes", "ok", "process_vm_readv is allowed")


def _numa(facts: Facts, _settings: Settings) -> Iterator[Finding]:
    if facts.numa_nodes > 1:
        yield Finding(
            "NUMA",
            "better",
            f"{facts.numa_nodes} nodes",
            "Run host tier and engines of one GPU on that GPU's node: numactl "
            "--cpunodebind=N --preferred=N, or cpuset of a container.",
        )
    else:
        yield Finding("NUMA", "ok", "one node")


def _ports(facts: Facts, _settings: Settings) -> Iterator[Finding]:
    for port in facts.ports:
        if port.is_free or port.is_ours:
            yield Finding(f"port {port.port}", "ok", "free" if port.is_free else "ours")
        else:
            yield Finding(
                f"port {port.port}",
                "wrong",
                "another process listens on it",
                f"Another port in {port.variable}.",
            )


def _gpu(facts: Facts, _settings: Settings) -> Iterator[Finding]:
    if not facts.gpus:
        yield Finding("GPU", "ok", "none seen; engines on CPU only")
        return
    gds = "GPUDirect Storage" if facts.gpu_storage else "no GPUDirect Storage"
    yield Finding("GPU", "ok", f"{facts.gpus} NVIDIA, {gds}")
    for copies in facts.gpu_copies:
        yield Finding("GPU copies", "ok", copies)
    if facts.gpu_error:
        yield Finding(
            "GPU copies",
            "better",
            facts.gpu_error,
            "Blocks of a GPU move over NIXL, if at all: kvbm-stack[cuda12] or [cuda13].",
        )


def _nixl(facts: Facts, settings: Settings) -> Iterator[Finding]:
    if facts.nixl_error:
        yield Finding("NIXL", "wrong", facts.nixl_error, "Install nixl-cu12 in this environment.")
        return
    has_bucket = settings.object_enabled and settings.object_directory is None
    wanted = [*NIXL_PLUGINS, *(["OBJ"] if has_bucket else [])]
    missing = [name for name in wanted if name not in facts.nixl_plugins]
    found = ", ".join(facts.nixl_plugins)
    if missing:
        yield Finding(
            "NIXL",
            "wrong",
            f"{found}; without {', '.join(missing)}",
            "Look at NIXL_PLUGIN_DIR, or reinstall nixl-cu12.",
        )
    else:
        yield Finding("NIXL", "ok", found)


def _clock(facts: Facts, _settings: Settings) -> Iterator[Finding]:
    if not facts.clock_synchronised:
        yield Finding(
            "clock",
            "better",
            "not synchronised",
            "Run chrony or systemd-timesyncd: ages in metrics, and the age of objects "
            "in a shared bucket, follow the clocks.",
        )
    elif facts.clock_error_s > CLOCK_ERROR_S_MAX:
        yield Finding(
            "clock",
            "better",
            f"off by up to {facts.clock_error_s:.1f} s",
            "Look at the sources of chrony or systemd-timesyncd.",
        )
    else:
        yield Finding("clock", "ok", f"synchronised, to {facts.clock_error_s * 1e3:.0f} ms")


def _nats(facts: Facts, settings: Settings) -> Iterator[Finding]:
    nats, url = facts.nats, redacted(settings.nats_url)
    if nats.error:
        yield Finding(
            "NATS",
            "wrong",
            f"{url}: {nats.error}",
            "Start it (`kvbm up` does), or correct KVBM_NATS_URL.",
        )
    elif not nats.jetstream:
        yield Finding(
            "NATS",
            "wrong",
            f"{url}: version {nats.version} without JetStream",
            "Start nats-server with a jetstream block, or -js.",
        )
    elif nats.max_payload_bytes < PAYLOAD_BYTES_MAX:
        yield Finding(
            "NATS",
            "wrong",
            f"{url}: at most {size(nats.max_payload_bytes)}",
            f"max_payload: {PAYLOAD_BYTES_MAX} in its configuration.",
        )
    else:
        yield Finding("NATS", "ok", f"{url}: version {nats.version} with JetStream")


def _etcd(facts: Facts, settings: Settings) -> Iterator[Finding]:
    if not settings.etcd_servers:
        yield Finding("etcd", "ok", "not used: NATS is the registry")
    for server in facts.etcd:
        if server.error:
            yield Finding(
                "etcd",
                "wrong",
                f"{server.address}: {server.error}",
                "Start it, or correct KVBM_REGISTRY_URL (or ETCD_ENDPOINTS).",
            )
        else:
            yield Finding("etcd", "ok", f"{server.address}: version {server.version}")


CHECKS: tuple[Callable[[Facts, Settings], Iterator[Finding]], ...] = (
    _settings,
    _verification,
    _engines,
    _runtime,
    _memlock,
    _shm,
    _left_memory,
    _io_uring,
    _between_processes,
    disk_checks,
    _numa,
    _ports,
    _gpu,
    _nixl,
    _clock,
    _nats,
    _etcd,
    access_checks,
)
