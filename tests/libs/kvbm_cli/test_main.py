"""The command line, as a user calls it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from kvbm_cli.main import COMMANDS
from kvbm_common.runtime.processes import free_port
from kvbm_common.wire.operator_verbs import OPERATOR_VERBS

from tests.libs.sample_services import install

DEADLINE_S = 60
KVBM = Path(sys.executable).parent / "kvbm"


async def call(*arguments: str, **environ: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `kvbm`."""
    process = await asyncio.create_subprocess_exec(
        str(KVBM),
        *arguments,
        env=os.environ | environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_config_shows_values_and_origins() -> None:
    code, output, errors = await call(
        "config", "--json", DYN_KVBM_CPU_CACHE_GB="1.5", DYN_KVBM_CPU_CACH_GB="2"
    )
    assert code == 0, errors
    printed = json.loads(output)
    by_name = {row["name"]: row for row in printed["settings"]}
    assert by_name["cpu_cache_gb"]["value"] == "1.5"
    assert by_name["cpu_cache_gb"]["from"] == "environment DYN_KVBM_CPU_CACHE_GB"
    assert by_name["lease_ms"]["from"] == "default"
    assert "did you mean DYN_KVBM_CPU_CACHE_GB" in printed["warnings"][0]


async def test_the_version_is_that_of_the_package() -> None:
    code, output, errors = await call("--version")
    assert (code, output) == (0, f"kvbm {version('kvbm-cli')}\n"), errors


@pytest.mark.parametrize("command", ["status", "pin", "ours"])
def test_a_command_is_imported_alone(command: str, tmp_path: Path) -> None:
    """Goal: an answer comes at once: to ask for the status needs neither NATS nor the demo."""
    information = tmp_path / "ours-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[kvbm.commands]\nours = json:loads\n")
    code = f"""import sys; sys.path.append({str(tmp_path)!r})
from kvbm_cli.main import make_app
names = [one.name for one in make_app([{command!r}]).registered_commands]
print(*names, *sys.modules)"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = made.stdout.split()
    assert command in found
    assert not {"kvbm_cli.demo.command", "kvbm_common.nats.bus", "cryptography"} & set(found)


def test_no_verb_has_the_name_of_a_command_of_ours() -> None:
    """Goal: each is found by its name alone."""
    ours = {one.name for one in entry_points(group=COMMANDS) if one.module.startswith("kvbm_cli.")}
    assert len(ours) > 10
    assert not ours & {verb.command for verb in OPERATOR_VERBS}


@pytest.mark.slow
async def test_a_shell_completes_commands() -> None:
    """The protocol of click: the words so far in, the next ones out."""
    environ = {
        "_KVBM_COMPLETE": "complete_bash", "COMP_WORDS": "kvbm pre", "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "kvbm pre",
    }  # fmt: skip
    code, output, errors = await call(**environ)
    assert (code, output.split()) == (0, ["prefetch"]), errors


async def test_completion_is_for_the_shell_that_is_named() -> None:
    """Goal: bash may write zsh's completion to a file; a name that is no shell's is refused."""
    for line in (("--show-completion", "zsh"), ("--show-completion=zsh",)):
        code, output, errors = await call(*line)
        assert (code, output.split()[:2]) == (0, ["#compdef", "kvbm"]), errors
    code, output, errors = await call("--show-completion", "tsch")
    assert (code, output) == (2, "")
    assert "'tsch' is not one of 'bash', 'zsh', 'fish'" in errors


@pytest.mark.slow
async def test_config_table_is_for_people() -> None:
    code, output, _ = await call("config")
    assert code == 0
    assert "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS" in output


@pytest.mark.slow
async def test_config_never_prints_a_secret() -> None:
    """Neither as a table nor as JSON; that it is set can be seen."""
    for arguments in ((), ("--json",)):
        code, output, errors = await call(
            "config", *arguments, DYN_KVBM_OBJECT_SECRET_KEY="hush", DYN_KVBM_OBJECT_ACCESS_KEY="hu"
        )
        assert code == 0
        assert "hush" not in output + errors
        assert output.count("(set)") == 2


@pytest.mark.slow
async def test_bad_setting_ends_with_a_clear_line() -> None:
    code, _, errors = await call("config", DYN_KVBM_METRICS="maybe")
    assert code == 2
    assert errors == (
        "kvbm: DYN_KVBM_METRICS is 'maybe', but accepts true or false (also 1/0, yes/no, on/off)\n"
    )


async def test_unknown_service_is_refused() -> None:
    code, _, errors = await call("serve", "nothing")
    assert code == 2
    assert "there are consolidator, disk-tier, host-tier, index, metrics" in errors


@pytest.mark.parametrize("kinds", ["", " , ", "indx", "index,indx"])
async def test_up_needs_kinds_that_it_knows(kinds: str) -> None:
    """Goal: `--only "$KINDS"` with an empty variable does not start everything."""
    code, _, errors = await call("up", "--only", kinds)
    assert code == 2
    assert "accepts kinds of services: consolidator, disk-tier, host-tier, index," in errors


@pytest.mark.slow
async def test_broken_command_does_not_break_the_others(tmp_path: Path) -> None:
    """Goal: a package that cannot be imported only loses its own command."""
    information = tmp_path / "kvbm_broken-0.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kvbm-broken\nVersion: 0.1")
    (information / "entry_points.txt").write_text("[kvbm.commands]\nbroken = no_module:f\n")
    code, output, _ = await call("--help", PYTHONPATH=str(tmp_path))
    assert code == 0
    assert "config" in output
    assert "not available" in output
    code, _, errors = await call("broken", "--option", PYTHONPATH=str(tmp_path))
    assert code == 1
    assert "broken cannot be loaded (ModuleNotFoundError" in errors


def up_environ(directory: Path, port: int) -> dict[str, str]:
    """Return the variables of a small stack of its own."""
    paths = [str(directory), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "KVBM_RUNTIME_DIR": str(directory / "run"),
        "KVBM_STATE_DIR": str(directory / "state"),
        "KVBM_NATS_URL": f"nats://127.0.0.1:{port}",
    }


async def start_up(
    directory: Path, port: int, *before: str
) -> tuple[asyncio.subprocess.Process, str]:
    """Start a small stack in the foreground, behind `before`; returns what it has printed."""
    install(directory)
    environ = up_environ(directory, port)
    process = await asyncio.create_subprocess_exec(
        *before, str(KVBM), "up", "--only", "sample",
        env=os.environ | environ, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    lines: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        while not lines or "Ctrl-C" not in lines[-1]:
            lines.append((await process.stdout.readline()).decode())
            assert lines[-1], lines
    return process, "".join(lines)


@pytest.mark.slow
async def test_up_prints_what_listens_where_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    """Goal: foreground life of a small stack; SIGINT ends it with 0, leaving nothing."""
    process, printed = await start_up(tmp_path, port := free_port())
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == 0
    assert f"nats://127.0.0.1:{port}" in printed
    assert not await asyncio.to_thread((tmp_path / "run").exists)


@pytest.mark.slow
async def test_up_stops_in_order_when_its_terminal_is_closed(tmp_path: Path) -> None:
    """Goal: services take their leave while NATS is still there."""
    process, _ = await start_up(tmp_path, free_port())
    process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == 0
    assert not await asyncio.to_thread((tmp_path / "run").exists)


@pytest.mark.slow
def test_up_without_its_terminal_ends_without_an_error(tmp_path: Path) -> None:
    """Goal: its last line goes nowhere; exit code 0, and no traceback where errors go.

    Method: a terminal of its own, whose other side closes.
    """
    install(tmp_path)
    errors = tmp_path / "errors"
    environ = up_environ(tmp_path, free_port())
    master, terminal = os.openpty()
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [str(KVBM), "up", "--only", "sample"],
            env=os.environ | environ, stdin=terminal, stdout=terminal, stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
    os.close(terminal)
    try:
        printed = b""
        while b"Ctrl-C" not in printed:
            printed += os.read(master, 4096)
        os.close(master)
        process.send_signal(signal.SIGHUP)  # The kernel sends it where the terminal controls.
        assert process.wait(DEADLINE_S) == 0, errors.read_text()
    finally:
        process.kill()
    assert "Traceback" not in errors.read_text()


@pytest.mark.slow
async def test_up_behind_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    """Goal: who has asked for that, with `nohup`, gets it."""
    process, _ = await start_up(tmp_path, free_port(), "nohup")
    status = await asyncio.to_thread(Path(f"/proc/{process.pid}/status").read_text)
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == 0
    assert int(ignored.split()[1], 16) & 1 << signal.SIGHUP - 1
