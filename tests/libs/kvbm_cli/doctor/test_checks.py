"""The doctor: what it judges from facts, and what it finds on a real host."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from kvbm_cli.disk_stores import is_store_of
from kvbm_cli.doctor.checks import examine
from kvbm_cli.doctor.facts import DiskFacts, EngineFacts, EtcdFacts, Facts, NatsFacts, PortFacts
from kvbm_cli.doctor.finding import Finding
from kvbm_cli.doctor.gather import engines_of, gather
from kvbm_cli.doctor.left_stores import left_stores, unused_stores
from kvbm_common.config.settings import Settings
from kvbm_common.memory.leftovers import LeftMemory
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.runtime.processes import free_port
from kvbm_disk_tier.shell.own_files import lock_directory

from tests.etcd_server import EtcdServer
from tests.hung_mount import hung_mount

GB = 10**9
DISK = DiskFacts(path=Path("/nvme"), free_bytes=9 * GB, direct=True, allocates=True)
NATS = NatsFacts(version="2", max_payload_bytes=8 << 20, jetstream=True, wants_credentials=True)
HEALTHY = Facts(
    memlock_bytes=None,
    shm_fs="tmpfs",
    shm_free_bytes=2 * GB,
    shm_own_bytes=0,
    runtime_error="",
    io_uring="",
    linux_aio="",
    cross_memory="",
    ptrace_scope=1,
    disks=(DISK,),
    numa_nodes=1,
    ports=(PortFacts(6880, "DYN_KVBM_METRICS_PORT", is_free=True, is_ours=False),),
    gpus=0,
    gpu_storage=False,
    rdma_devices=(),
    nixl_error="",
    nixl_plugins=("POSIX", "UCX"),
    clock_synchronised=True,
    clock_error_s=0.01,
    nats=NatsFacts(version="2", max_payload_bytes=8 << 20, jetstream=True, wants_credentials=True),
    etcd=(),
)
SIZES = {"cpu_cache_gb": 1, "disk_cache_gb": 4, "disk_cache_dirs": "/nvme"}


def settings(**more: object) -> Settings:
    return Settings.load({}, {**SIZES, **more})


def judged(facts: Facts, chosen: Settings | None = None) -> list[Finding]:
    """What is not ok."""
    found = examine(facts, chosen or settings())
    assert all(finding.advice for finding in found if finding.level != "ok")
    return [finding for finding in found if finding.level != "ok"]


def test_a_healthy_host_needs_nothing() -> None:
    assert judged(HEALTHY) == []


@pytest.mark.parametrize(
    ("change", "check", "level", "advice"),
    [
        ({"shm_free_bytes": GB // 2}, "shared memory", "wrong", "--ipc=host"),
        ({"shm_free_bytes": GB + (1 << 20)}, "shared memory", "better", "--shm-size"),
        ({"shm_fs": "ext4"}, "shared memory", "wrong", "KVBM_SHM_DIR"),
        ({"runtime_error": "not yours"}, "runtime directory", "wrong", "KVBM_RUNTIME_DIR"),
        ({"memlock_bytes": 65536, "gpus": 1}, "memlock", "better", "LimitMEMLOCK"),
        ({"memlock_bytes": 65536, "rdma_devices": ("mlx5_0",)}, "memlock", "better", "ulimit"),
        ({"gpus": 1, "gpu_error": "no cupy"}, "GPU copies", "better", "cuda12"),
        ({"io_uring": "EPERM"}, "io_uring", "better", "kernel.io_uring_disabled"),
        ({"io_uring": "EPERM", "linux_aio": "EPERM"}, "io_uring", "wrong", "seccomp"),
        ({"cross_memory": "EPERM"}, "between processes", "better", "SYS_PTRACE"),
        ({"ptrace_scope": 2}, "between processes", "better", "ptrace_scope"),
        ({"disks": (dataclasses.replace(DISK, free_bytes=GB),)}, "disk /nvme", "wrong", "smaller"),
        ({"disks": (dataclasses.replace(DISK, direct=False),)}, "disk /nvme", "wrong",
         "DYN_KVBM_DISK_DISABLE_O_DIRECT"),
        ({"disks": (dataclasses.replace(DISK, allocates=False),)}, "disk /nvme", "wrong",
         "DYN_KVBM_DISK_ZEROFILL_FALLBACK"),
        ({"disks": (dataclasses.replace(DISK, error="Read-only"),)}, "disk /nvme", "wrong",
         "directory"),
        ({"copier": "plain"}, "copies", "better", "C compiler"),
        ({"numa_nodes": 2}, "NUMA", "better", "numactl"),
        ({"ports": (PortFacts(57001, "KVBM_ROUTER_ENDPOINT", is_free=False, is_ours=False),)},
         "port 57001", "wrong", "KVBM_ROUTER_ENDPOINT"),
        ({"nixl_error": "no wheel"}, "NIXL", "wrong", "nixl-cu12"),
        ({"nixl_plugins": ("UCX",)}, "NIXL", "wrong", "NIXL_PLUGIN_DIR"),
        ({"clock_synchronised": False}, "clock", "better", "chrony"),
        ({"clock_error_s": 3.0}, "clock", "better", "chrony"),
        ({"nats": NatsFacts(error="refused")}, "NATS", "wrong", "KVBM_NATS_URL"),
        ({"nats": dataclasses.replace(NATS, jetstream=False)}, "NATS", "wrong", "jetstream"),
        ({"nats": dataclasses.replace(NATS, max_payload_bytes=1 << 20)}, "NATS",
         "wrong", "max_payload"),
        ({"etcd": (EtcdFacts("a:1", error="gone"),)}, "etcd", "wrong", "KVBM_REGISTRY_URL"),
    ],
)  # fmt: skip
def test_each_ailment_is_named_with_its_cure(
    change: dict[str, object], check: str, level: str, advice: str
) -> None:
    """Goal: one thing is wrong, one line says so, and what to change."""
    [finding] = judged(dataclasses.replace(HEALTHY, **change), settings())  # type: ignore[arg-type]
    assert (finding.check, finding.level) == (check, level)
    assert advice in finding.advice


def test_a_bucket_needs_nixls_plugin_and_a_directory_does_not() -> None:
    [finding] = judged(HEALTHY, settings(object_url="s3://kv"))
    assert (finding.check, finding.level) == ("NIXL", "wrong")
    assert "without OBJ" in finding.found
    assert judged(HEALTHY, settings(object_url="file:///mnt/kv")) == []


@pytest.mark.parametrize("chosen", ["never", "sampled"])
def test_unverified_reads_are_an_operators_choice_that_is_shown(chosen: str) -> None:
    """The default needs no word."""
    [finding] = judged(HEALTHY, settings(verify_host_reads=chosen))
    assert (finding.check, finding.level) == ("verification", "better")
    assert f"KVBM_VERIFY_HOST_READS is {chosen}" in finding.found
    assert settings().verify_host_reads == "always"
    assert judged(HEALTHY, settings()) == []


def test_an_engine_without_a_cache_is_shown_with_its_reason() -> None:
    engines = (EngineFacts("vllm-0", 0, "always"), EngineFacts("vllm-1", 0, "", "no prefix cache"))
    [finding] = judged(dataclasses.replace(HEALTHY, engines=engines))
    assert (finding.check, finding.level) == ("engines", "better")
    assert finding.found == "vllm-1 computes without a cache: no prefix cache"


def test_ranks_without_a_cache_are_one_finding_for_each_reason() -> None:
    engines = tuple(
        EngineFacts("vllm-0", rank, "", reason)
        for rank, reason in enumerate(["sleep mode", "sleep mode", "", "a diffusion model"])
    )
    found = [one.found for one in judged(dataclasses.replace(HEALTHY, engines=engines))]
    assert found == [
        "vllm-0 computes without a cache: sleep mode",
        "vllm-0 computes without a cache: a diffusion model",
    ]


@pytest.mark.parametrize("chosen", ["never", "sampled"])
def test_an_engine_that_chose_unverified_reads_itself_is_shown(chosen: str) -> None:
    """The services' setting says nothing of what an engine's connector was configured with."""
    engines = tuple(
        EngineFacts(f"vllm-{number}", number, verify)
        for number, verify in enumerate(("always", chosen, ""))
    )
    [finding] = judged(dataclasses.replace(HEALTHY, engines=engines))
    assert (finding.check, finding.level) == ("verification", "better")
    assert f"rank 1 of engine vllm-1 verifies: {chosen}" in finding.found
    assert "verify_host_reads" in finding.advice


async def test_engines_of_this_host_are_those_that_the_admin_api_lists() -> None:
    """Engines of other hosts have a doctor there; without an answer nothing is known."""
    told = [
        {"host": host, "engine": "vllm-0", "rank": rank, "verify": "never", "passes_through": "why"}
        for rank, host in enumerate(("here", "elsewhere"))
    ]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(told).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        chosen = settings(host="here", metrics_port=port, metrics_bind="127.0.0.1")
        found = await asyncio.to_thread(engines_of, chosen)
    assert found == (EngineFacts("vllm-0", 0, "never", "why"),)
    assert engines_of(settings(host="here", metrics_port=free_port())) == ()


def test_memory_of_killed_processes_is_named_with_the_command_that_removes_it() -> None:
    left = tuple(LeftMemory(Path(f"/dev/shm/kvbm-old-{n}-7-arena"), GB) for n in range(20))
    [finding] = judged(dataclasses.replace(HEALTHY, left_memory=left))
    assert (finding.check, finding.level) == ("left memory", "better")
    assert finding.found == "20.0 GB of processes that were killed"
    assert "rm /dev/shm/kvbm-old-0-7-arena /dev/shm/kvbm-old-1-7-arena " in finding.advice
    assert finding.advice.endswith("…")


def test_room_in_shared_memory_counts_what_a_start_gets_back(tmp_path: Path) -> None:
    """The arena of this host is its own, and not that of a host whose name begins alike."""
    for name in ("kvbm-node-0-7-arena", "kvbm-node-1-0-7-arena", "kvbm-node-0-7-arena-roster"):
        (tmp_path / name).write_bytes(b"1" * 8192)
    facts = gather(settings(host="node", shm_dir=tmp_path, nats_url="nats://127.0.0.1:1"))
    assert facts.shm_own_bytes == 2 * 8192


def test_a_store_of_a_former_name_is_named_with_its_size(tmp_path: Path) -> None:
    """A renamed host begins with an empty disk, and the old store stays: neither ours, nor one
    that is in use, nor what is no store is told."""
    for directory in ("kvbm-old-0", "kvbm-used-0", "kvbm-new-0", "kvbm-notes"):
        (tmp_path / directory).mkdir()
        if directory != "kvbm-notes":
            (tmp_path / directory / "journal").write_bytes(b"1" * 8192)
    (tmp_path / "kvbm-file").write_bytes(b"")
    locked = lock_directory(tmp_path / "kvbm-used-0")
    left = left_stores(tmp_path, settings(host="new", disk_cache_dirs=str(tmp_path)))
    locked += lock_directory(tmp_path / "kvbm-old-0")  # The doctor holds nothing.
    for fd in locked:
        os.close(fd)
    assert left_stores(tmp_path / "missing", settings()) == ()
    assert [(store.path.name, store.bytes >= 8192) for store in left] == [("kvbm-old-0", True)]
    facts = dataclasses.replace(HEALTHY, disks=(dataclasses.replace(DISK, left=left),))
    [finding] = judged(facts)
    assert finding.check == f"store {tmp_path}/kvbm-old-0"
    assert finding.level == "better"
    assert "KVBM_HOST" in finding.advice


def store_in(directory: Path, name: str) -> Path:
    """Make what is left of a disk tier's store."""
    (directory / name).mkdir(parents=True)
    (directory / name / "journal").write_bytes(b"1")
    return directory / name


