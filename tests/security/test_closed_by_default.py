"""`kvbm up` as it comes, seen by another user of the machine and by another machine."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from kvbm_cli.admin_client import token_of
from kvbm_cli.doctor.listeners import listeners_of
from kvbm_common.access.addresses import is_loopback
from kvbm_common.access.nats_access import nats_access
from kvbm_common.access.roles import ADMIN, ROLES
from kvbm_common.config.settings import Settings
from kvbm_common.errors import BusUnavailable, NotPermitted
from kvbm_common.nats.bus import Bus
from kvbm_common.runtime.processes import free_port
from kvbm_common.wire.verbs import verb_subject

from tests.integration.running import Running, running

SIZES: dict[str, object] = {
    "cpu_cache_gb": 0.05,
    "disk_cache_gb": 0.2,
    "disable_disk_offload_filter": True,
}
DEFAULTS: dict[str, object] = {"router_endpoint": "", "router_replay_endpoint": ""}
"""A private stack switches routers off; here they are as they come."""
SECRETS = {
    "KVBM_ADMIN_TOKEN": "metrics", "KVBM_ADMIN_READ_TOKEN": "metrics",
    "DYN_KVBM_OBJECT_SECRET_KEY": "object-tier", "AWS_SECRET_ACCESS_KEY": "object-tier",
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Running]:
    """A stack with an engine that has worked. The tests of this module look at it, and change
    nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("DYN_KVBM_", "KVBM_"))]:
            patch.delenv(name)
        async with running(SIZES | DEFAULTS, engines=1) as run:
            await run.run(requests=20)
            yield run


in_loop_of_stack = pytest.mark.asyncio(loop_scope="module")


def with_children(pids: set[int]) -> set[int]:
    """Return some processes and all that they have started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def processes(run: Running) -> set[int]:
    """Return the processes of a stack: services, NATS, the peer reader, the engine."""
    engines = {pid for pid in with_children({os.getpid()}) if "kvbm_connectors" in command_of(pid)}
    return with_children(set(run.stack.pids.values()) | engines)


def command_of(pid: int) -> str:
    """Return the command line of a process, empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.mark.slow
@in_loop_of_stack
async def test_nothing_listens_beyond_this_machine(stack: Running) -> None:
    """Goal: another machine finds no port: not of NATS, HTTP, engines, routers, nor of UCX."""
    found = {
        (command_of(pid)[-60:], address)
        for pid in processes(stack)
        for address, _ in listeners_of(Path(f"/proc/{pid}"))
    }
    assert len(found) >= 4, "there is less than NATS, HTTP, and UCX of host tier and engine"
    assert not [one for one in found if not is_loopback(one[1])]


@in_loop_of_stack
async def test_sockets_and_secrets_are_the_owners(stack: Running) -> None:
    """Goal: another user of this machine reaches no socket and reads no file.

    1. The directory of the sockets has mode 0700, and every socket of engines and routers is there.
    2. So have those of credentials and of NATS's data, and each file of credentials has 0600.
    """
    settings = stack.stack.settings
    sockets = [
        settings.runtime_dir / name
        for name in ("host-tier.sock", "consolidator.sock", "router.sock", "router-replay.sock")
    ]
    assert all(stat.S_ISSOCK(path.stat().st_mode) for path in sockets)
    for directory in (settings.runtime_dir, settings.creds_dir, settings.state_dir / "nats"):
        assert mode_of(directory) == 0o700, directory
    files = list(settings.creds_dir.iterdir())
    assert {path.stem for path in files} == {role.name for role in ROLES} | {"admin"}
    assert {mode_of(path) for path in files} == {0o600}
    assert mode_of(settings.state_dir / "nats" / "nats-server.conf") == 0o600


def mode_of(path: Path) -> int:
    """Return the permissions of a file."""
    return path.stat().st_mode & 0o777


