"""The launch scripts of `examples/vllm` as bash runs them, with commands that only wait."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_common.runtime.processes import dying_with_parent

from tests.waiting import lives, wait_for

SCRIPTS = Path(__file__).parents[2] / "examples" / "vllm"
ENDLESS = 'sleep 600 & wait "$!"; wait "$!"'
COMMANDS = {
    "kvbm": f"trap '' TERM; {ENDLESS}",
    "vllm": f"trap 'echo asked to end' TERM; echo ready; {ENDLESS}",
    "curl": "until grep -qs ready $LOGS/vllm.log; do sleep 0.05; done",
}
"""Both servers outlive SIGTERM, and have a child; vLLM answers when its trap is set."""
NTH_COMMAND = """
set -euo pipefail
source "$SCRIPTS/common.sh"
count=0
set -o functrace
trap '((++count != AT)) || kill -TERM $$' DEBUG
start one sleep 600
start two sleep 600
exit 0
"""
"""A script that gets SIGTERM before its AT-th command, those of `start` and `stop` included."""
COMMANDS_MAX = 60


def _as_from_a_terminal() -> None:
    """Have no signal ignored, as a shell does for what runs in its background: bash keeps that."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    if (die := dying_with_parent()) is not None:
        die()


class Shell:
    """A script, its output, and the processes that have its variables."""

    def __init__(self, folder: Path) -> None:
        """Write the commands that the script finds."""
        self._mark = str(folder / "mark")
        self.logs = folder / "logs"
        commands = folder / "bin"
        commands.mkdir()
        for name, text in COMMANDS.items():
            (commands / name).write_text(f"#!/bin/bash\n{text}\n")
            (commands / name).chmod(0o755)
        self._output = (folder / "output").open("w+")
        self._path = f"{commands}:{os.environ['PATH']}"

    def run(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start bash with a script."""
        own = {"PATH": self._path, "LOGS": str(self.logs), "MARK": self._mark, "STOP_S": "1"}
        return subprocess.Popen(
            ["bash", *command], env=os.environ | own | variables, stdin=subprocess.DEVNULL,
            stdout=self._output, stderr=self._output, process_group=0,
            preexec_fn=_as_from_a_terminal,
        )  # fmt: skip

    def output(self) -> str:
        """Return what the script has printed."""
        return Path(self._output.name).read_text()

    def left(self) -> list[int]:
        """Return the processes that live."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
                if self._is_ours(pid) and lives(pid)]  # fmt: skip

    def _is_ours(self, pid: int) -> bool:
        try:
            return f"MARK={self._mark}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except (OSError, ProcessLookupError):
            return False

    def close(self) -> None:
        """End what a failed test has left."""
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self._output.close()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Commands, logs and output in a directory of the test's own."""
    made = Shell(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1])
@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM])
def test_a_second_signal_does_not_leave_processes(
    shell: Shell, first: signal.Signals, second: signal.Signals
) -> None:
    """Goal: what does not end at SIGTERM is killed, also if the terminal closes meanwhile."""
    script = shell.run(str(SCRIPTS / "agg.sh"), "model")
    wait_for(lambda: "serving on" in shell.output(), shell.output)
    script.send_signal(first)
    log = shell.logs / "vllm.log"
    wait_for(lambda: "asked to end" in log.read_text(), "it does not stop what it has started")
    script.send_signal(second)
    assert script.wait(20) == 128 + first
    wait_for(lambda: not shell.left(), "processes are left")  # SIGKILL takes a moment.


@pytest.mark.slow
def test_a_signal_before_any_command_leaves_no_processes(shell: Shell) -> None:
    """Goal: a process that has begun is noted before the script ends.

    Method: SIGTERM before each command in turn, as bash counts them.
    """
    for at in range(1, COMMANDS_MAX):
        script = shell.run("-c", NTH_COMMAND, SCRIPTS=str(SCRIPTS), AT=str(at))
        status = script.wait(20)
        wait_for(lambda: not shell.left(), f"processes are left by a signal before command {at}")
        if status == 0:  # The script has fewer commands, or ignored the signal in `stop`.
            return
        assert status == 143
    raise AssertionError("the script has more commands than thought")
