"""A lane: one stack, one engine of a shape on it, or two, and what can be done to them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvbm_cli.stack import NATS
from kvbm_common.errors import KvbmError, ServiceFailed

from tests.vllm.fuzz import plants
from tests.vllm.fuzz.engines import Engines
from tests.vllm.fuzz.fixtures import put_weights
from tests.vllm.fuzz.processes import FuzzEngine
from tests.vllm.fuzz.program import Act
from tests.vllm.fuzz.shapes import Shape
from tests.vllm.harness import ROOT, LiveStack

SERVICES = ("consolidator", "index", "host-tier", "disk-tier")
OPEN_ATTEMPTS = 3
CLONE_NEWNS = 0x20000
SHM_MB = 512
DISK_MB = 256
FLIPS_PER_MB = 64
NAN = b"\xff" * (1 << 20)
"""NaN in float32, float16 and bfloat16."""


class Lane(Engines):
    """What programs of one shape run on. Restarted when a program leaves it unusable."""

    def __init__(
        self, shape: Shape, fixtures: Path, work: Path, *, plant: str, private: bool
    ) -> None:
        """`private`: this process has a /dev/shm of its own, which may be filled up."""
        super().__init__(shape, fixtures, work)
        self.private = private
        self.killed: set[str] = set()
        self.stopped: dict[str, int] = {}
        self._plant = plant
        self._fillers: list[Path] = []
        self._open_somehow()

    def _open_somehow(self) -> None:
        for attempt in range(OPEN_ATTEMPTS):
            try:
                return self._open()
            except (AssertionError, OSError, KvbmError, TimeoutError) as error:
                print(f"{self.shape.name} does not open: {error!r}", file=sys.stderr)
                self._forget()
                if attempt == OPEN_ATTEMPTS - 1:
                    raise
        return None

    # --- its life ---------------------------------------------------------------------------

    def _open(self) -> None:
        self._copy_fixtures()
        with planted_services(self._plant):
            self.stack = LiveStack(dict(self.shape.stack), SERVICES)
        if self.private:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                mount_tmpfs(self.stack.settings.disk_cache_dir, DISK_MB)
        self.stack.open()
        self.engines = [self._engine() for _ in range(1 + self.shape.second)]
        for engine in self.engines:
            engine.wait_started()
        self.attach()

    def _engine(self) -> FuzzEngine:
        environ = {plants.VARIABLE: self._plant}
        return FuzzEngine(
            self.model, self.shape, self.stack.settings,
            log=self._next_log(), environ=environ,
        )  # fmt: skip

    def attach(self) -> None:
        """Wait until every engine knows the host tier's present life."""
        epoch = self.stack.epoch("host-tier")
        for engine in self.engines:
            engine.wait_attached(epoch)

    def close(self) -> None:
        """End everything."""
        self.undo(start=False)
        for engine in self.engines:
            engine.stop()
        directory = self.stack.settings.disk_cache_dir
        self.stack.close()
        subprocess.run(["umount", directory], check=False, capture_output=True)

    def reopen(self) -> None:
        """Another stack and other engines."""
        self._forget()
        self._open_somehow()

    def _forget(self) -> None:
        for engine in self.engines:
            with contextlib.suppress(Exception):
                engine.kill()
        with contextlib.suppress(Exception):
            self.close()
        self.engines.clear()
        self.killed, self.stopped = set(), {}

    def plant(self, name: str) -> None:
        """From now on, with this defect; empty: without any."""
        restarts = {plants.PLANTS[one].restarts for one in (name, self._plant) if one}
        self._plant = name
        if True in restarts:
            self.reopen()
        else:
            for engine in self.engines:
                assert engine.do("plant", name=name).ok

    def restart_engine(self) -> None:
        """Its next life, on the same stack."""
        self.engines[0].stop()
        self.engines[0] = self._engine().wait_started()
        self.attach()

    # --- what is wrong with it --------------------------------------------------------------

    def log_sizes(self) -> dict[Path, int]:
        """Of every log, to know later what is new."""
        return {path: path.stat().st_size for path in self._log_paths()}

    def new_tracebacks(self, sizes: dict[Path, int]) -> list[str]:
        """Exceptions that were logged since."""
        found = []
        for path in self._log_paths():
            with path.open(errors="replace") as log:
                log.seek(sizes.get(path, 0))
                text = log.read()
            at = text.find("Traceback (most recent call last)")
            if at >= 0:
                found.append(f"{path.name}: {text[at : at + 3000]}")
        return found

    def _log_paths(self) -> list[Path]:
        services = self.stack.stack.log_dir
        return [*self._work.glob("engine*.log"), *(services.glob("*.log") if services else [])]

    def dead(self) -> list[str]:
        """What has ended though it was not killed."""
        pids = self.stack.stack.pids
        kinds = {"host-tier", "index", "consolidator", NATS}
        if self.stack.settings.disk_cache_gb:
            kinds.add("disk-tier")
        found = sorted(kinds - pids.keys() - self.killed)
        for number, engine in enumerate(self.engines):
            if not engine.lives:
                found.append(f"engine {number} (code {engine.exit_code})")
        return found

    # --- acts -------------------------------------------------------------------------------

    def act(self, act: Act) -> str:
        """Carry out one; why it could not be, or nothing."""
        self.counts[f"act {act.what}" + (f" {act.target}" if act.target else "")] += 1
        match act.what:
            case "restart":
                if self._on_disk != self.weights:
                    self._put_weights(self.weights, same_times=False)
                self.restart_engine()
            case "fine-tune":
                self._fine_tune()
            case "kill":
                self._kill(act.target)
            case "start":
                self._start_killed()
            case "stop":
                self._stop(act.target)
            case "continue":
                self._continue()
            case "corrupt arena":
                self._corrupt_arena(act)
            case "corrupt disk":
                self._corrupt_disk(act)
            case "fill memory":
                self._fill(Path("/dev/shm"))
            case "fill disk":
                self._fill(self.stack.settings.disk_cache_dir)
            case _:
                return super().act(act)
        return ""

    def undo(self, *, start: bool = True) -> None:
        """What a wave has stopped goes on, what it has killed is started, what is full is not."""
        self._continue()
        for path in self._fillers:
            path.unlink(missing_ok=True)
        self._fillers.clear()
        if start:
            self._start_killed()

    def _fine_tune(self) -> None:
        """Other weights at the same path, with the same times, in the engine's next life."""
        name = self._other_weights
        self._put_weights(name, same_times=True)
        self.restart_engine()
        for engine in self.engines[1:]:
            engine.do("weights", path=str(self._fixtures / name))
            engine.do("reset connector")
        self.weights = name

    def _put_weights(self, name: str, *, same_times: bool) -> None:
        put_weights(self._fixtures / name, self.model, same_times=same_times)
        self._on_disk = name

    def _pid(self, kind: str) -> int:
        return self.stack.stack.pids.get(kind, 0)

    def _kill(self, kind: str) -> None:
        if self._pid(kind) and kind not in self.stopped:
            self.killed.add(kind)
            self.stack.kill(kind)

    def _start_killed(self) -> None:
        for kind in sorted(self.killed, key=lambda kind: kind != NATS):
            try:
                self.stack.call(self.stack.stack.start(kind))
                self.stack.call(self.stack.stack.wait_ready(kind))
            except ServiceFailed as error:
                if not self._fillers:
                    raise AssertionError(f"it does not start: {error}") from error
                self.counts["starts refused while full"] += 1
            else:
                self.killed.discard(kind)

    def _stop(self, kind: str) -> None:
        pid = self._pid(kind)
        if pid:
            self.stopped[kind] = pid
            os.kill(pid, signal.SIGSTOP)

    def _continue(self) -> None:
        for pid in self.stopped.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()

    def _corrupt_arena(self, act: Act) -> None:
        settings = self.stack.settings
        for path in settings.shm_dir.glob(f"kvbm-{settings.host}-*-arena"):
            spoil(path, act.target, act.number)

    def _corrupt_disk(self, act: Act) -> None:
        for path in self.stack.settings.disk_cache_dir.rglob("*"):
            if path.is_file() and path.stat().st_size > 1_000_000:
                spoil(path, act.target, act.number)

    def _fill(self, directory: Path) -> None:
        """Take all the room of a file system that is ours alone."""
        if not self.private or not os.path.ismount(directory):
            self.counts["skipped: no file system of its own"] += 1
            return
        path = directory / "filler"
        self._fillers.append(path)
        with path.open("wb") as file:
            size = 1 << 26
            while size >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2


