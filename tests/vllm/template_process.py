"""A template of engines: a process that has imported vLLM, and forks itself for each engine.

`python -m tests.vllm.template_process DESCRIPTOR`: it has one thread and nothing of KVBM's,
so that a fork begins as `python -m MODULE` does once vLLM is there. See `tests/vllm/template.py`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys

import numpy

IMPORTED = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker")
"""What takes an engine eight seconds of a processor before it looks at its arguments."""
REQUEST_BYTES = 1 << 17
REQUEST_DESCRIPTORS = 4
"""The engine's stdin, stdout and stderr, and where to tell of its life."""
STANDARD = (0, 1, 2)


class Forks:
    """The engines that run, each with the socket that hears of its end."""

    def __init__(self, control: socket.socket, set_by_import: dict[str, str]) -> None:
        """Requests come by `control`."""
        self._control, self._set_by_import = control, set_by_import
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._lives: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> tuple[str, list[str]]:
        """Fork for each request. It returns in the forks only, with their module and arguments."""
        while self._selector.get_map():  # The last engine ends after the suite.
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._report_end(key.fd)
                    continue
                data, descriptors, _, _ = socket.recv_fds(
                    self._control, REQUEST_BYTES, REQUEST_DESCRIPTORS
                )
                if not data:
                    self._selector.unregister(self._control)
                    continue
                module, arguments, environ = json.loads(data)
                if self._is_fork(descriptors):
                    become(descriptors[: len(STANDARD)], environ | self._set_by_import)
                    return module, arguments
        sys.exit()

    def _is_fork(self, descriptors: list[int]) -> bool:
        """Fork, tell the suite of it, and return whether this is the fork."""
        *standard, told = descriptors
        life = socket.socket(fileno=told)
        if (pid := os.fork()) == 0:
            for handle, (_, others) in self._lives.items():
                os.close(handle)
                others.close()
            life.close()
            self._selector.close()
            return True
        for descriptor in standard:
            os.close(descriptor)
        handle = os.pidfd_open(pid)
        with contextlib.suppress(OSError):  # A test that was ended meanwhile does not hear it.
            socket.send_fds(life, [b"%d" % pid], [handle])
        self._selector.register(handle, selectors.EVENT_READ)
        self._lives[handle] = pid, life
        return False

    def _report_end(self, handle: int) -> None:
        """Say how an engine has ended, as `subprocess` would."""
        self._selector.unregister(handle)
        os.close(handle)
        pid, life = self._lives.pop(handle)
        _, status = os.waitpid(pid, 0)
        with life, contextlib.suppress(OSError):  # After the suite, nobody hears it.
            life.send(b"%d" % os.waitstatus_to_exitcode(status))


def become(standard: list[int], environ: dict[str, str]) -> None:
    """Take an engine's standard streams and environment."""
    for descriptor, place in zip(standard, STANDARD, strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    numpy.random.seed()


def import_engine() -> dict[str, str]:
    """Import what engines import; return the variables that this has set."""
    before = dict(os.environ)
    for name in IMPORTED:
        importlib.import_module(name)
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def check_untouched() -> None:
    """Refuse to fork what a fork would break or would not import again."""
    threads = os.listdir("/proc/self/task")
    ours = [name for name in sys.modules if name.startswith("kvbm")]
    assert len(threads) == 1, f"imports have started {len(threads) - 1} threads"
    assert not ours, f"imports have brought {ours}"


def main() -> None:
    """Import vLLM, say so, and serve; a fork goes on as the module's own main program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the suite, which ends this.
    set_by_import = import_engine()
    check_untouched()
    gc.collect()
    gc.freeze()  # Forks share the memory that no collector writes to.
    with socket.socket(fileno=int(sys.argv[1])) as control:
        control.send(b"ready")
        module, sys.argv[1:] = Forks(control, set_by_import).serve()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
