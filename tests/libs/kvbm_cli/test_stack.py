"""The stack and the life of a service, with sample services in real processes."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_cli.service_process import ServiceProcess
from kvbm_cli.stack import NATS_STOP_DEADLINE_S, STOP_DEADLINE_S, Stack, ready_deadline_s
from kvbm_cli.stack_processes import processes_of
from kvbm_common.access.secret_files import make_private_directory
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, NoResponder, RequestFailed, ServiceFailed
from kvbm_common.memory.arena import Arena
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.jetstream import JetStreamError, call_api
from kvbm_common.nats.streams import AUDIT, EVENTS, REGISTRY
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.runtime.processes import free_port
from kvbm_common.wire.metrics import MetricsSnapshot
from kvbm_common.wire.verbs import StatsReply

from tests.libs.sample_services import install
from tests.waiting import ask_until, lives, wait_until

DEADLINE_S = 10.0
CLOSE_MAX_S = STOP_DEADLINE_S + NATS_STOP_DEADLINE_S
"""What `close` waits for at most; its own work comes on top."""
SLACK_S = 10.0
"""Its own work takes 0.1 s: a slow machine has room, and a wait without a deadline has none."""


@pytest.fixture(autouse=True)
def _sample_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.slow
async def test_stack_starts_serves_and_leaves_nothing() -> None:
    """Goal: a whole life.

    1. Two services become ready. 2. They are in the registry, with the epoch that they have.
    3. They answer `stats` and `metrics`. 4. After the end no process and no file is left.
    """
    async with Stack.private(services=["sample", "other"]) as stack:
        pids = stack.pids
        assert set(pids) == {"nats", "sample", "other"}
        bus = await Bus.connect(stack.admin, "test")
        registry = NatsRegistry(bus, ttl_s=5)
        records = {record.kind: record for record in await registry.list()}
        assert {kind: record.pid for kind, record in records.items()} == {
            kind: pid for kind, pid in pids.items() if kind != "nats"
        }
        subject = f"kvbm.v1.sample.{stack.settings.host}.0"
        reply = await bus.request(f"{subject}.stats", b"{}", deadline_s=2)
        stats = msgspec.json.decode(reply, type=StatsReply)
        assert stats.epoch == records["sample"].epoch
        assert stack.services["sample"].description == f"epoch {stats.epoch}"
        reply = await bus.request(f"{subject}.metrics", b"{}", deadline_s=2)
        snapshot = msgspec.json.decode(reply, type=MetricsSnapshot)
        families = {family.name: family for family in snapshot.families}
        assert families["kvbm_samples_total"].samples[0].value == 3
        with pytest.raises(RequestFailed, match="not_ready"):
            await bus.request(f"kvbm.v1.other.{stack.settings.host}.0.stats", b"{}", deadline_s=2)
        await registry.close()
        await bus.close()
        stopping_s = time.monotonic()
    assert time.monotonic() - stopping_s < CLOSE_MAX_S + SLACK_S
    assert not any(lives(pid) for pid in pids.values())
    assert not stack.settings.runtime_dir.parent.exists()


def test_a_large_arena_has_more_time_to_be_allocated() -> None:
    """Goal: `kvbm up` does not give up a host tier that allocates 100 GB; others gain nothing."""
    settings = Settings.load({}, {"cpu_cache_gb": 100.0})
    small = ready_deadline_s("disk-tier", settings)
    assert ready_deadline_s("host-tier", settings) == small + 800
    assert ready_deadline_s("host-tier-1", settings) == small + 800


@pytest.mark.slow
async def test_killed_service_starts_again_with_a_later_epoch() -> None:
    """Goal: kill -9 and start, as the fault tests do."""
    async with Stack.private(services=["sample"]) as stack:
        first = stack.services["sample"].description
        await stack.kill("sample")
        assert "sample" not in stack.pids
        await stack.start("sample")
        await stack.wait_ready("sample")
        second = stack.services["sample"].description
    assert int(second.split()[1]) > int(first.split()[1])


@pytest.mark.slow
async def test_crashed_service_is_started_again() -> None:
    """Goal: with `restart`, a service that dies by itself comes back."""
    async with Stack.private(services=["sample"], restart=True) as stack:
        service = stack.services["sample"]
        dead = service.pid
        os.kill(dead, signal.SIGKILL)
        await wait_until(lambda: service.pid not in (0, dead))
        await stack.wait_ready("sample")
    assert stack.pids == {}


@pytest.mark.slow
async def test_a_service_is_tried_again_when_the_machine_had_no_process_to_give(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: one failed fork after a crash (EAGAIN) is one more crash, and is said."""
    async with Stack.private(services=["sample"], restart=True) as stack:
        service, fork, tries = stack.services["sample"], asyncio.create_subprocess_exec, 0

        async def fail_once(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise BlockingIOError(errno.EAGAIN, "planted")
            return await fork(*arguments, **options)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", fail_once)
        os.kill(service.pid, signal.SIGKILL)
        await wait_until(lambda: tries == 2 and service.pid != 0)
        await stack.wait_ready("sample")
    assert "sample cannot be started: [Errno 11] planted" in caplog.text


async def wait_served(stack: Stack) -> None:
    """Wait until the service `sample` answers over the stack's NATS."""
    bus = await Bus.connect(stack.admin, "test", deadline_s=DEADLINE_S)
    subject = f"kvbm.v1.sample.{stack.settings.host}.0.stats"
    await ask_until(
        lambda: bus.request(subject, b"{}", deadline_s=1),
        deadline_s=DEADLINE_S, despite=NoResponder,
    )  # fmt: skip
    await bus.close()


@pytest.mark.slow
async def test_crashed_nats_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: with `restart`, NATS comes back where it was, and takes the credentials of before."""
    async with Stack.private(services=["sample"], restart=True) as stack:
        first, service = stack.pids["nats"], stack.pids["sample"]
        os.kill(first, signal.SIGKILL)
        await wait_until(lambda: stack.pids.get("nats", first) != first)
        await wait_served(stack)
        assert stack.pids["sample"] == service
        assert "nats-server has ended" in caplog.text
        await stack.kill("nats")
        await stack.start("nats")
        os.kill(first := stack.pids["nats"], signal.SIGKILL)
        await wait_until(lambda: stack.pids.get("nats", first) != first)
    assert stack.pids == {}


@pytest.mark.slow
async def test_a_nats_that_lost_its_store_has_its_streams_when_it_is_back() -> None:
    """Goal: only the role `admin` makes streams, so services would wait for an operator."""
    async with Stack.private(services=["sample"], restart=True) as stack:
        first, service = stack.pids["nats"], stack.pids["sample"]
        shutil.rmtree(stack.settings.state_dir / "nats" / "jetstream")
        os.kill(first, signal.SIGKILL)
        await wait_until(lambda: stack.pids.get("nats", first) != first)
        await wait_served(stack)
        bus = await Bus.connect(stack.admin, "test", deadline_s=DEADLINE_S)
        for spec in (EVENTS, AUDIT, REGISTRY):
            await ask_until(
                functools.partial(call_api, bus, f"STREAM.INFO.{spec.name}"),
                deadline_s=DEADLINE_S, despite=JetStreamError,
            )  # fmt: skip
        await bus.close()
        assert stack.pids["sample"] == service


@pytest.mark.slow
async def test_a_nats_that_cannot_come_back_at_once_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: a failed start of NATS is said and tried again; a stop ends the tries."""
    async with Stack.private(services=[], restart=True) as stack:
        spawn, failing = NatsServer.start, True

        async def fail(server: NatsServer) -> None:
            if failing:
                raise ServiceFailed("planted")
            await spawn(server)

        monkeypatch.setattr(NatsServer, "start", fail)
        os.kill(stack.pids["nats"], signal.SIGKILL)
        await wait_until(lambda: "nats-server cannot be started: planted" in caplog.text)
        failing = False
        await wait_until(lambda: "nats" in stack.pids)
        failing = True
        os.kill(stack.pids["nats"], signal.SIGKILL)
        await wait_until(lambda: caplog.text.count("nats-server has ended") == 3)
    assert stack.pids == {}


async def test_service_survives_nats() -> None:
    """Goal: NATS is killed and comes back; the service is the same process and serves again."""
    async with Stack.private(services=["sample"]) as stack:
        pid = stack.pids["sample"]
        await stack.kill("nats")
        await stack.start("nats")
        await wait_served(stack)
        assert stack.pids["sample"] == pid


@pytest.mark.slow
async def test_service_that_cannot_start_is_a_typed_error_with_its_log() -> None:
    """Goal: the reason is in the message, and what had started is stopped again."""
    stack = Stack.private(services=["sample", "failing"])
    with pytest.raises(ServiceFailed, match="this is the reason"):
        await stack.open()
    await stack.close()
    assert stack.pids == {}


async def test_bad_settings_are_not_tried_again() -> None:
    """Goal: exit code 2 ends it even with `restart`."""
    stack = Stack.private(services=["nothing-of-this-name"], restart=True)
    with pytest.raises(ServiceFailed, match="no service"):
        await stack.open()
    await stack.close()


@pytest.mark.slow
async def test_an_end_that_is_broken_off_leaves_no_directory() -> None:
    """A second signal, while a service that hangs is waited for."""
    stack = Stack.private({}, services=("index",))
    await stack.open()
    state_dir = stack.settings.state_dir
    os.kill(stack.pids["index"], signal.SIGSTOP)
    try:
        ending = asyncio.create_task(stack.close(deadline_s=60))
        done, _ = await asyncio.wait({ending}, timeout=0.1)
        assert not done
        assert state_dir.exists()
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert not state_dir.exists()
    finally:
        os.kill(stack.pids["index"], signal.SIGKILL)
        await stack.close()


@pytest.mark.slow
async def test_stubborn_service_is_stopped_in_time() -> None:
    """Goal: less than 5 s even if a service ignores its cancellation: so are the deadlines."""
    assert CLOSE_MAX_S < 5
    async with Stack.private(services=["stubborn"]) as stack:
        started_s = time.monotonic()
    assert time.monotonic() - started_s < CLOSE_MAX_S + SLACK_S
    assert stack.pids == {}


async def test_two_stacks_in_one_runtime_directory_are_refused(tmp_path: Path) -> None:
    """Goal: the second does not take the sockets of the first away."""
    async with Stack.private(services=[]) as first:
        second = Stack.private({"runtime_dir": first.settings.runtime_dir}, services=[])
        with pytest.raises(ServiceFailed, match=f"process {os.getpid()} runs a stack"):
            await second.open()
        await second.close()
        assert (first.settings.runtime_dir / "stack.lock").exists()


@pytest.mark.slow
async def test_two_stacks_with_one_state_directory_are_refused(tmp_path: Path) -> None:
    """Goal: the second does not write into the first one's JetStream store, or its credentials.
    Method: the second has a name, a port and a runtime directory of its own."""
    async with Stack.private(services=[]) as first:
        state_dir = first.settings.state_dir
        before = {path: path.stat().st_mtime_ns for path in state_dir.rglob("*.c*")}
        assert before, "neither credentials nor a configuration"
        url = f"nats://127.0.0.1:{free_port()}"
        own = {"host": "second", "runtime_dir": tmp_path / "run", "nats_url": url}
        second = Stack(own, state_dir=state_dir, services=[])
        with pytest.raises(ServiceFailed, match=f"process {os.getpid()} runs NATS in {state_dir}"):
            await second.open()
        await second.close()
        assert before == {path: path.stat().st_mtime_ns for path in state_dir.rglob("*.c*")}


async def test_sockets_of_a_killed_consolidator_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for routers, too: the directory goes with them. Elsewhere they may be another's."""
    run, elsewhere = tmp_path / "run", tmp_path / "other-replay.sock"
    monkeypatch.setattr(ServiceProcess, "start", lambda _service: None)
    monkeypatch.setattr(ServiceProcess, "wait_ready", _is_ready)
    own = {"runtime_dir": run, "router_endpoint": f"ipc://{run}/router.sock",
           "router_replay_endpoint": f"ipc://{elsewhere}"}  # fmt: skip
    async with Stack.private(own, services=["consolidator"]):
        for name in ("router.sock", "router.sock_dp12"):
            (run / name).touch()
        elsewhere.touch()
    assert not run.exists()
    assert elsewhere.exists()


async def _is_ready(_service: ServiceProcess, *, deadline_s: float) -> None:
    assert deadline_s > 0


async def test_a_further_host_needs_no_credential_of_the_admin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: its services have theirs, and start; the streams are made elsewhere.

    Method: NATS on another machine, which the services alone would reach.
    """
    started: list[str] = []

    monkeypatch.setattr(ServiceProcess, "start", lambda service: started.append(service.kind))
    monkeypatch.setattr(ServiceProcess, "wait_ready", _is_ready)
    creds_dir = tmp_path / "creds"
    make_private_directory(creds_dir, "KVBM_CREDS_DIR")
    (creds_dir / "host-tier.creds").write_text("host-tier:secret")
    own, far = {"creds_dir": creds_dir}, "tls://192.0.2.1:4222"
    async with Stack.private(own, services=["host-tier"], nats_url=far):
        assert started == ["host-tier"]
    both = Stack.private(own, services=["host-tier", "disk-tier"], nats_url=far)
    with pytest.raises(ConfigError, match=r"disk-tier\.creds in KVBM_CREDS_DIR"):
        await both.open()
    await both.close()
    assert started == ["host-tier"]


@pytest.mark.slow
async def test_what_another_stack_uses_stays(tmp_path: Path) -> None:
    """Two stacks on a host of one name: the second one fails to start, and cleans up. The first
    one's arena stays; one whose process is gone does not."""
    used = Arena.create(tmp_path, "kvbm-ours-0-1-arena", 4096)
    left = tmp_path / "kvbm-ours-0-2-arena"
    left.write_bytes(b"x")
    settings = {"shm_dir": tmp_path, "host": "ours", "cpu_cache_gb": 100_000}
    stack = Stack.private(settings, services=["host-tier"])
    with pytest.raises(ServiceFailed):
        await stack.open()
    await stack.close()
    assert used.path.exists()
    assert not left.exists()
    used.close()


@pytest.mark.slow
async def test_services_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Goal: no orphan after kill -9 of `kvbm up`. Method: kill it, watch its children."""
    script = tmp_path / "up.py"
    script.write_text(
        "import asyncio\n"
        "from kvbm_cli.stack import Stack\n"
        "async def main():\n"
        "    async with Stack.private(services=['sample']) as stack:\n"
        "        print(*stack.pids.values(), stack.settings.runtime_dir.parent, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    *pids, directory = (await parent.stdout.readline()).decode().split()
    parent.kill()
    await parent.wait()
    await wait_until(lambda: not any(lives(int(pid)) for pid in pids))
    await asyncio.to_thread(_remove, Path(directory))


def _remove(directory: Path) -> None:
    import shutil

    shutil.rmtree(directory)


def test_each_directory_has_a_disk_tier() -> None:
    settings = Settings.load(
        {"DYN_KVBM_DISK_CACHE_DIR": "/d1, /d2", "DYN_KVBM_DISK_CACHE_GB": "3"}, {"instance": "a"}
    )
    processes = processes_of("disk-tier", settings)
    found = {name: Settings.load(own) for name, own in processes.items()}
    assert {
        name: (own.instance, own.disk_cache_dirs, own.disk_cache_gb) for name, own in found.items()
    } == {
        "disk-tier": ("a", (Path("/d1"),), 1.5),
        "disk-tier-1": ("a-1", (Path("/d2"),), 1.5),
    }
    assert processes_of("index", settings) == {"index": {}}
    assert processes_of("disk-tier", Settings.load({})) == {"disk-tier": {}}


def test_host_tiers_share_the_size_and_are_numbered_as_containers_are() -> None:
    """Goal: a name for each by which it and its arena are told apart, wherever it was started."""
    settings = Settings.load({"KVBM_HOST_TIERS": "3", "DYN_KVBM_CPU_CACHE_GB": "6"})
    found = {name: Settings.load(own) for name, own in processes_of("host-tier", settings).items()}
    assert {name: (own.instance, own.cpu_cache_gb) for name, own in found.items()} == {
        "host-tier": ("0", 2.0), "host-tier-1": ("1", 2.0), "host-tier-2": ("2", 2.0)
    }  # fmt: skip
    blocks = {"KVBM_HOST_TIERS": "2", "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "100"}
    own = processes_of("host-tier", Settings.load(blocks))["host-tier-1"]
    assert Settings.load(own).cpu_cache_override_num_blocks == 50
    assert processes_of("host-tier", Settings.load({})) == {"host-tier": {}}