@pytest.mark.slow
@in_loop_of_stack
async def test_without_credentials_nothing_is_read_or_changed(stack: Running) -> None:
    """Goal: the attacks of an anonymous neighbour fail at the door.

    1. NATS ends a connection without credentials. 2. The HTTP API answers 401 to questions and
    changes. 3. Those of a consumer read, and neither fill nor evict nor lease.
    """
    settings = stack.stack.settings
    with pytest.raises(BusUnavailable, match="Authorization Violation"):
        await Bus.connect(settings.nats_url, "anonymous", deadline_s=3.0)
    async with httpx.AsyncClient(base_url=api_of(settings), trust_env=False) as client:
        assert (await client.get("/v1/status")).status_code == 401
        assert (await client.post("/v1/reset", json={"tier": "all"})).status_code == 401
        token = {"authorization": f"Bearer {token_of(settings, asks_here=True)}"}
        assert (await client.get("/v1/status", headers=token)).status_code == 200
    shown = dataclasses.replace(settings, nats_creds_file=settings.creds_dir / "consumer.creds")
    consumer = await Bus.connect(nats_access(shown, ADMIN), "a consumer")
    try:
        await consumer.request(verb_subject("index", "holders"), b"{}", deadline_s=2)
        for kind, verb in (("disk-tier", "fill"), ("host-tier", "lease"), ("host-tier", "evict")):
            subject = verb_subject(kind, verb, host=settings.host, instance="0")
            with pytest.raises(NotPermitted):
                await consumer.request(subject, b"{}", deadline_s=2)
    finally:
        await consumer.close()


@pytest.mark.slow
@pytest.mark.parametrize("password", ["MY SECRET", "MY/SECRET", "MY,SECRET", "MY@SECRET"])
@pytest.mark.parametrize("command", ["config", "serve index", "doctor", "status", "up"])
def test_no_password_of_a_url_is_printed(command: str, password: str, tmp_path: Path) -> None:
    """Goal: a password with characters that end a URL early is as secret as any other."""
    url = f"nats://u:{password}@127.0.0.1:{free_port()}"
    told = served(command.split(), {"KVBM_NATS_URL": url}, tmp_path)
    assert told.returncode != 0
    assert "KVBM_NATS_URL" in told.stderr
    assert not [word for word in ("MY", "SECRET") if word in told.stdout + told.stderr]


def api_of(settings: Settings) -> str:
    """Return where the HTTP API is."""
    return f"http://127.0.0.1:{settings.metrics_port}"


def variables_of(pid: int) -> set[str]:
    """Return the names of a process's variables."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {one.partition(b"=")[0].decode() for one in environ}


@pytest.mark.slow
async def test_a_secret_reaches_the_service_that_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: a service that falls into other hands gives away its own secrets only.

    Each secret is in the environment of `kvbm up`; of its services one kind has it. NATS has none,
    and neither have engines of ours.
    """
    for name in SECRETS:
        monkeypatch.setenv(name, f"secret-of-{name.lower()}")
    async with running(SIZES, engines=1) as run:
        pids = run.stack.pids | {"engine": run.engines[0].pid}
        assert {"nats", "host-tier", "metrics"} < pids.keys()
        for kind, pid in pids.items():
            assert variables_of(pid) & SECRETS.keys() == {
                name for name, owner in SECRETS.items() if owner == kind
            }, kind


@pytest.mark.slow
@in_loop_of_stack
async def test_no_secret_is_printed(stack: Running) -> None:
    """Goal: logs and commands can be shown to others.

    1. Logs of all services and of NATS. 2. What `kvbm config`, `creds`, `doctor` and `status`
    print, also with a password in the URL. No password and no token is in any of it.
    """
    found = await asyncio.to_thread(printed_secrets, stack)
    assert found == []


