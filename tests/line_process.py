"""A process that is spoken to in lines of JSON: a command on its stdin, a reply on its stdout."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Generic, Protocol, TypeVar

import msgspec

ROOT = Path(__file__).resolve().parents[1]
STOP_S = 20.0
LOG_TAIL = 4000
Said = TypeVar("Said", bound=msgspec.Struct)
Heard = TypeVar("Heard", bound=msgspec.Struct)


class Process(Protocol):
    """A process that has been started, as `subprocess.Popen` has it."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None:
        """Return its exit code, if it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code when it has ended."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal, unless it has ended."""

    def kill(self) -> None:
        """End it at once."""


Start = Callable[[Sequence[str | Path], Mapping[str, str], IO[bytes]], Process]
"""Start a command with an environment; its stderr goes into the file."""


def fresh(
    command: Sequence[str | Path], environ: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a command as a process of our own."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environ,
        cwd=ROOT,
    )


class LineProcess(Generic[Said, Heard]):
    """Started by the constructor; `stop` or `kill` ends it. It logs to a file of its own."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        reply: type[Heard],
        log: Path,
        environ: Mapping[str, str],
        reply_deadline_s: float,
        start: Start = fresh,
    ) -> None:
        self.log_path = log
        self._reply, self._reply_deadline_s = reply, reply_deadline_s
        self._log = log.open("ab")
        self._process = start(command, os.environ | dict(environ), self._log)
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, name=f"read {log.stem}", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def line(self, deadline_s: float) -> bytes:
        """The next line; empty when it has ended. Without one its stacks go into the log, where it
        has a faulthandler."""
        try:
            return self._lines.get(timeout=deadline_s)
        except queue.Empty:
            self._process.send_signal(signal.SIGUSR1)
            raise TimeoutError(f"no answer after {deadline_s} s{self.tail()}") from None

    def tail(self) -> str:
        """The end of the log."""
        return ":\n" + self.log_text()[-LOG_TAIL:]

    def log_text(self) -> str:
        """All that it has logged."""
        return self.log_path.read_text(errors="replace")

    def begin(self, command: Said) -> None:
        """Send a command without waiting for its reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        self._process.stdin.flush()

    def wait_reply(self) -> Heard:
        """The reply to the oldest command that has none."""
        line = self.line(self._reply_deadline_s)
        assert line, f"it has ended{self.tail()}"
        return msgspec.json.decode(line, type=self._reply)

    def say(self, command: Said) -> Heard:
        """Send a command and wait."""
        self.begin(command)
        return self.wait_reply()

    def ask_to_stop(self) -> None:
        """Tell it to end in order: by what it understands, or the end of its commands."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def stop(self) -> None:
        """End it in order; returns when the process is gone."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                self.ask_to_stop()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._close()

    def kill(self) -> None:
        """As a crash."""
        self._process.kill()
        self._process.wait(10)
        self._close()

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._log.close()
