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
UNHEARD = 255
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
        """Return its exit code when it has ended; UNHEARD where its template ended before."""
        if self.returncode is None:
            self._await(self._life, timeout)
            told = self._life.recv(REPLY_BYTES)
            if not told:
                self._await(self._handle, timeout)
            self.returncode = int(told) if told else UNHEARD
            self._life.close()
            os.close(self._handle)
        return self.returncode

    def _await(self, news: socket.socket | int, timeout: float | None) -> None:
        if not select.select([news], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"forked {self.pid}", timeout or 0)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
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

    @property
    def has_ended(self) -> bool:
        """Whether it forks no more."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process; its forks have ended."""
        self._control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)


class Templates:
    """A template for each environment in which engines were asked for."""

    def __init__(self) -> None:
        """The first one starts when an engine is asked for."""
        self._directory = tempfile.TemporaryDirectory(prefix="kvbm-template-")
        self._by_key: dict[tuple[str, ...], Template] = {}

    def start(
        self, command: Sequence[str | Path], environ: Mapping[str, str], log: IO[bytes]
    ) -> Forked:
        """Start `PYTHON -m MODULE ARGUMENTS…`, as far as it shows."""
        python, _, module, *arguments = map(str, command)
        imported = {name: value for name, value in environ.items() if not name.startswith(LATE)}
        key = (python, *(f"{name}={value}" for name, value in sorted(imported.items())))
        if key in self._by_key and self._by_key[key].has_ended:
            self._by_key.pop(key).close()
        if key not in self._by_key:
            path = Path(self._directory.name) / f"{len(self._by_key)}.log"
            self._by_key[key] = Template(python, imported, path)
        return self._by_key[key].start(module, arguments, environ, log)

    def close(self) -> None:
        """End the templates."""
        for one in self._by_key.values():
            one.close()
        self._directory.cleanup()


class Suite:
    """What the tests of this process share: none outside of the suite, as in benchmarks."""

    templates: Templates | None = None