def test_stores_of_this_host_that_no_disk_tier_uses_are_named(tmp_path: Path) -> None:
    """1. Each of two directories holds both stores: one of them is left in each. 2. A former name
    begins with this host's. 3. Without a disk cache all are left."""
    first, second = tmp_path / "a", tmp_path / "b"
    own = store_in(first, "kvbm-node-0-1"), store_in(second, "kvbm-node-0")
    used = store_in(first, "kvbm-node-0"), store_in(second, "kvbm-node-0-1")
    former = store_in(first, "kvbm-node-2-0")
    in_order = settings(host="node", disk_cache_dirs=f"{first},{second}")
    assert [one.path for one in left_stores(first, in_order)] == [own[0], former]
    assert [one.path for one in left_stores(second, in_order)] == [own[1]]
    assert [line.split()[0] for line in unused_stores(in_order)] == [
        str(path) for path in (own[0], former, own[1])
    ]
    [facts] = [dataclasses.replace(DISK, left=left_stores(second, in_order))]
    [finding] = judged(dataclasses.replace(HEALTHY, disks=(facts,)), in_order)
    assert (finding.check, finding.level) == (f"store {own[1]}", "better")
    assert "no disk tier of these settings" in finding.found
    without = settings(host="node", disk_cache_dirs=f"{first},{second}", disk_cache_gb=0)
    assert sorted(line for line in unused_stores(without) if str(former) not in line) == [
        f"{path} is not used: DYN_KVBM_DISK_CACHE_GB is 0" for path in sorted((*own, *used))
    ]


