"""cupy's calls take what we give them. They are made without a driver, which they all miss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvbm_common.cuda import kernels
from kvbm_common.cuda.runtime import Allocation, CudaError, CudaUnavailable, CupyRuntime

ADDRESS = 1 << 40


@pytest.fixture
def runtime() -> CupyRuntime:
    """cupy, and no GPU: nothing that a constructor looks at."""
    cupy = pytest.importorskip("cupy", reason="no cupy")
    try:
        CupyRuntime()
    except CudaUnavailable:
        pass
    else:
        pytest.skip("there is a GPU: see tests/gpu")
    runtime = CupyRuntime.__new__(CupyRuntime)
    runtime.device = 0
    runtime._cupy, runtime._cuda = cupy, cupy.cuda.runtime
    runtime._streams = {5: cupy.cuda.Stream.null}
    runtime._copy_rows = cupy.RawKernel(kernels.SOURCE, kernels.COPY_ROWS)
    runtime._sum_kibs = cupy.RawKernel(kernels.SOURCE, kernels.SUM_KIBS)
    runtime._sum_parts = cupy.RawKernel(kernels.SOURCE, kernels.SUM_PARTS)
    return runtime


CALLS: dict[str, Callable[[CupyRuntime], object]] = {
    "use": lambda runtime: runtime.use(),
    "event": lambda runtime: runtime.event(),
    "end_event": lambda runtime: runtime.end_event(1),
    "record": lambda runtime: runtime.record(1, 2),
    "wait": lambda runtime: runtime.wait(1, 2),
    "copy": lambda runtime: runtime.copy(ADDRESS, ADDRESS, 10, 5),
    "copy_rows": lambda runtime: runtime.copy_rows(ADDRESS, 2, 5),
    "sum_parts": lambda runtime: runtime.sum_parts(
        regions=ADDRESS, parts=ADDRESS, part_count=1, kibs=1, blocks=ADDRESS, block_count=1,
        scratch=ADDRESS, digests=ADDRESS, stream=5,
    ),
    "register_host": lambda runtime: runtime.register_host(ADDRESS, 4096, read_only=True),
    "unregister_host": lambda runtime: runtime.unregister_host(ADDRESS),
    "pinned": lambda runtime: runtime.pinned(10),
    "allocate": lambda runtime: runtime.allocate(10),
    "free": lambda runtime: runtime.free(ADDRESS),
    "open": lambda runtime: runtime.open(Allocation(1, 2, b"x" * 64)),
    "close": lambda runtime: runtime.close(ADDRESS),
    "bus_id": lambda runtime: runtime.bus_id(),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gets_as_far_as_the_driver(runtime: CupyRuntime, name: str) -> None:
    """Goal: no TypeError on the first machine with a GPU."""
    with pytest.raises(CudaError):
        CALLS[name](runtime)
