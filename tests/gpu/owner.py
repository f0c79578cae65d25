"""Another process with a GPU: lends memory, and holds it until told."""

from __future__ import annotations

from multiprocessing.connection import Connection

from kvbm_common.cuda.runtime import CudaError, CupyRuntime

from tests.gpu.contract import filled, noise


def lend(pipe: Connection) -> None:
    """Say where the memory is, or why it cannot be lent."""
    runtime = CupyRuntime()
    address = filled(runtime, noise(9), runtime.stream(urgent=False))
    try:
        found = runtime.export(address)
    except CudaError as error:
        pipe.send(str(error))
        return
    pipe.send((found.address, found.size, found.handle, address - found.address))
    pipe.recv()
