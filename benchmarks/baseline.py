"""What this machine can do without KVBM: the figures that ours are compared with.

Each is taken with plain NIXL, fio or memcpy in the same run as ours, because virtual machines vary
by half from minute to minute. This is the one place besides kvbm_common where NIXL is called.
Speeds are GB/s (1e9 bytes).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from kvbm_common.memory.huge_pages import make_huge, map_shared
from kvbm_common.nixl import library
from numpy.typing import NDArray

# Beyond the caches of every machine that we know; a batch below it would measure the cache.
WORKING_SET_BYTES = 256 << 20
WARM_UP_ROUNDS = 2
TRANSFER_LIMIT_S = 60.0
FIO_LIMIT_S = 60.0


class ReadWrite(NamedTuple):
    """Of reads and of writes: GB/s, or blocks in flight."""

    read: float
    write: float


def ucx_read_two_processes(block_bytes: int, blocks: int, rounds: int) -> list[float]:
    """Plain UCX READs from another process's memory, `blocks` per transfer, one at a time.

    Each transfer reads the next part of a working set beyond the caches. One figure per round; a
    round is the whole working set.
    """
    working_set = max(WORKING_SET_BYTES, block_bytes * blocks)
    with memory_owner(working_set) as (address, metadata, _):
        agent = _agent("baseline-reader", "UCX", {})
        memory = page_aligned(working_set)
        _register(agent, "DRAM", memory.ctypes.data, working_set)
        peer = agent.add_remote_agent(metadata).decode()
        batches = _batches(working_set, block_bytes, blocks)

        def read_all() -> None:
            for offsets in batches:
                local = _descriptors(agent, "DRAM", memory.ctypes.data + offsets, block_bytes)
                remote = _descriptors(agent, "DRAM", address + offsets, block_bytes)
                _move(agent, "READ", local, remote, peer)

        moved = sum(len(offsets) for offsets in batches) * block_bytes
        return _speeds(read_all, moved, rounds)


class PlainFile:
    """Slots of a file, O_DIRECT, moved by plain NIXL POSIX: as many per transfer as `depth` says,
    in random order, one transfer at a time. What is written is what was there."""

    def __init__(self, path: Path, block_bytes: int, blocks: int, depth: ReadWrite) -> None:
        """`blocks`: how many are moved at a time."""
        self._block_bytes, self._depth = block_bytes, depth
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        self._agent = _agent("baseline-files", "POSIX", library.posix_defaults())
        self._memory = page_aligned(block_bytes * blocks)
        self._memory[:] = 1
        _register(self._agent, "DRAM", self._memory.ctypes.data, len(self._memory))
        _register(self._agent, "FILE", 0, os.fstat(self._fd).st_size, self._fd)
        self._order = np.random.default_rng(1).permutation(blocks)
        self._addresses = self._memory.ctypes.data + self._offsets(self._order)

    def read(self, slots: NDArray[np.intp]) -> float:
        """Each slot once; GB/s."""
        return self._move_all("READ", slots, int(self._depth.read))

    def write_back(self, slots: NDArray[np.intp]) -> float:
        """Each slot once, the bytes that it has; GB/s of the writing. Nobody else may write."""
        self.read(slots)
        return self._move_all("WRITE", slots, int(self._depth.write))

    def close(self) -> None:
        """Nobody needs it any more."""
        os.close(self._fd)

    def _offsets(self, places: NDArray[np.intp]) -> NDArray[np.uint64]:
        return places.astype(np.uint64) * np.uint64(self._block_bytes)

    def _move_all(self, operation: str, slots: NDArray[np.intp], depth: int) -> float:
        agent, size = self._agent, self._block_bytes
        offsets = self._offsets(slots[self._order])
        started = time.perf_counter()
        for begin in range(0, len(offsets), depth):
            part = slice(begin, begin + depth)
            local = _descriptors(agent, "DRAM", self._addresses[part], size)
            remote = _descriptors(agent, "FILE", offsets[part], size, self._fd)
            _move(agent, operation, local, remote, agent.name)
        return len(self._memory) / (time.perf_counter() - started) / 1e9


def fio(directory: Path, block_bytes: int, depth: int, seconds: float) -> dict[str, float] | None:
    """fio's random O_DIRECT reads and writes of a 1 GiB file; None where fio is not installed."""
    if shutil.which("fio") is None:
        return None
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        write = _fio_run(Path(scratch), "randwrite", block_bytes, depth, seconds)
        read = _fio_run(Path(scratch), "randread", block_bytes, depth, seconds)
    return ReadWrite(read, write)._asdict()