@contextlib.contextmanager
def planted_services(name: str) -> Iterator[None]:
    """Services that a stack makes here have a plant, if it is one of theirs."""
    if not name or plants.PLANTS[name].service is plants.nothing:
        yield
        return
    before = os.environ.get("PYTHONPATH", "")
    site = Path(plants.__file__).with_name("site")
    os.environ |= {plants.VARIABLE: name, "PYTHONPATH": f"{site}:{ROOT}:{before}"}
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before
        del os.environ[plants.VARIABLE]


def spoil(path: Path, pattern: str, seed: int) -> None:
    """Write wrong bytes over a file."""
    generator = random.Random(seed)
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset in range(0, size, len(NAN)):
            length = min(len(NAN), size - offset)
            file.seek(offset)
            old = file.read(length)
            if not any(old):
                continue  # Never written: it stays a hole.
            file.seek(offset)
            file.write(_spoilt(old, pattern, generator))


def _spoilt(old: bytes, pattern: str, generator: random.Random) -> bytes:
    match pattern:
        case "nan":
            return NAN[: len(old)]
        case "noise":
            return generator.randbytes(len(old))
    flipped = bytearray(old)
    for _ in range(max(1, FLIPS_PER_MB * len(old) >> 20)):
        at = generator.randrange(len(old) // 4) * 4 + 3  # The exponents of float32.
        flipped[at] ^= 1 << generator.randrange(5, 8)
    return bytes(flipped)


def enter_private_memory() -> bool:
    """Give this process and its children a /dev/shm of their own, where the kernel allows it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        return False
    try:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)
        mount_tmpfs(Path("/dev/shm"), SHM_MB)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def mount_tmpfs(directory: Path, megabytes: int) -> None:
    """A file system in memory, of a size of its own."""
    command = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={megabytes}m,mode=1777",
        "kvbm-fuzz",
        str(directory),
    ]
    subprocess.run(command, check=True, capture_output=True)
