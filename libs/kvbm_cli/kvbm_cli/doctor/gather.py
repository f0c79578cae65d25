"""Gathering of facts about this host. Everything is tried for real, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import re
import socket
import ssl
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvbm_common.access.curve import refuse_open_consolidator, refuse_open_to_engines
from kvbm_common.access.etcd_access import etcd_access
from kvbm_common.access.http_access import refuse_open_api, service_access
from kvbm_common.access.nats_access import nats_access
from kvbm_common.access.roles import ADMIN
from kvbm_common.access.secret_files import SecretFile, SecretUnreadable
from kvbm_common.config.settings import Settings
from kvbm_common.copying import COPIER
from kvbm_common.cuda.measure import look
from kvbm_common.cuda.pinning import lock_limit_bytes
from kvbm_common.errors import ConfigError, KvbmError
from kvbm_common.memory.leftovers import file_system_of, left_memory
from kvbm_common.service.process import make_runtime_dir

from kvbm_cli.admin_client import Client
from kvbm_cli.disk_stores import directories_by_number
from kvbm_cli.doctor.directories import (
    disk_facts,
    free_bytes,
    silent_disk,
    without_used,
)
from kvbm_cli.doctor.facts import (
    DiskFacts,
    EngineFacts,
    EtcdFacts,
    Facts,
    NatsFacts,
    SecretFacts,
)
from kvbm_cli.doctor.listeners import listeners
from kvbm_cli.doctor.ports import ports_of
from kvbm_cli.looks import look_at_once
from kvbm_cli.stack_processes import instances_of

ANSWER_DEADLINE_S = 2.0
LOOK_S = 10.0
"""The time that the look at all directories may take; a busy disk writes a page within seconds."""
SYSCALLS = {"x86_64": (425, 206, 207), "aarch64": (425, 0, 1)}
"""Numbers of io_uring_setup, io_setup and io_destroy."""
IO_URING_PARAMS_BYTES = 120
CLOCK_UNSYNCHRONISED = 0x40
"""STA_UNSYNC of adjtimex(2)."""
TIMEX_WORDS = 26
"""A struct timex is 208 bytes on 64 bits: word 3 is maxerror in µs, word 5 (an int) the status."""

START_CHECKS: tuple[Callable[[Settings], object], ...] = (
    lambda settings: nats_access(settings, ADMIN),
    etcd_access,
    refuse_open_api,
    lambda settings: service_access(settings) if settings.service_port else None,
    lambda settings: refuse_open_to_engines(
        settings, settings.host_tier_endpoint, "KVBM_HOST_TIER_ENDPOINT"
    ),
    refuse_open_consolidator,
)
"""Checks that a service makes of its settings before it opens a port."""

_libc = ctypes.CDLL(None, use_errno=True)


def gather(settings: Settings) -> Facts:
    """Look at everything that the checks judge."""
    uring, aio = _async_io()
    plugins, nixl_error = _nixl_plugins()
    synchronised, clock_error_s = _clock()
    gpu_count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    listening = listeners()
    gpu_copies, gpu_error = look(gpu_count) if gpu_count else ((), "")
    return Facts(
        memlock_bytes=lock_limit_bytes(),
        shm_fs=file_system_of(settings.shm_dir),
        shm_free_bytes=free_bytes(settings.shm_dir),
        shm_own_bytes=_own_memory(settings),
        runtime_error=_runtime_error(settings),
        io_uring=uring,
        linux_aio=aio,
        cross_memory=_cross_memory(),
        ptrace_scope=_number_in(Path("/proc/sys/kernel/yama/ptrace_scope")),
        disks=_disks(settings),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        ports=ports_of(settings, listening),
        gpus=gpu_count,
        copier=COPIER.name,
        gpu_copies=gpu_copies,
        gpu_error=gpu_error,
        gpu_storage=Path("/proc/driver/nvidia-fs").exists(),
        rdma_devices=tuple(sorted(p.name for p in Path("/sys/class/infiniband").glob("*"))),
        nixl_error=nixl_error,
        nixl_plugins=plugins,
        clock_synchronised=synchronised,
        clock_error_s=clock_error_s,
        nats=_nats(settings.nats_url),
        etcd=tuple(_etcd(address, settings) for address in settings.etcd_servers),
        engines=engines_of(settings),
        listeners=listening,
        secrets=_secrets(settings.creds_dir),
        left_memory=left_memory(settings.shm_dir),
        refusals=refusals_of(settings),
    )


# --- memory -----------------------------------------------------------------------------------


def _own_memory(settings: Settings) -> int:
    """Return the bytes in shared memory that a start of this stack gets back."""
    instances = "|".join(map(re.escape, instances_of("host-tier", settings)))
    own = re.compile(rf"kvbm-{re.escape(settings.host)}-({instances})-\d+-arena.*")
    taken = {one.path: one.bytes for one in left_memory(settings.shm_dir)}
    with contextlib.suppress(OSError):
        for path in settings.shm_dir.iterdir():
            if own.fullmatch(path.name):
                taken[path] = path.lstat().st_blocks * 512
    return sum(taken.values())


def _runtime_error(settings: Settings) -> str:
    try:
        make_runtime_dir(settings)
    except ConfigError as error:
        return str(error)
    return ""


# --- system calls -----------------------------------------------------------------------------


def _error_name() -> str:
    number = ctypes.get_errno()
    return f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"


def _async_io() -> tuple[str, str]:
    """Return why io_uring and Linux AIO cannot be used; empty texts where they can."""
    numbers = SYSCALLS.get(platform.machine())
    if numbers is None:
        return f"unknown on {platform.machine()}", ""
    uring_setup, aio_setup, aio_destroy = numbers
    uring = aio = ""
    ring = _libc.syscall(uring_setup, 1, ctypes.create_string_buffer(IO_URING_PARAMS_BYTES))
    if ring >= 0:
        os.close(ring)
    else:
        uring = _error_name()
    context = ctypes.c_ulong(0)
    if _libc.syscall(aio_setup, 1, ctypes.byref(context)) == 0:
        _libc.syscall(aio_destroy, context)
    else:
        aio = _error_name()
    return uring, aio


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _cross_memory() -> str:
    """Return why this process may not read another's memory; empty where it may.

    The call is tried on this process's own memory.
    """
    source, target = ctypes.create_string_buffer(b"kvbm", 4), ctypes.create_string_buffer(4)
    spans = [_Span(ctypes.addressof(buffer), 4) for buffer in (target, source)]
    arguments = [os.getpid(), ctypes.byref(spans[0]), 1, ctypes.byref(spans[1]), 1, 0]
    return "" if _libc.process_vm_readv(*arguments) == 4 else _error_name()


def _number_in(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _clock() -> tuple[bool, float]:
    """Return whether a service keeps the clock right, and the largest error in seconds."""
    timex = (ctypes.c_long * TIMEX_WORDS)()
    if _libc.adjtimex(ctypes.byref(timex)) < 0:
        return False, 0.0
    return not (timex[5] & CLOCK_UNSYNCHRONISED), timex[3] / 1e6


def _disks(settings: Settings) -> tuple[DiskFacts, ...]:
    """Look at each directory as the disk tier of its own sees it, at all of them at once."""
    directories = list(directories_by_number(settings).values())
    stores = [
        settings.disk_store(directory, instance)
        for directory, instance in zip(
            directories, instances_of("disk-tier", settings), strict=True
        )
    ]
    looks = [partial(disk_facts, *pair, settings) for pair in zip(directories, stores, strict=True)]
    answered = look_at_once(looks, within_s=LOOK_S)
    found = [
        answered[place] if place in answered else silent_disk(directory, LOOK_S)
        for place, directory in enumerate(directories)
    ]
    return without_used(found, stores)


# --- network ----------------------------------------------------------------------------------


def _get(url: str, context: ssl.SSLContext | None = None) -> bytes:
    """Return the body of an HTTP answer; empty bytes on any error."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_DEADLINE_S, context=context) as answer:
            return bytes(answer.read())
    except (OSError, ValueError):  # An HTTP error is an OSError.
        return b""


