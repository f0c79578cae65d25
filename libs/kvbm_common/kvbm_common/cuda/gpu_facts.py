"""Seen: what the GPUs of this host are good for, measured for `kvbm doctor`."""

from __future__ import annotations

from kvbm_common.cuda.measure import describe, measure
from kvbm_common.cuda.runtime import CudaError, CudaUnavailable, CupyRuntime


def look(gpu_count: int) -> tuple[tuple[str, ...], str]:
    """Return a line for each GPU, and why one could not be used. Takes half a second each."""
    lines: list[str] = []
    for device in range(gpu_count):
        try:
            runtime = CupyRuntime(device)
            lines.append(f"{runtime.bus_id()}: {describe(measure(runtime))}")
        except (CudaUnavailable, CudaError) as error:
            return tuple(lines), str(error)
    return tuple(lines), ""
