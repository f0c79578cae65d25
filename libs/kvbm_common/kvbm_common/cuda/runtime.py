"""The runtime: the few CUDA calls that moving blocks takes, and cupy below them.

Streams, events and addresses are integers, as in CUDA. The tests have a second runtime that keeps
CUDA's rules of order and nothing else; one suite of contracts is for both.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvbm_common.cuda import kernels
from kvbm_common.cuda.copies import Copies
from kvbm_common.errors import KvbmError
from kvbm_common.extras import install

T = TypeVar("T")

URGENT_PRIORITY = -1
"""Priority of streams that a request waits for; CUDA cuts it to what the device has."""
COPY_DEFAULT = 4
"""cudaMemcpyDefault: CUDA knows from an address where it is."""
REGISTER_PORTABLE, REGISTER_MAPPED = 1, 2
"""For all devices, and within their kernels' reach."""
REGISTER_READ_ONLY = 8
CAN_USE_HOST_POINTER = 91
"""cudaDevAttrCanUseHostPointerForRegisteredMem: a kernel may use the host's own addresses."""
CAN_PIN_READ_ONLY = 113
"""cudaDevAttrHostRegisterReadOnlySupported."""
EVENT_DISABLE_TIMING = 2
SUCCESS, NOT_READY = 0, 600
"""CUDA_SUCCESS, CUDA_ERROR_NOT_READY."""
CAPTURE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
BATCH_ORDER_STREAM = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in the stream's turn."""


class CudaError(KvbmError):
    """A CUDA call that did not succeed; the text is CUDA's."""

    code = "cuda_error"


class CudaUnavailable(KvbmError):
    """There is no cupy, no driver, or no such device on this machine."""

    code = "cuda_unavailable"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Device memory that another process can open: `handle` is of CUDA IPC."""

    address: int
    size: int
    handle: bytes


class Runtime(Protocol):
    """One device. Every method may be called from any thread that has called `use` before.

    All of them raise CudaError.
    """

    device: int
    kernels_reach_host: bool
    """True if a kernel may read and write pinned host memory by its own addresses."""
    batches: bool
    """True if `copy_batch` can be used; its caller clears this when it has failed."""
    pins_read_only: bool
    """True if a mapping that this process may not write can be pinned."""

    def use(self) -> None:
        """Make this device the calling thread's."""

    def enter(self) -> None:
        """Make this device the calling thread's, which is a thread of ours.

        An engine captures CUDA graphs, and a call from any other thread that could disturb one
        (allocate, register, ask for an event) breaks its capture, unless that thread has said that
        it has nothing to do with it.
        """

    def stream(self, *, urgent: bool) -> int:
        """Create a stream that waits for no other one by itself."""

    def end_stream(self, stream: int) -> None: ...

    def event(self) -> int: ...

    def end_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """Record an event, which is done when what is in the stream by now is."""

    def wait(self, stream: int, event: int) -> None:
        """Make what is put into the stream from now on wait for the event as last recorded."""

    def is_done(self, event: int) -> bool: ...

    def copy(self, target: int, source: int, length: int, stream: int) -> None:
        """Copy one range by a copy engine, between any two places."""

    def zero(self, target: int, length: int, stream: int) -> None:
        """Fill device memory with zeros."""

    def copy_batch(self, copies: Copies, stream: int) -> None:
        """Copy many ranges in one call, in any order. Needs `batches` and pinned host memory."""

    def copy_rows(self, table: int, count: int, stream: int) -> None:
        """Copy by the kernel: `count` rows (target, source, bytes) in device memory."""

    def sum_parts(
        self, *, regions: int, parts: int, part_count: int, kibs: int, blocks: int,
        block_count: int, scratch: int, digests: int, stream: int,
    ) -> None:  # fmt: skip
        """Sum up all parts of blocks where they lie: digests of block after block.

        Tables, digests and `scratch` are in device memory. `kibs`: full KiBs of all parts of a
        block; `scratch` has KIB_SUM_BYTES for each of them in each block.
        """

    def register_host(self, address: int, length: int, *, read_only: bool) -> None:
        """Pin a range of host memory for all devices."""

    def unregister_host(self, address: int) -> None: ...

    def pinned(self, length: int) -> NDArray[np.uint8]:
        """Allocate pinned host memory, which lives as long as the array."""

    def allocate(self, length: int) -> int:
        """Allocate memory of the device."""

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> Allocation:
        """Export the allocation that an address is in, for another process."""

    def open(self, allocation: Allocation) -> int:
        """Open another process's allocation and return its address here."""

    def close(self, address: int) -> None:
        """Close what `open` has opened."""

    def bus_id(self) -> str:
        """Return where the device is on the PCI bus, as in sysfs."""