def test_a_start_says_that_a_directory_holds_stores_of_another_name(tmp_path: Path) -> None:
    """Goal: a renamed host does not begin with empty disks in silence."""
    first, second = tmp_path / "a", tmp_path / "b"
    store_in(first, "kvbm-old-0")
    store_in(second, "kvbm-old-0-1")
    store_in(second, "kvbm-older-0")
    renamed = settings(host="new", disk_cache_dirs=f"{first},{second}")
    why = "is not used: it is of another host's name; kvbm doctor says what to do"
    assert unused_stores(renamed) == [
        f"{first}/kvbm-old-0 {why}",
        f"{second}/kvbm-old-0-1 (and 1 more) {why}",
    ]


@pytest.mark.slow
def test_a_start_names_a_directory_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = store_in(tmp_path / "a", "kvbm-node-0")
    monkeypatch.setattr("kvbm_cli.doctor.left_stores.LOOK_S", 5.0)
    with hung_mount(tmp_path / "hung") as hung:
        directories = f"{hung},{left.parent}"
        off = settings(host="node", disk_cache_gb=0, disk_cache_dirs=directories)
        assert unused_stores(off) == [
            f"{hung} does not answer within 5 s",
            f"{left} is not used: DYN_KVBM_DISK_CACHE_GB is 0",
        ]