def _nats(url: str) -> NatsFacts:
    """Read the first line of a NATS server, which it sends by itself."""
    parts = urlsplit(url.split(",")[0])
    address = (parts.hostname or "127.0.0.1", parts.port or 4222)
    try:
        with socket.create_connection(address, timeout=ANSWER_DEADLINE_S) as connection:
            connection.settimeout(ANSWER_DEADLINE_S)
            with connection.makefile("rb") as lines:
                line = lines.readline(64 * 1024)
        info: dict[str, Any] = json.loads(line.removeprefix(b"INFO "))
    except (OSError, ValueError) as error:
        return NatsFacts(error=str(error) or type(error).__name__)
    return NatsFacts(
        version=str(info.get("version", "?")),
        max_payload_bytes=int(info.get("max_payload", 0)),
        jetstream=bool(info.get("jetstream")),
        wants_credentials=bool(info.get("auth_required")),
        has_tls=bool(info.get("tls_required")),
    )


def _etcd(address: str, settings: Settings) -> EtcdFacts:
    try:
        tls = etcd_access(settings).tls
        context = tls.context() if tls else None
    except KvbmError as error:
        return EtcdFacts(address, error=str(error))
    body = _get(f"{'https' if context else 'http'}://{address}/version", context)
    try:
        return EtcdFacts(address, version=json.loads(body)["etcdserver"])
    except (ValueError, KeyError, TypeError):
        return EtcdFacts(address, error="it does not answer")


def refusals_of(settings: Settings) -> tuple[str, ...]:
    """Return the errors with which services would refuse these settings."""
    found: list[str] = []
    for check in START_CHECKS:
        try:
            check(settings)
        except ConfigError as error:
            found.append(str(error))
    return tuple(found)


def _secrets(directory: Path) -> tuple[SecretFacts, ...]:
    try:
        files = sorted(path for path in directory.iterdir() if path.is_file())
        return tuple(SecretFacts(one.name, SecretFile(one, "").is_private) for one in files)
    except (OSError, SecretUnreadable):
        return ()


def engines_of(settings: Settings) -> tuple[EngineFacts, ...]:
    """Return the engines of this host, as the admin API lists them; none where it is away."""
    try:
        workers = Client.of(settings, deadline_s=ANSWER_DEADLINE_S).get("/v1/workers")
        return tuple(
            EngineFacts(
                str(one["engine"]),
                int(one["rank"]),
                str(one.get("verify", "")),
                str(one.get("passes_through", "")),
            )
            for one in workers
            if one["host"] == settings.host
        )
    except (KvbmError, KeyError, TypeError, ValueError, AttributeError):
        return ()


# --- NIXL -------------------------------------------------------------------------------------


def _nixl_plugins() -> tuple[tuple[str, ...], str]:
    """Return the plug-ins that NIXL finds, and why there are none."""
    try:
        from kvbm_common.nixl.library import plugin_names
    except ImportError as error:
        return (), str(error)
    return plugin_names(), ""
