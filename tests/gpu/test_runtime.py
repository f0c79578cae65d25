"""cupy keeps the contract, on a real GPU. Elsewhere this is skipped.

    python3 -m pytest -c tests/gpu/pytest.ini tests/gpu

Needs Python 3.11, cupy and pytest, with xxhash for checksums; nothing of the project is installed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import numpy as np
import pytest
from kvbm_common.cuda.copies import Copies
from kvbm_common.cuda.measure import PIECES_BYTES, measure
from kvbm_common.cuda.mover import DeviceMover
from kvbm_common.cuda.pinning import Pinning
from kvbm_common.cuda.runtime import Allocation, CudaError, CudaUnavailable, CupyRuntime

from tests.gpu.contract import SIZE, RuntimeContract, noise, read
from tests.gpu.owner import lend

DEADLINE_S = 60.0
GPU_IS_HERE = bool(os.environ.get("KVBM_TEST_GPU"))
"""Said by who has found one: nothing may be skipped for want of it."""


@pytest.fixture(scope="module")
def runtime() -> CupyRuntime:
    try:
        return CupyRuntime()
    except CudaUnavailable as error:
        if GPU_IS_HERE:
            raise
        pytest.skip(str(error))


class TestCupyRuntime(RuntimeContract):
    """All of it."""


@pytest.fixture
def arena(runtime: CupyRuntime) -> Iterator[tuple[np.ndarray, Pinning]]:
    """Host memory in four slices, pinned."""
    memory = np.zeros(4 * SIZE + 4096, dtype=np.uint8)
    start = -memory.ctypes.data % 4096
    view = memory[start : start + 4 * SIZE]
    pinning = Pinning(runtime, view.ctypes.data, len(view), slice_bytes=SIZE)
    pinning.start().result(DEADLINE_S)
    yield view, pinning
    pinning.close()


@pytest.mark.parametrize("below", [0, 1 << 30], ids=["engine", "kernel"])
@pytest.mark.parametrize("piece", [8, 512, 4096, 24_000])
def test_blocks_go_there_and_back(
    runtime: CupyRuntime, arena: tuple[np.ndarray, Pinning], below: int, piece: int
) -> None:
    """Pieces in a mixed order, some across two slices, by both movers as they are in use."""
    host, pinning = arena
    assert pinning.pinned_bytes == len(host), pinning.reason
    host[:] = 0
    count = min(1000, 2 * SIZE // piece)
    host[: count * piece] = noise(1, count * piece)
    order = np.random.default_rng(2).permutation(count) * piece
    runtime.use()
    device = runtime.allocate(count * piece)
    movers = [
        DeviceMover(runtime, name=str(side), urgent=side == 1, pinning=pinning, host_side=side,
                    kernel_below=below)
        for side in (0, 1)
    ]  # fmt: skip
    there = Copies.of(device + order, host.ctypes.data + np.arange(count) * piece, piece)
    movers[1].move(there, deadline_s=DEADLINE_S).result(DEADLINE_S)
    host[: count * piece] = 0
    here = Copies.of(host.ctypes.data + np.arange(count) * piece, device + order, piece)
    movers[0].move(here, deadline_s=DEADLINE_S).result(DEADLINE_S)
    assert np.array_equal(host[: count * piece], noise(1, count * piece))
    assert not host[count * piece :].any()
    for mover in movers:
        mover.close()
    runtime.free(device)


def test_measuring_ends_and_says_something(runtime: CupyRuntime) -> None:
    rates = measure(runtime)
    assert len(rates) == 2 * len(PIECES_BYTES)
    assert all(rate.engine > 0 for rate in rates)


def test_another_process_opens_the_memory(runtime: CupyRuntime) -> None:
    """As the host tier does with a worker's."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=lend, args=(theirs,), daemon=True)
    owner.start()
    assert ours.poll(DEADLINE_S)
    answer = ours.recv()
    if isinstance(answer, str):
        pytest.skip(f"no CUDA IPC here: {answer}")
    address, size, handle, offset = answer
    runtime.use()
    try:
        opened = runtime.open(Allocation(address, size, handle))
    except CudaError as error:
        pytest.skip(f"no CUDA IPC here: {error}")
    found = read(runtime, opened + offset, SIZE, runtime.stream(urgent=False))
    runtime.close(opened)
    ours.send("done")
    owner.join(DEADLINE_S)
    assert np.array_equal(found, noise(9))