@contextmanager
def memory_owner(size_bytes: int) -> Iterator[tuple[int, bytes, int]]:
    """Another process that owns `size_bytes` of registered memory: the address, NIXL's metadata and
    the number of the process."""
    command = [sys.executable, "-m", "benchmarks.baseline", str(size_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            ready = json.loads(owner.stdout.readline())
            yield ready["address"], bytes.fromhex(ready["metadata"]), owner.pid
        finally:
            owner.kill()


def page_aligned(size_bytes: int) -> NDArray[np.uint8]:
    """Shared memory as bytes, in huge pages as the arena; it lives as long as the array."""
    memory = map_shared(-1, size_bytes)
    make_huge(memory.ctypes.data, size_bytes)
    return memory


def _own_memory(size_bytes: int) -> None:
    agent = _agent("baseline-owner", "UCX", {})
    memory = page_aligned(size_bytes)
    memory[:] = 3
    _register(agent, "DRAM", memory.ctypes.data, size_bytes)
    ready = {"address": memory.ctypes.data, "metadata": agent.get_agent_metadata().hex()}
    print(json.dumps(ready), flush=True)
    while True:  # Until killed; over shared memory only the first contact needs it.
        agent.get_new_notifs()
        time.sleep(0.001)


def _agent(name: str, backend: str, params: dict[str, str]) -> Any:
    config = library.api.nixl_agent_config(enable_prog_thread=False, backends=[])
    agent = library.api.nixl_agent(f"{name}-{os.getpid()}", config)
    agent.create_backend(backend, params)
    return agent


def _register(agent: Any, kind: str, address: int, length: int, device: int = 0) -> None:
    agent.register_memory([(address, length, device, "")], kind)


def _descriptors(
    agent: Any, kind: str, addresses: NDArray[np.uint64], length: int, device: int = 0
) -> Any:
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, length, device
    return agent.get_xfer_descs(rows, kind)


def _move(agent: Any, operation: str, local: Any, remote: Any, peer: str) -> None:
    handle = agent.initialize_xfer(operation, local, remote, peer)
    deadline = time.monotonic() + TRANSFER_LIMIT_S
    state = agent.transfer(handle)
    while state == "PROC":
        assert time.monotonic() < deadline, "a plain transfer hangs"
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)


def _batches(working_set: int, block_bytes: int, blocks: int) -> list[NDArray[np.uint64]]:
    starts = np.arange(working_set // block_bytes, dtype=np.uint64) * np.uint64(block_bytes)
    return [starts[begin : begin + blocks] for begin in range(0, len(starts), blocks)]


def _speeds(run: Callable[[], None], moved_bytes: int, rounds: int) -> list[float]:
    speeds = []
    for _ in range(WARM_UP_ROUNDS + rounds):
        started = time.perf_counter()
        run()
        speeds.append(moved_bytes / (time.perf_counter() - started) / 1e9)
    return speeds[WARM_UP_ROUNDS:]


def _fio_run(scratch: Path, pattern: str, block_bytes: int, depth: int, seconds: float) -> float:
    """One fio job, libaio, one thread. The writing job lays the file out for the reading one."""
    command = [
        "fio", "--name=blocks", f"--directory={scratch}", f"--rw={pattern}", "--size=1G",
        f"--bs={block_bytes}", f"--iodepth={depth}", "--ioengine=libaio", "--direct=1",
        "--time_based", f"--runtime={max(1, round(seconds))}", "--output-format=json", "--thread",
    ]  # fmt: skip
    limit = FIO_LIMIT_S + seconds
    report = subprocess.run(command, capture_output=True, check=True, timeout=limit)
    job = json.loads(report.stdout)["jobs"][0]
    return float(job[pattern.removeprefix("rand")]["bw_bytes"]) / 1e9


if __name__ == "__main__":
    _own_memory(int(sys.argv[1]))
