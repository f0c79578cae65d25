"""Engines that are forked from a process that has imported vLLM, instead of importing it again.

The import takes eight of the ten seconds of a processor that an engine takes to start. A fork has
the arguments, environment, directory, streams, signals and exit code of a fresh start, which
`test_template.py` compares. A test whose subject is the start asks for `fresh=True`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.line_process import ROOT

START_DEADLINE_S = 200.0
END_S = 10.0
REPLY_BYTES = 64
LATE = ("KVBM_", "DYN_KVBM_", "PYTEST_")
"""Variables that nothing reads at the import of vLLM: they may differ from fork to fork."""


class Forked:
    """A process that another one has forked for us, with what of `Popen` our tests use."""

    def __init__(self, life: socket.socket, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        """`life` brings its number and a handle of it, and at its end the exit code."""
        self._life = life
        self.stdin: IO[bytes] | None = stdin
        self.stdout: IO[bytes] | None = stdout
        self.returncode: int | None = None
        life.settimeout(START_DEADLINE_S)
        told, (self._handle,), _, _ = socket.recv_fds(life, REPLY_BYTES, 1)
        self.pid = int(told)

    def poll(self) -> int | None:
        """Return its exit code, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code when it has ended."""
        if self.returncode is None:
            if not select.select([self._life], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"forked {self.pid}", timeout or 0)
            told = self._life.recv(REPLY_BYTES)
            assert told, "the template of the engines has ended"
            self.returncode = int(told)
            self._life.close()
            os.close(self._handle)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class Template:
    """One process that has imported vLLM; `start` forks it."""

    def __init__(self, python: str, environ: Mapping[str, str], log: Path) -> None:
        """Import vLLM in this environment."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("ab") as file:
            self._process = subprocess.Popen(
                [python, "-m", "tests.vllm.template_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=dict(environ),
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
            )
        self._control.settimeout(START_DEADLINE_S)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            assert self._control.recv(REPLY_BYTES) == b"ready", log.read_text(errors="replace")
            undo.pop_all()

    def start(
        self, module: str, arguments: Sequence[str], environ: Mapping[str, str], log: IO[bytes]
    ) -> Forked:
        """Fork a process that runs a module and writes its stderr into `log`."""
        request = json.dumps([module, arguments, dict(environ)]).encode()
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = [theirs_in, theirs_out, log.fileno(), theirs.fileno()]
            socket.send_fds(self._control, [request], descriptors)
        os.close(theirs_in)
        os.close(theirs_out)
        return Forked(ours, os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb"))

    def retire(self) -> None:
        """Let the process end with its last fork."""
        self._control.close()

    def close(self) -> None:
        """End the process; its forks have ended."""
        self._control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)


class Templates:
    """The template of the present environment: another environment gets another one."""

    def __init__(self) -> None:
        """It starts the first one when an engine is asked for."""
        self._directory = tempfile.TemporaryDirectory(prefix="kvbm-template-")
        self._key: object = None
        self._all: list[Template] = []

    def start(
        self, command: Sequence[str | Path], environ: Mapping[str, str], log: IO[bytes]
    ) -> Forked:
        """Start `PYTHON -m MODULE ARGUMENTS…`, as far as it shows."""
        python, _, module, *arguments = map(str, command)
        imported = {name: value for name, value in environ.items() if not name.startswith(LATE)}
        key = (python, imported)
        if not self._all or key != self._key:
            for one in self._all:
                one.retire()
            path = Path(self._directory.name) / str(len(self._all))
            self._all.append(Template(python, imported, path))
            self._key = key
        return self._all[-1].start(module, arguments, environ, log)

    def close(self) -> None:
        """End the templates."""
        for one in self._all:
            one.close()
        self._directory.cleanup()


class Suite:
    """What the tests of this process share: none outside of the suite, as in benchmarks."""

    templates: Templates | None = None