def put(runtime: Runtime, copies: Copies, stream: int) -> None:
    """Copy by the copy engine: in one call where the driver can, else one by one."""
    if runtime.batches and copies.count > 1:
        runtime.copy_batch(copies, stream)
        return
    for target, source, length in copies.rows.tolist():
        runtime.copy(target, source, length, stream)


class _BatchAttributes(ctypes.Structure):
    """CUmemcpyAttributes: order of access, two hints of a location, flags."""

    _fields_: ClassVar = [
        (name, ctypes.c_int)
        for name in ("order", "source_type", "source_id", "target_type", "target_id", "flags")
    ]


class CupyRuntime:
    """CUDA through cupy. Raises CudaUnavailable."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        try:
            cupy = importlib.import_module("cupy")
            self._cuda: Any = cupy.cuda.runtime
            self._cupy: Any = cupy
            count = self._cuda.getDeviceCount()
        except ModuleNotFoundError as error:
            text = f"CUDA cannot be used here without {error.name}: {install('cuda12')}, or cuda13"
            raise CudaUnavailable(text) from error
        except Exception as error:  # A missing library, a missing driver.
            raise CudaUnavailable(f"CUDA cannot be used here: {error}") from error
        if not 0 <= device < count:
            raise CudaUnavailable(f"there is no device {device}: there are {count}")
        self.use()
        can = self._call(self._cuda.deviceGetAttribute, CAN_USE_HOST_POINTER, device)
        self.kernels_reach_host = bool(can)
        can = self._call(self._cuda.deviceGetAttribute, CAN_PIN_READ_ONLY, device)
        self.pins_read_only = bool(can)
        self._streams: dict[int, Any] = {}
        options = ("-std=c++14",)
        self._copy_rows = cupy.RawKernel(kernels.SOURCE, kernels.COPY_ROWS, options)
        self._sum_kibs = cupy.RawKernel(kernels.SOURCE, kernels.SUM_KIBS, options)
        self._sum_parts = cupy.RawKernel(kernels.SOURCE, kernels.SUM_PARTS, options)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self.batches = hasattr(self._driver, "cuMemcpyBatchAsync")

    @classmethod
    def at(cls, bus_id: str) -> CupyRuntime:
        """Return the device at this place of the PCI bus. Raises CudaUnavailable."""
        try:
            runtime: Any = importlib.import_module("cupy").cuda.runtime
            device = int(runtime.deviceGetByPCIBusId(bus_id))
        except Exception as error:  # As in the constructor.
            raise CudaUnavailable(f"there is no GPU at {bus_id} here: {error}") from error
        return cls(device)

    def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return function(*arguments)
        except (RuntimeError, MemoryError) as error:  # cupy's errors are these.
            raise CudaError(str(error)) from error

    def use(self) -> None:
        self._call(self._cuda.setDevice, self.device)

    def enter(self) -> None:
        self.use()
        mode = ctypes.c_int(CAPTURE_RELAXED)
        status = self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self._check(status, "cuThreadExchangeStreamCaptureMode")

    def stream(self, *, urgent: bool) -> int:
        priority = URGENT_PRIORITY if urgent else 0
        make = partial(self._cupy.cuda.Stream, non_blocking=True, priority=priority)
        stream = self._call(make)
        self._streams[int(stream.ptr)] = stream  # cupy ends it with its last reference.
        return int(stream.ptr)

    def end_stream(self, stream: int) -> None:
        del self._streams[stream]

    def event(self) -> int:
        return int(self._call(self._cuda.eventCreateWithFlags, EVENT_DISABLE_TIMING))

    def end_event(self, event: int) -> None:
        self._call(self._cuda.eventDestroy, event)

    def record(self, event: int, stream: int) -> None:
        self._call(self._cuda.eventRecord, event, stream)

    def wait(self, stream: int, event: int) -> None:
        self._call(self._cuda.streamWaitEvent, stream, event)

    def is_done(self, event: int) -> bool:
        # The driver, not the runtime: "not ready" would stay behind as the thread's last error, and
        # an engine that launches a kernel from the same thread would take it for its own.
        status = int(self._driver.cuEventQuery(ctypes.c_void_p(event)))
        if status != NOT_READY:
            self._check(status, "cuEventQuery")
        return status == SUCCESS

    def copy(self, target: int, source: int, length: int, stream: int) -> None:
        self._call(self._cuda.memcpyAsync, target, source, length, COPY_DEFAULT, stream)

    def zero(self, target: int, length: int, stream: int) -> None:
        self._call(self._cuda.memsetAsync, target, 0, length, stream)

    def copy_batch(self, copies: Copies, stream: int) -> None:
        columns = [np.ascontiguousarray(column) for column in copies.rows.T]
        attributes = _BatchAttributes(order=BATCH_ORDER_STREAM)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        addresses = [ctypes.c_void_p(column.ctypes.data) for column in columns]
        arguments: list[Any] = [*addresses, ctypes.c_size_t(copies.count),
                     ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)]  # fmt: skip
        function = getattr(self._driver, "cuMemcpyBatchAsync_v2", None)  # CUDA 13.
        if function is None:  # CUDA 12.8 has one argument more.
            function = self._driver.cuMemcpyBatchAsync
            arguments.append(ctypes.byref(failed))
        self._check(function(*arguments, ctypes.c_void_p(stream)), "cuMemcpyBatchAsync")

    def copy_rows(self, table: int, count: int, stream: int) -> None:
        warps = kernels.COPY_THREADS // 32
        grid = min(kernels.COPY_GRID_MAX, -(-count // warps))
        arguments = (np.uint64(table), np.uint32(count))
        self._launch(self._copy_rows, grid, kernels.COPY_THREADS, arguments, stream)

    def sum_parts(
        self, *, regions: int, parts: int, part_count: int, kibs: int, blocks: int,
        block_count: int, scratch: int, digests: int, stream: int,
    ) -> None:  # fmt: skip
        tables = (np.uint64(regions), np.uint64(parts), np.uint32(part_count), np.uint32(kibs),
                  np.uint64(blocks))  # fmt: skip
        if kibs:
            threads = kernels.SUM_THREADS
            grid = min(kernels.SUM_GRID_MAX, -(-kibs * block_count // (threads // 8)))
            arguments = (*tables, np.uint32(block_count), np.uint64(scratch))
            self._launch(self._sum_kibs, grid, threads, arguments, stream)
        sums = (np.uint64(scratch), np.uint64(digests))
        grid = block_count * part_count
        self._launch(self._sum_parts, grid, kernels.CHAIN_THREADS, (*tables, *sums), stream)

    def _launch(
        self, kernel: Any, grid: int, threads: int, arguments: Sequence[Any], stream: int
    ) -> None:
        try:
            with self._streams[stream]:
                kernel((grid,), (threads,), tuple(arguments))
        except Exception as error:  # NVRTC's and the driver's errors have no base of their own.
            raise CudaError(f"a kernel could not be launched: {error}") from error

    def register_host(self, address: int, length: int, *, read_only: bool) -> None:
        flags = REGISTER_PORTABLE | REGISTER_MAPPED | (REGISTER_READ_ONLY if read_only else 0)
        self._call(self._cuda.hostRegister, address, length, flags)

    def unregister_host(self, address: int) -> None:
        self._call(self._cuda.hostUnregister, address)

    def pinned(self, length: int) -> NDArray[np.uint8]:
        memory = self._call(self._cupy.cuda.alloc_pinned_memory, length)
        return np.frombuffer(memory, dtype=np.uint8, count=length)

    def allocate(self, length: int) -> int:
        return int(self._call(self._cuda.malloc, length))

    def free(self, address: int) -> None:
        self._call(self._cuda.free, address)

    def export(self, address: int) -> Allocation:
        base, size = ctypes.c_uint64(0), ctypes.c_size_t(0)
        function = self._driver.cuMemGetAddressRange_v2
        status = function(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        self._check(status, "cuMemGetAddressRange")
        handle = self._call(self._cuda.ipcGetMemHandle, base.value)
        return Allocation(base.value, size.value, bytes(handle))

    def open(self, allocation: Allocation) -> int:
        return int(self._call(self._cuda.ipcOpenMemHandle, allocation.handle))

    def close(self, address: int) -> None:
        self._call(self._cuda.ipcCloseMemHandle, address)

    def bus_id(self) -> str:
        return str(self._call(self._cuda.deviceGetPCIBusId, self.device)).lower()

    def _check(self, status: int, name: str) -> None:
        if status != SUCCESS:
            raise CudaError(f"{name}: error {status}")
