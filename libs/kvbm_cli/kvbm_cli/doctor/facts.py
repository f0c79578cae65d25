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
    is_own: bool
    """True if the store belongs to this host, as after fewer directories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """One directory of the disk tier."""

    path: Path
    error: str = ""
    """The reason why the directory is not used; then the rest means nothing."""
    advice: str = ""
    """Advice about the error; empty: the directory is to belong to the services' user."""
    free_bytes: int = 0
    own_bytes: int = 0
    """Bytes that files of this host's tiers take there already."""
    direct: bool = False
    """True if O_DIRECT works."""
    allocates: bool = False
    """True if fallocate works."""
    will_be_made: bool = False
    """True if it is missing, where its tier can make it; the rest is of where that will be."""
    left: tuple[LeftStore, ...] = ()
    place: tuple[int, int] = (0, 0)
    """The numbers of the device and the directory; the second is 0 while it is missing."""

    @property
    def is_there(self) -> bool:
        """Tell whether the directory exists, and was looked at."""
        return self.place[1] != 0

    def shares_disk(self, other: DiskFacts) -> bool:
        """Tell whether both are on one file system, whose room they share."""
        return self.place[0] != 0 and self.place[0] == other.place[0]


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
    """One worker of an engine that is attached to a host tier of this host, or a whole engine that
    computes without a cache."""

    engine: str
    rank: int
    verify: str
    """The loads that the rank verifies; empty: its release does not say."""
    passes_through: str = ""
    """The reason why the engine computes without a cache; empty: it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that is looked at."""

    memlock_bytes: int | None
    """The limit of locked memory; None: unlimited."""
    shm_fs: str
    shm_free_bytes: int
    shm_own_bytes: int
    """Bytes that the next start of the stack may take again: its own arenas, and those left
    behind."""
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
    """True if nvidia-fs is loaded, which GDS needs."""
    copier: str = "native"
    """The name of the copier of blocks (`kvbm_common.copying`)."""
    gpu_copies: tuple[str, ...] = ()
    """A line about measured copies for each GPU that cupy can use."""
    gpu_error: str = ""
    """The reason why cupy can use no GPU; empty: it can, or there is no GPU."""
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
    """Reasons why services would refuse to open, or to connect to, something with these
    settings."""
