"""The command line, as a user calls it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path

from kvbm_common.runtime.processes import free_port

from tests.libs.sample_services import install

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


async def test_a_shell_completes_commands() -> None:
    """The protocol of click: the words so far in, the next ones out."""
    environ = {
        "_KVBM_COMPLETE": "complete_bash", "COMP_WORDS": "kvbm pre", "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "kvbm pre",
    }  # fmt: skip
    code, output, errors = await call(**environ)
    assert (code, output.split()) == (0, ["prefetch"]), errors


async def test_config_table_is_for_people() -> None:
    code, output, _ = await call("config")
    assert code == 0
    assert "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS" in output


async def test_config_never_prints_a_secret() -> None:
    """Neither as a table nor as JSON; that it is set can be seen."""
    for arguments in ((), ("--json",)):
        code, output, errors = await call(
            "config", *arguments, DYN_KVBM_OBJECT_SECRET_KEY="hush", DYN_KVBM_OBJECT_ACCESS_KEY="hu"
        )
        assert code == 0
        assert "hush" not in output + errors
        assert output.count("(set)") == 2


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


async def test_up_prints_what_listens_where_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    """Goal: foreground life of a small stack; SIGINT ends it with 0, leaving nothing."""
    install(tmp_path)
    port = free_port()
    environ = {
        "PYTHONPATH": str(tmp_path),
        "KVBM_RUNTIME_DIR": str(tmp_path / "run"),
        "KVBM_STATE_DIR": str(tmp_path / "state"),
        "KVBM_NATS_URL": f"nats://127.0.0.1:{port}",
    }
    process = await asyncio.create_subprocess_exec(
        str(KVBM),
        "up",
        "--only",
        "sample",
        env=os.environ | environ,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(15):
        lines: list[str] = []
        while not lines or "Ctrl-C" not in lines[-1]:
            lines.append((await process.stdout.readline()).decode())
            assert lines[-1], lines
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    assert f"nats://127.0.0.1:{port}" in "".join(lines)
    assert not await asyncio.to_thread((tmp_path / "run").exists)
