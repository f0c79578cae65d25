"""Facts about a host, as plain data: `doctor.gather` looks, `doctor.checks` judges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbm_common.memory.leftovers import LeftMemory


@dataclass(frozen=True, slots=True)
class LeftStore:
    """A disk tier's store that neither the settings nor a process use."""

    path: Path
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """One directory of the disk tier."""

    path: Path
    error: str = ""
    """Why it is not used; then the rest means nothing."""
    advice: str = ""
    """What to do about the error; empty: the directory is to be one of the services' user."""
    free_bytes: int = 0
    own_bytes: int = 0
    """What our own files there take already."""
    direct: bool = False
    """Whether O_DIRECT works."""
    allocates: bool = False
    """Whether fallocate works."""
    will_be_made: bool = False
    """Whether it is missing, where its tier can make it; the rest is of where that will be."""
    left: tuple[LeftStore, ...] = ()


@dataclass(frozen=True, slots=True)
class PortFacts:
    """A TCP port that a service of this host opens."""

    port: int
    variable: str
    is_free: bool
    is_ours: bool
    """Taken, by a service of this very stack."""


@dataclass(frozen=True, slots=True)
class NatsFacts:
    """The first line of a NATS server, or why it did not come."""

    error: str = ""
    version: str = ""
    max_payload_bytes: int = 0
    jetstream: bool = False
    wants_credentials: bool = False
    has_tls: bool = False


@dataclass(frozen=True, slots=True)
class EtcdFacts:
    """The version of one etcd server, or why it is not known."""

    address: str
    error: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class ListenerFacts:
    """A TCP socket on which a process of KVBM listens now."""

    process: str
    """The kind of service, `nats`, or `engine`."""
    address: str
    port: int
    runtime_dir: str = ""
    """The `KVBM_RUNTIME_DIR` of the process: stacks differ in it; empty: it was given none."""


@dataclass(frozen=True, slots=True)
class SecretFacts:
    """A file with a credential."""

    name: str
    is_private: bool


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One worker of an engine that is attached to a host tier of this host."""

    engine: str
    rank: int
    verify: str
    """Which loads it verifies; empty: its release does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that is looked at."""

    memlock_bytes: int | None
    """The limit of locked memory; None: unlimited."""
    shm_fs: str
    shm_free_bytes: int
    shm_own_bytes: int
    """What the next start of the stack may take again: its own arenas, and those left behind."""
    runtime_error: str
    io_uring: str
    """Empty when it works, else the error's name."""
    linux_aio: str
    cross_memory: str
    """Empty when process_vm_readv works, else the error's name."""
    ptrace_scope: int
    disks: tuple[DiskFacts, ...]
    numa_nodes: int
    ports: tuple[PortFacts, ...]
    gpus: int
    gpu_storage: bool
    """Whether nvidia-fs is loaded, which GDS needs."""
    copier: str = "native"
    """What blocks are copied by: see copying."""
    gpu_copies: tuple[str, ...] = ()
    """What copies measured, for each GPU that cupy can use."""
    gpu_error: str = ""
    """Why cupy can use none."""
    rdma_devices: tuple[str, ...]
    nixl_error: str
    nixl_plugins: tuple[str, ...]
    clock_synchronised: bool
    clock_error_s: float
    nats: NatsFacts
    etcd: tuple[EtcdFacts, ...]
    engines: tuple[EngineFacts, ...] = ()
    """Empty also where the admin API is away, which lists them."""
    listeners: tuple[ListenerFacts, ...] = ()
    secrets: tuple[SecretFacts, ...] = ()
    """The files in the directory of credentials."""
    left_memory: tuple[LeftMemory, ...] = ()
    """Shared memory of killed processes."""
    refusals: tuple[str, ...] = ()
    """What services would refuse to open, or to connect to, with these settings."""