@pytest.mark.parametrize(
    ("name", "header", "is_of_host"),
    [
        ("kvbm-node-7", "", True),
        ("kvbm-node-2-1", "", True),
        ("kvbm-node-2-0", "", False),
        ("kvbm-node-2-0-1", "", False),
        ("kvbm-node-2-1", '{"host": "node-2"}', False),
        ("kvbm-node-2-0", '{"host": "node"}', True),
        ("kvbm-node-2-1", '{"format": 3}', True),
        ("kvbm-node-2-1", "[", True),
    ],
)
def test_a_store_is_of_the_host_that_its_header_names(
    tmp_path: Path, name: str, header: str, *, is_of_host: bool
) -> None:
    """Without a header that does, the name decides: no instance of a stack ends with `-0`."""
    store = store_in(tmp_path, name)
    if header:
        (store / "header").write_text(header)
    assert is_store_of(store, settings(host="node")) == is_of_host


def test_disks_are_looked_at_where_the_size_is_in_blocks_or_zero(tmp_path: Path) -> None:
    """In blocks: all but the room is judged. Zero: what was used before is named."""
    broken = dataclasses.replace(
        HEALTHY, disks=(DiskFacts(path=Path("/nvme"), error="not a place"),)
    )
    in_blocks = settings(disk_cache_gb=0, disk_cache_override_num_blocks=1000)
    [finding] = judged(broken, in_blocks)
    assert (finding.check, finding.found) == ("disk /nvme", "not a place")
    small = dataclasses.replace(DISK, free_bytes=1)
    in_both = settings(disk_cache_override_num_blocks=1000)
    assert judged(dataclasses.replace(HEALTHY, disks=(small,)), in_both) == []
    store = store_in(tmp_path, "kvbm-node-0")
    without = settings(host="node", disk_cache_gb=0, disk_cache_dirs=str(tmp_path))
    left = dataclasses.replace(DISK, left=left_stores(tmp_path, without))
    [finding] = judged(dataclasses.replace(HEALTHY, disks=(left,)), without)
    assert finding.check == f"store {store}"