def printed_secrets(run: Running) -> list[str]:
    """Return the secrets of a stack that are in its logs, or in what commands print."""
    settings = run.stack.settings
    words = [path.read_text().strip().rpartition(":")[2] for path in settings.creds_dir.iterdir()]
    assert all(len(word) > 20 for word in words)
    assert run.stack.log_dir is not None
    logs = [*run.stack.log_dir.glob("*.log"), settings.state_dir / "nats" / "nats-server.log"]
    shown = [path.read_text() for path in logs]
    admin = (settings.creds_dir / "admin.creds").read_text().strip()
    with_password = settings.nats_url.replace("nats://", f"nats://{admin}@")
    environ = os.environ | settings.as_environ()
    for more in ({}, {"KVBM_NATS_URL": with_password}):
        for command in ("config", "creds", "doctor", "status"):
            told = subprocess.run(
                [sys.executable, "-m", "kvbm_cli.main", command], env=environ | more,
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert told.stdout, command
            shown += [told.stdout, told.stderr]
    return [word for word in words if any(word in text for text in shown)]


REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "NATS elsewhere": ("index", {"KVBM_NATS_URL": "nats://192.0.2.1:4222"}, "KVBM_NATS_CREDS_FILE"),
    "etcd elsewhere": (
        "index", {"KVBM_REGISTRY_URL": "etcd://192.0.2.1:2379"}, "KVBM_ETCD_CA_FILE",
    ),
    "HTTP API": ("metrics", {"KVBM_METRICS_BIND": "0.0.0.0"}, "KVBM_ADMIN_TOKEN_FILE"),
    "a service's port": (
        "index", {"KVBM_SERVICE_BIND": "0.0.0.0", "KVBM_SERVICE_PORT": "6881"},
        "KVBM_SCRAPE_TOKEN_FILE",
    ),
    "engines of the host tier": (
        "host-tier", {"KVBM_HOST_TIER_ENDPOINT": "tcp://0.0.0.0:5500"}, "KVBM_CURVE_SERVER_FILE",
    ),
    "engines of the consolidator": (
        "consolidator", {"KVBM_CONSOLIDATOR_ENDPOINT": "tcp://127.0.0.1:5500"},
        "KVBM_CURVE_SERVER_FILE",
    ),
    "routers": (
        "consolidator", {"KVBM_ROUTER_ENDPOINT": "tcp://0.0.0.0:57001"}, "KVBM_ROUTER_OPEN",
    ),
    "replays of routers": (
        "consolidator", {"KVBM_ROUTER_REPLAY_ENDPOINT": "tcp://0.0.0.0:58001"}, "KVBM_ROUTER_OPEN",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_open_ends_the_start(what: str, tmp_path: Path) -> None:
    """Goal: nothing is open by mistake: the service ends with 2, and says what to set."""
    kind, variables, named = REFUSED[what]
    told = served(["serve", kind], variables, tmp_path)
    assert told.returncode == 2, told.stderr
    assert next(iter(variables)) in told.stderr
    assert named in told.stderr


def served(
    arguments: list[str], variables: dict[str, str], directory: Path
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    own = {"KVBM_RUNTIME_DIR": str(directory / "run"), "KVBM_STATE_DIR": str(directory / "state")}
    return subprocess.run(
        [sys.executable, "-m", "kvbm_cli.main", *arguments], env=os.environ | own | variables,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["state", "state/creds"])
def test_a_state_directory_that_others_may_change_is_refused(name: str, tmp_path: Path) -> None:
    """Goal: credentials that they may replace are theirs."""
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name).chmod(0o777)
    told = served(["up"], {"KVBM_NATS_URL": f"nats://127.0.0.1:{free_port()}"}, tmp_path)
    assert told.returncode == 2
    assert "no other user may write to" in told.stderr


@pytest.mark.slow
def test_the_nats_of_kvbm_up_is_not_opened_to_others(tmp_path: Path) -> None:
    """It has no TLS: passwords would cross the network."""
    told = served(["up"], {"KVBM_NATS_URL": f"nats://0.0.0.0:{free_port()}"}, tmp_path)
    assert told.returncode == 2
    assert "kvbm nats-config" in told.stderr
    assert "KVBM_NATS_OPEN" in told.stderr
