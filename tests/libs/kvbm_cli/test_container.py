"""Instances of a container: numbers, locks, standbys and health, with real processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvbm_cli import container
from kvbm_cli.container import (
    INSTANCES_MAX,
    TooManyInstances,
    check_memory,
    environ_of_host,
    health,
    lock_path,
    memory_limit,
    take_instance,
)
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.wire.verbs import StatsReply

HOLDER = """
import sys
from pathlib import Path
from kvbm_cli import container
container.INSTANCE_FILE = Path(sys.argv[2]) / "instance"
lock = container.wait_turn(Path(sys.argv[1]), "host-tier")
print("my turn", flush=True)
sys.stdin.read()
"""


def test_replicas_take_the_first_free_number(tmp_path: Path) -> None:
    """Goal: numbers are dense, per kind, and free again when their holder is gone."""
    with contextlib.ExitStack() as held:

        def take(kind: str) -> str:
            number, lock = take_instance(tmp_path, kind)
            held.enter_context(lock)
            return number

        number, lock = take_instance(tmp_path, "index")
        assert (number, take("index"), take("disk-tier")) == ("0", "1", "0")
        lock.close()
        assert take("index") == "0"


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ({"NODE_NAME": "ip-10-0-0-1.internal"}, "ip-10-0-0-1-internal"),
        ({"NODE_NAME": "n" * 70}, "n" * 64),
        ({"NODE_NAME": "node", "KVBM_HOST": "other"}, "other"),
    ],
)
def test_a_pod_has_the_name_of_its_node(given: dict[str, str], host: str) -> None:
    """Goal: any node's name becomes a host's, unless one is given; a service starts with it."""
    assert Settings.load(environ_of_host(given)).host == host
    assert "KVBM_HOST" not in environ_of_host({"NODE_NAME": ""})


def test_there_is_an_end_to_numbers(tmp_path: Path) -> None:
    """Goal: a loop that starts replicas is told so."""
    locks = [take_instance(tmp_path, "index")[1] for _ in range(INSTANCES_MAX)]
    with pytest.raises(TooManyInstances):
        take_instance(tmp_path, "index")
    for lock in locks:
        lock.close()


def test_a_standby_waits_for_the_death_of_the_one_that_serves(tmp_path: Path) -> None:
    """Goal: the second holder's turn comes with the SIGKILL of the first, and not before."""

    def start() -> subprocess.Popen[str]:
        (tmp_path / "own").mkdir(exist_ok=True)
        command = [sys.executable, "-c", HOLDER, str(tmp_path), str(tmp_path / "own")]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    first = start()
    assert first.stdout is not None
    assert first.stdout.readline() == "my turn\n"
    second = start()
    assert second.stdout is not None
    assert "standing by" in second.stdout.readline()
    assert (tmp_path / "own" / "instance").read_text() == container.STANDBY
    first.kill()
    assert second.stdout.readline() == "my turn\n"
    second.kill()
    for process in (first, second):
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "expected"), [("index", "index-1"), ("host-tier", "host-tier-0")])
def test_the_service_has_the_number_and_the_lock(tmp_path: Path, kind: str, expected: str) -> None:
    """Goal: the lock outlives the exec into the service, which knows its number.

    Method: number 0 of the index is taken. NATS is nowhere, so the service stays at the start.
    """
    runtime_dir = tmp_path / "run"
    runtime_dir.mkdir(mode=0o700)
    taken = take_instance(runtime_dir, "index")[1]
    environ = os.environ | {
        "TMPDIR": str(tmp_path),
        "KVBM_RUNTIME_DIR": str(runtime_dir),
        "KVBM_NATS_URL": "nats://127.0.0.1:1",
    }
    command = [sys.executable, "-m", "kvbm_cli.container", "serve", kind]
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert expected in line
    number = expected[-1]
    assert (tmp_path / "kvbm-instance").read_text() == number
    assert lock_path(runtime_dir, kind, int(number)).read_text() == str(process.pid)
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 0
    taken.close()


async def test_health_is_what_the_instance_says(nats_server: NatsServer, bus: Bus) -> None:
    """Goal: an answer of the very instance, or a typed error."""
    settings = Settings.load({}, {"nats_url": nats_server.url, "host": "h"})

    async def answer(_payload: bytes) -> bytes:
        return (
            b'{"kind":"index","host":"h","instance":"1","epoch":1,"ready":false,"reasons":["why"]}'
        )

    await bus.add_verbs("index", "1", "h", {"stats": answer})
    stats: StatsReply = await health("index", "1", settings)
    assert (stats.ready, stats.reasons) == (False, ["why"])
    with pytest.raises(KvbmError):
        await health("index", "0", settings)


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "4294967296", 4 * 1024**3),
        ("memory.max", "max", None),
        ("memory/memory.limit_in_bytes", "4294967296", 4 * 1024**3),
    ],
)
def test_the_limit_of_the_container(
    tmp_path: Path, name: str, text: str, limit: int | None
) -> None:
    """Goal: both kinds of control groups are read, and no limit is none."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"{text}\n")
    assert memory_limit(tmp_path) == limit
    assert memory_limit(tmp_path / "away") is None


def test_an_arena_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    """Goal: a text that names both variables, instead of a signal in the middle of the start."""
    settings = Settings.load({}, {"cpu_cache_gb": 4})
    check_memory(settings, None)
    check_memory(settings, 5_000_000_000)
    with pytest.raises(ConfigError, match=r"DYN_KVBM_CPU_CACHE_GB.*KVBM_HOST_TIER_MEMORY"):
        check_memory(settings, 4 * 1024**3)
