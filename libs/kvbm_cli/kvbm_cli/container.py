"""A container's entry point: which instance a service is, and whether it is healthy.

    python -m kvbm_cli.container serve KIND      (becomes `kvbm serve KIND`)
    python -m kvbm_cli.container health KIND     (exits with 0 or 1, and says why)
    python -m kvbm_cli.container creds           (fills the volumes of credentials, and ends)

Replicas of one container are started alike, and a service must have a name of its own which
survives its container: a disk tier finds its file by it. So each takes the first number that no
other on this host holds. The lock is a file in the runtime directory, which the containers of a
host share; the kernel drops it with the process.

A pod of a DaemonSet knows its node's name, NODE_NAME: with dashes for dots that is KVBM_HOST.

Of a consolidator there is one per host, because engines know one endpoint. A second one waits, and
takes over when the first has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import msgspec
from kvbm_common.access.nats_access import nats_access
from kvbm_common.config.schema import host_of
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import LockTaken, take_lock
from kvbm_common.service.process import make_runtime_dir
from kvbm_common.wire.verbs import StatsReply, verb_subject

ONE_PER_HOST = ("consolidator",)
INSTANCES_MAX = 64
"""Replicas of one kind on one host; more is a loop that starts containers."""
HEALTH_DEADLINE_S = 2.0
"""Twice, for connecting and asking; the image's HEALTHCHECK gives 5 s."""
MEMORY_BESIDE_ARENA_BYTES = 500_000_000
"""The process itself, NIXL and UCX; an arena that does not fit would end it by a signal."""
CGROUPS = Path("/sys/fs/cgroup")
STANDBY = "standby"
NODE_NAME = "NODE_NAME"
"""The variable of a pod with the name of its node."""
INSTANCE_FILE = Path(tempfile.gettempdir()) / "kvbm-instance"
"""In the container's own file system: tells `health` whom to ask for."""


class TooManyInstances(KvbmError):
    """Every number is taken."""

    code = "too_many_instances"


def lock_path(runtime_dir: Path, kind: str, number: int) -> Path:
    """Return the path of the lock file of one instance."""
    return runtime_dir / f"{kind}-{number}.lock"


def take_instance(runtime_dir: Path, kind: str) -> tuple[str, TextIO]:
    """Return the first free number of a kind and its lock, now held; raises TooManyInstances."""
    for number in range(INSTANCES_MAX):
        try:
            return str(number), take_lock(lock_path(runtime_dir, kind, number))
        except LockTaken:
            continue
    raise TooManyInstances(f"{INSTANCES_MAX} of {kind} run with {runtime_dir} already")


def wait_turn(runtime_dir: Path, kind: str) -> TextIO:
    """Wait, for as long as it takes, until no other process of its kind serves.

    Nothing but a signal ends a standby: that is its work.
    """
    path = lock_path(runtime_dir, kind, 0)
    try:
        return take_lock(path)
    except LockTaken:
        INSTANCE_FILE.write_text(STANDBY)
        print(f"{kind}: another one serves this host; standing by", flush=True)
    lock = path.open("a+")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def memory_limit(root: Path = CGROUPS) -> int | None:
    """Return how many bytes this container may use; None: no limit that can be read."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int((root / name).read_text())
    return None


def check_memory(settings: Settings, limit: int | None) -> None:
    """Raise ConfigError for an arena that the limit of the container would not let be allocated."""
    arena_bytes = settings.cpu_cache_bytes or settings.staging_bytes
    wanted = arena_bytes + MEMORY_BESIDE_ARENA_BYTES
    if limit is not None and wanted > limit:
        accepted = (
            f"at least {MEMORY_BESIDE_ARENA_BYTES / 1e9:g} GB less than the memory of this "
            f"container, {limit / 1e9:.1f} GB: KVBM_HOST_TIER_MEMORY in compose"
        )
        raise ConfigError("DYN_KVBM_CPU_CACHE_GB", arena_bytes / 1e9, accepted)


def environ_of_host(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, with the host's name where only that of the node is given.

    >>> environ_of_host({"NODE_NAME": "a.internal"})["KVBM_HOST"]
    'a-internal'
    """
    node = environ.get(NODE_NAME, "")
    return ({"KVBM_HOST": host_of(node)} if node else {}) | dict(environ)


def serve(kind: str) -> None:
    """Take a number and become the service."""
    environ = environ_of_host(os.environ)
    settings = Settings.load(environ)
    if kind == "host-tier":
        check_memory(settings, memory_limit())
    make_runtime_dir(settings)
    instance = settings.instance
    if settings.provenance("instance") == "default":
        if kind in ONE_PER_HOST:
            lock = wait_turn(settings.runtime_dir, kind)
        else:
            instance, lock = take_instance(settings.runtime_dir, kind)
        os.set_inheritable(lock.fileno(), True)  # The service holds it without knowing.
    INSTANCE_FILE.write_text(instance)
    environ = environ | {"KVBM_INSTANCE": instance}
    command = [sys.executable, "-m", "kvbm_cli.main", "serve", kind]
    os.execve(sys.executable, command, environ)


async def health(kind: str, instance: str, settings: Settings) -> StatsReply:
    """Return the stats that an instance of this host reports; raises KvbmError."""
    bus = await Bus.connect(
        nats_access(settings, kind),
        "kvbm-health",
        counters=Metrics(),
        deadline_s=HEALTH_DEADLINE_S,
    )
    try:
        subject = verb_subject(kind, "stats", host=settings.host, instance=instance)
        payload = await bus.request(subject, b"{}", deadline_s=HEALTH_DEADLINE_S)
        return msgspec.json.decode(payload, type=StatsReply)
    finally:
        await bus.close()


def print_health(kind: str) -> int:
    """Say it, and return the exit code."""
    instance = INSTANCE_FILE.read_text() if INSTANCE_FILE.exists() else ""
    if instance == STANDBY:
        print("standing by")
        return 0
    if not instance:
        print("not started yet")
        return 1
    try:
        stats = asyncio.run(health(kind, instance, Settings.load(environ_of_host(os.environ))))
    except KvbmError as error:
        print(f"{kind} {instance}: {error}")
        return 1
    print(f"{kind} {instance}: " + ("ready" if stats.ready else ", ".join(stats.reasons)))
    return 0 if stats.ready else 1


def make_creds(options: list[str]) -> str:
    """Fill the volumes of credentials; returns what to print, and exits with 2 if it cannot."""
    from kvbm_cli.creds import containers  # What signs certificates is no part of a service.

    try:
        return containers.run(options, os.environ, sys.stdin.buffer)
    except KvbmError as error:
        print(f"kvbm: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Run the command line."""
    match sys.argv[1:]:
        case ["serve", kind]:
            try:
                serve(kind)
            except KvbmError as error:
                sys.exit(f"kvbm: {error}")
        case ["health", kind]:
            sys.exit(print_health(kind))
        case ["creds", *options]:
            print(make_creds(options))
        case _:
            sys.exit("usage: python -m kvbm_cli.container serve|health KIND, or creds")


if __name__ == "__main__":
    main()
