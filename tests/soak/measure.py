"""What is looked at every few seconds: processes, directories, streams, series, logs."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from pathlib import Path

import httpx
import msgspec
from kvbm_cli.stack import NATS, Stack
from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.service.footprint import status_bytes

from tests.soak.judge import Point

DEADLINE_S = 5.0


class _State(msgspec.Struct):
    messages: int
    bytes: int


class _Config(msgspec.Struct):
    name: str
    max_bytes: int


class _Stream(msgspec.Struct):
    config: _Config
    state: _State


class _Streams(msgspec.Struct):
    streams: list[_Stream]


Series = dict[tuple[str, str], list[Point]]
"""By quantity, and whose it is."""


class Censuses:
    """Reads what services have counted, and adds a point for each place of theirs.

    A place that has entries at some times has none at the others, and a point of 0 then: a queue
    would be judged by its few full moments otherwise.
    """

    def __init__(self, directory: Path, series: Series) -> None:
        self._directory, self._series = directory, series
        self._written_ns: dict[int, int] = {}
        """By process: when its last census was written."""
        self._empty: dict[str, list[Point]] = defaultdict(list)
        """By service: what a place that was empty in all censuses would have."""
        self._places: dict[str, set[str]] = defaultdict(set)
        """By service: where any of its lives had entries."""

    def note(self, name: str, pid: int, empty: Point) -> None:
        """Add the points of a process's census, once; `empty` is that of an empty place."""
        counted = self._counted(pid)
        if not counted:
            return
        for place in counted.keys() - self._places[name]:
            self._series["entries", f"{name} {place}"] = [*self._empty[name]]
        self._places[name] |= counted.keys()
        self._empty[name].append(empty)
        for place in self._places[name]:
            point = msgspec.structs.replace(empty, value=float(counted.get(place, 0)))
            self._series["entries", f"{name} {place}"].append(point)

    def _counted(self, pid: int) -> dict[str, int]:
        path = self._directory / f"{pid}.json"
        written_ns = path.stat().st_mtime_ns if path.exists() else 0
        if written_ns == self._written_ns.get(pid, 0):
            return {}
        self._written_ns[pid] = written_ns
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int])


class Meter:
    """Takes samples of one stack; each series is a list of points."""

    def __init__(self, stack: Stack, bus: Bus, token: str, *, census: Path) -> None:
        self.series: Series = defaultdict(list)
        self.over_limit: set[str] = set()
        """Streams that had more than their limit."""
        self.over_bound: dict[str, tuple[float, float]] = {}
        """Services that took more than they have declared: memory and bound."""
        self.bounds: dict[str, float] = {}
        self.cpu_s: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """By service: when, and the processor time of all its lives until then."""
        self.log_lines: list[tuple[float, int]] = []
        self._stack, self._bus = stack, bus
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{stack.settings.metrics_port}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=DEADLINE_S,
            trust_env=False,
        )
        self._cpu_of: dict[str, dict[int, float]] = defaultdict(dict)
        self._logs: dict[Path, tuple[int, int]] = {}
        self._censuses = Censuses(census, self.series)

    async def close(self) -> None:
        """Close the connection to the API."""
        await self._client.aclose()

    async def take(self, engines: int, returns: int) -> None:
        """Take one sample; what does not answer now is left out of it."""
        at_s = time.monotonic()

        def note(quantity: str, whose: str, value: float, life: int = 0) -> None:
            self.series[quantity, whose].append(Point(at_s, engines, life, value, returns))

        for name, pid in self._stack.pids.items():
            with contextlib.suppress(OSError, ValueError):
                for quantity, value in _process(pid).items():
                    note(quantity, name, value, pid)
                if name != NATS:
                    self._cpu_of[name][pid] = _cpu_s(pid)
                    self._censuses.note(name, pid, Point(at_s, engines, pid, 0.0, returns))
        for name, lives in self._cpu_of.items():
            self.cpu_s[name].append((at_s, sum(lives.values())))
        self.log_lines.append((at_s, self._count_lines()))
        settings = self._stack.settings
        arenas = settings.shm_dir.glob(f"kvbm-{settings.host}-*")
        note("shm bytes", "arena", sum(_size(path) for path in arenas))
        note("runtime files", "sockets", len(list(settings.runtime_dir.iterdir())))
        with contextlib.suppress(KvbmError):
            stored = await self._streams(note)
            on_disk = sum(_size(path) for path in settings.state_dir.rglob("*"))
            note("state beside streams", "NATS's files", max(0, on_disk - stored))
        with contextlib.suppress(httpx.HTTPError):
            self._read_page((await self._client.get("/metrics")).text, note)

    async def _streams(self, note: object) -> int:
        assert callable(note)
        payload = await self._bus.request("$JS.API.STREAM.LIST", b"", deadline_s=DEADLINE_S)
        total = 0
        for stream in msgspec.json.decode(payload, type=_Streams).streams:
            name, state = stream.config.name, stream.state
            note("stream messages", name, state.messages)
            note("stream bytes", name, state.bytes)
            if "registry" in name:
                note("registry messages", name, state.messages)
            if stream.config.max_bytes < 0 or state.bytes > stream.config.max_bytes:
                self.over_limit.add(name)
            total += state.bytes
        return total

    def _read_page(self, page: str, note: object) -> None:
        assert callable(note)
        lines = [line for line in page.splitlines() if not line.startswith("#")]
        note("series", "/metrics", len(lines))
        memory: dict[str, float] = {}
        for line in lines:
            name, _, labels = line.partition("{")
            whose = _name_of(labels)
            value = float(line.rpartition(" ")[2])
            if name == "kvbm_python_blocks":
                note("python blocks", whose, value, self._stack.pids.get(whose, 0))
            elif name == "kvbm_memory_bytes":
                memory[whose] = value
            elif name == "kvbm_memory_bound_bytes":
                self.bounds[whose] = value
        for whose, taken in memory.items():
            bound = self.bounds.get(whose, 0)
            if bound and taken > max(bound, self.over_bound.get(whose, (0.0, 0.0))[0]):
                self.over_bound[whose] = (taken, bound)

    def _count_lines(self) -> int:
        assert self._stack.log_dir is not None
        for name in self._stack.services:
            path = self._stack.log_dir / f"{name}.log"
            read, count = self._logs.get(path, (0, 0))
            with contextlib.suppress(OSError), path.open("rb") as log:
                log.seek(read)
                more = log.read()
                self._logs[path] = (read + len(more), count + more.count(b"\n"))
        return sum(count for _, count in self._logs.values())


def _name_of(labels: str) -> str:
    """Return the service of a series, by the name of its process."""
    for label in labels.split(","):
        if label.startswith("service="):
            return label.split('"')[1]
    return ""


def _process(pid: int) -> dict[str, int]:
    status = Path(f"/proc/{pid}/status").read_text()
    return {
        "memory": status_bytes(status, "RssAnon"),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        status = path.lstat()
        return min(status.st_size, status.st_blocks * 512) if path.is_file() else 0
    return 0