def test_no_finding_for_what_the_settings_switch_off() -> None:
    """Goal: what the settings rule out is no ailment; what runs already is not in its own way."""
    no_direct = dataclasses.replace(HEALTHY, disks=(dataclasses.replace(DISK, direct=False),))
    assert judged(no_direct, settings(disk_disable_o_direct=True)) == []
    assert judged(dataclasses.replace(HEALTHY, disks=()), settings(disk_cache_gb=0)) == []
    made = dataclasses.replace(HEALTHY, disks=(dataclasses.replace(DISK, will_be_made=True),))
    assert judged(made) == []
    full = dataclasses.replace(HEALTHY, shm_free_bytes=0, shm_own_bytes=GB)
    assert judged(full) == []
    few = dataclasses.replace(HEALTHY, shm_free_bytes=GB // 2)
    assert judged(few, settings(cpu_cache_override_num_blocks=9)) == []
    ours = (PortFacts(6880, "DYN_KVBM_METRICS_PORT", is_free=False, is_ours=True),)
    assert judged(dataclasses.replace(HEALTHY, ports=ours)) == []
    assert judged(dataclasses.replace(HEALTHY, memlock_bytes=65536)) == []


@pytest.mark.slow
async def test_gather_finds_real_servers_ports_and_disks(
    nats_server: NatsServer, etcd_server: EtcdServer, tmp_path: Path
) -> None:
    """Goal: every fact is looked at for real: servers, ports, directories, NIXL, system calls."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        chosen = Settings.load(
            {},
            {
                **SIZES,
                "nats_url": nats_server.url,
                "registry_url": f"etcd://{etcd_server.server},127.0.0.1:1",
                "disk_cache_dirs": f"{tmp_path},/proc/nowhere,{tmp_path}/new/disk",
                "runtime_dir": tmp_path / "run",
                "shm_dir": "/dev/shm",
                "metrics_port": taken.getsockname()[1],
                "router_endpoint": f"tcp://127.0.0.1:{free_port()}",
                "router_replay_endpoint": "off",
            },
        )
        facts = await asyncio.to_thread(gather, chosen)
    assert facts.nats.jetstream
    assert facts.nats.max_payload_bytes == 8 << 20
    alive, dead = facts.etcd
    assert alive.version
    assert not alive.error
    assert dead.error
    metrics, router = facts.ports
    assert (metrics.is_free, metrics.is_ours, router.is_free) == (False, False, True)
    good, bad, new = facts.disks
    assert good.allocates
    assert not good.error
    assert bad.error
    assert new == dataclasses.replace(
        good, path=tmp_path / "new/disk", will_be_made=True, free_bytes=new.free_bytes,
        place=(good.place[0], 0),
    )  # fmt: skip
    assert good.is_there
    assert not (tmp_path / "new").exists()
    assert facts.shm_fs == "tmpfs"
    assert {"UCX", "POSIX"} <= set(facts.nixl_plugins)
    assert not (facts.io_uring and facts.linux_aio), "the other tests would fail, too"
    assert {entry for entry in os.listdir(tmp_path) if "doctor" in entry} == set()


@pytest.mark.slow
async def test_command_says_so_with_its_exit_code(nats_server: NatsServer, tmp_path: Path) -> None:
    """Goal: 0 when services would start, 1 with a wrong thing, which the output names."""
    healthy = {
        "KVBM_NATS_URL": nats_server.url,
        "KVBM_RUNTIME_DIR": str(tmp_path / "run"),
        "DYN_KVBM_CPU_CACHE_GB": "0.01",
        "DYN_KVBM_METRICS_PORT": str(free_port()),
        "KVBM_ROUTER_ENDPOINT": "off",
        "KVBM_ROUTER_REPLAY_ENDPOINT": "off",
    }
    code, findings = await _doctor(healthy)
    assert code == 0, findings
    code, findings = await _doctor({**healthy, "KVBM_NATS_URL": f"nats://127.0.0.1:{free_port()}"})
    assert code == 1
    assert [row["check"] for row in findings if row["level"] == "wrong"] == ["NATS"]


async def _doctor(environ: dict[str, str]) -> tuple[int | None, list[dict[str, str]]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvbm_cli.main", "doctor", "--json",
        env=os.environ | environ, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    return process.returncode, json.loads(output)
