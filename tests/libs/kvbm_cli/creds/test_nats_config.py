"""What `kvbm nats-config` writes, run after run, and a rotation on a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_cli.creds.commands import plan_of, write_all
from kvbm_cli.creds.nats_config import CredentialPlan, places_of
from kvbm_common.access.nats_access import NatsAccess, nats_access
from kvbm_common.access.roles import ADMIN, CONSUMER
from kvbm_common.errors import BusUnavailable, ConfigError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import find_binary
from kvbm_common.nats.jetstream import call_api, publish_acknowledged
from kvbm_common.nats.stream_setup import set_up_streams
from kvbm_common.nats.streams import StreamLimits
from kvbm_common.runtime.processes import free_port

from tests.security.guarded_nats import GuardedNats, guarded_nats
from tests.waiting import ask_until, wait_until

REPOSITORY = Path(__file__).parents[4]
HOSTS = {"hosts": ("a", "b")}


def written(directory: Path, **given: object) -> dict[str, str]:
    """Run it; return every credential by its file."""
    plan = plan_of(directory, given)
    write_all(directory, plan)
    return {place.path: (directory / place.path).read_text() for place in places_of(plan)}


def test_a_run_leaves_what_is_there(tmp_path: Path) -> None:
    """Goal: a host more changes nothing for the others, and nothing need be told twice."""
    before = written(tmp_path, **HOSTS)
    assert written(tmp_path) == before
    more = written(tmp_path, hosts=("a", "b", "c"))
    assert before.items() < more.items()
    assert {path.split("/")[1] for path in more.keys() - before.keys()} == {"c"}


def test_the_servers_configuration_has_public_keys_only(tmp_path: Path) -> None:
    """Goal: who reads it cannot connect. Each secret is a file of mode 0600."""
    seeds = written(tmp_path, names=("localhost",), **HOSTS)
    text = (tmp_path / "server" / "nats-server.conf").read_text()
    assert not [path for path, seed in seeds.items() if seed.strip() in text]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > len(seeds)
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert not (tmp_path / "server" / "ca.key").exists()


def test_the_server_reads_paths_of_any_name(tmp_path: Path) -> None:
    """Goal: certificates and data may be below a home with a letter beyond ASCII."""
    directory = tmp_path / 'jörg "j"'
    store = str(directory / "data")
    written(directory, names=("localhost",), store_dir=store, **HOSTS)
    text = (directory / "server" / "nats-server.conf").read_text(encoding="utf-8")
    assert json.loads(text)["jetstream"]["store_dir"] == store
    command = [find_binary(), "-t", "--config", str(directory / "server" / "nats-server.conf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_server_has_no_port_without_credentials(tmp_path: Path) -> None:
    """Goal: it listens where clients connect, and has no monitor, which asks for no password."""
    written(tmp_path, **HOSTS)
    configuration = json.loads((tmp_path / "server" / "nats-server.conf").read_text())
    opened = {"listen", "http", "https", "http_port", "monitor_port", "cluster", "websocket"}
    assert configuration.keys() & opened == {"listen"}


def test_the_commands_of_the_manual_start_a_server(tmp_path: Path) -> None:
    """Goal: a user without rights of root can copy them: the server says that it is ready."""
    page = (REPOSITORY / "docs" / "security.md").read_text().replace("\\\n", " ")
    (made,) = re.findall(r"^ {4}(kvbm nats-config --out \S+ --hosts.*)$", page, re.MULTILINE)
    (started,) = re.findall(r"^ {4}(nats-server --config .*)$", page, re.MULTILINE)
    tools = str(Path(sys.executable).parent)
    environ = os.environ | {"HOME": str(tmp_path), "PATH": f"{tools}:{os.environ['PATH']}"}
    port = free_port()
    subprocess.run(
        ["bash", "-ec", f"{made} --listen 127.0.0.1:{port}"], env=environ, check=True, timeout=60
    )
    with subprocess.Popen(
        ["bash", "-c", f"exec {started}"], env=environ, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        told = [line for line in iter(server.stderr.readline, "") if is_end_of_start(server, line)]
    assert "Server is ready" in told[0]
    assert (tmp_path / "kvbm-nats" / "jetstream").is_dir()


def is_end_of_start(server: subprocess.Popen[str], line: str) -> bool:
    """Tell whether a line of the log ends the start; the server is then ended."""
    ended = "Server is ready" in line or "[FTL]" in line
    if ended:
        server.terminate()
    return ended


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--hosts", {"hosts": ("a.b",)}),
        ("--hosts", {"hosts": ("shared",)}),
        ("--hosts", {}),
        ("--tenants", {"hosts": ("a",), "tenants": ("SYS",)}),
    ],
)
def test_a_name_that_cannot_be_one(tmp_path: Path, option: str, given: dict[str, object]) -> None:
    """The text names the option."""
    with pytest.raises(ConfigError, match=option):
        plan_of(tmp_path, given)


def test_an_interrupted_rotation_is_completed(tmp_path: Path) -> None:
    """1. The old keys are noted, a file is not replaced yet. 2. The next run has each key once."""
    before = written(tmp_path, **HOSTS)
    plan = plan_of(tmp_path, {})
    write_all(tmp_path, plan, rotate=True)
    path, seed = next(iter(before.items()))
    (tmp_path / path).write_text(seed)
    write_all(tmp_path, plan)
    configuration = json.loads((tmp_path / "server" / "nats-server.conf").read_text())
    keys = [user["nkey"] for user in configuration["accounts"]["kvbm"]["users"]]
    assert len(keys) == len(set(keys)) == 2 * len(before) - 1


@pytest.mark.slow
async def test_rotation_step_by_step(tmp_path: Path) -> None:
    """Goal: the steps of docs/security.md, with a client that never restarts.

    1. After the first step the server takes old and new credentials. 2. A second rotation is
    refused meanwhile. 3. After the last step the old ones are refused; the client has come back.
    """
    async with guarded_nats(tmp_path) as nats, nats.bus(CONSUMER) as client:
        old = tmp_path / "old.creds"
        shutil.copy2(nats.creds_of(CONSUMER), old)
        with_old = nats_access(nats.settings(CONSUMER, nats_creds_file=old), CONSUMER)
        nats.write(rotate=True)
        nats.server.reload()
        for access in (with_old, nats.access(CONSUMER)):
            await ask_until(lambda access=access: connects(access))  # type: ignore[misc]
        with pytest.raises(ConfigError, match="--drop-old"):
            nats.write(rotate=True)
        nats.write(drop_old=True)
        nats.server.reload()
        await ask_until(lambda: refuses(with_old))
        assert await connects(nats.access(CONSUMER))
        await wait_until(lambda: client.connected and client.generation > 0)


async def test_another_number_of_partitions_step_by_step(tmp_path: Path) -> None:
    """Goal: the steps of docs/scaling.md.

    1. The new number has streams beside the old ones, and a host of either number may publish. 2. A
    third number is refused. 3. At the end the streams of the old number are gone, and their room.
    """
    one, two = StreamLimits(partitions=1), StreamLimits(partitions=2)
    async with guarded_nats(tmp_path) as nats:
        nats.write(streams=two)
        await nats.server.stop()
        async with nats.server:
            async with nats.bus(ADMIN) as admin, nats.bus("host-tier") as host:
                for limits in (two, one):
                    admin.limits = limits
                    await set_up_streams(admin)
                    spec = limits.events_of("a")
                    subject = spec.subjects[0].replace(">", "a.host-tier-0.stored")
                    await publish_acknowledged(host, spec, subject, b"{}")
                with pytest.raises(ConfigError, match="2 or 1: --drop-old"):
                    nats.write(streams=StreamLimits(partitions=3))
                for spec in {*one.partitioned.streams} - {*two.partitioned.streams}:
                    await call_api(admin, f"STREAM.DELETE.{spec.name}")
            before = configuration_in(nats)["jetstream"]
            nats.write(drop_old=True)
            account = configuration_in(nats)["accounts"]["kvbm"]
            assert account["jetstream"]["max_streams"] == len(two.partitioned.streams)
            # nats-server reloads nothing where its own bound falls.
            assert configuration_in(nats)["jetstream"] == before


def configuration_in(nats: GuardedNats) -> Any:
    """Return the server's configuration as it is written."""
    return json.loads((nats.directory / "server/nats-server.conf").read_text())


async def refuses(access: NatsAccess) -> bool:
    """Tell whether the server refuses a client."""
    return not await connects(access)


async def connects(access: NatsAccess) -> bool:
    """Tell whether the server takes a client."""
    try:
        bus = await Bus.connect(access, "test", deadline_s=1.0)
    except BusUnavailable:
        return False
    await bus.close()
    return True


@pytest.mark.parametrize("wrong", ["a b", "é", "*", "a..b", ".", "-a", "\x1b[2J", "x" * 300])
@pytest.mark.parametrize("field", ["names", "etcd_names"])
def test_what_is_no_name_of_a_server_is_refused_by_its_option(field: str, wrong: str) -> None:
    plan = CredentialPlan(hosts=("a",), names=("nats.example", "*.example", "10.0.0.5", "fd00::5"))
    assert plan.check() == plan
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}"):
        msgspec.structs.replace(plan, **{field: (wrong,)}).check()
