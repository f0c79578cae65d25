"""The fake runtime across processes: device memory that another process opens by its handle.

As with CUDA IPC, the opener sees it at an address of its own, and an owner that is gone has nothing
to open.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, field

import numpy as np
from kvbm_common.cuda.runtime import Allocation, CudaError
from numpy.typing import NDArray

from tests.gpu.fake_runtime import FakeRuntime

ROT = "TEST_GPU_ROTS"
"""Set: what is read back into host memory has one wrong byte for each block."""
BLOCK_BYTES_MIN = 4096
"""Shorter copies are tables and checksums."""
HANDLE_BYTES = 64


@dataclass(slots=True)
class SharedRuntime(FakeRuntime):
    """One device that all processes of a machine see."""

    files: dict[int, int] = field(default_factory=dict)
    """Address and descriptor of what was allocated here."""
    rots: bool = field(default_factory=lambda: ROT in os.environ)

    def allocate(self, length: int) -> int:
        file = os.memfd_create("fake-gpu")
        os.ftruncate(file, length)
        memory = _mapped(file, length)
        address = memory.ctypes.data
        self.memory[address], self.files[address] = memory, file
        return address

    def free(self, address: int) -> None:
        FakeRuntime.free(self, address)
        os.close(self.files.pop(address))

    def export(self, address: int) -> Allocation:
        found = FakeRuntime.export(self, address)
        handle = f"/proc/{os.getpid()}/fd/{self.files[found.address]}".encode()
        return Allocation(found.address, found.size, handle.ljust(HANDLE_BYTES, b"\0"))

    def open(self, allocation: Allocation) -> int:
        try:
            with open(allocation.handle.rstrip(b"\0"), "r+b") as file:
                memory = _mapped(file.fileno(), allocation.size)
        except OSError as error:
            raise CudaError(f"cudaErrorInvalidResourceHandle: {error}") from error
        address = memory.ctypes.data
        self.memory[address], self.opened[address] = memory, allocation
        self._say("open", address)
        return address

    def close(self, address: int) -> None:
        FakeRuntime.close(self, address)
        del self.memory[address]

    def copy(self, target: int, source: int, length: int, stream: int) -> None:
        FakeRuntime.copy(self, target, source, length, stream)
        if self.rots and length >= BLOCK_BYTES_MIN and self._is_ours(source):
            self._put(stream, lambda: _flip(target), lambda: True)

    def _is_ours(self, address: int) -> bool:
        sizes = ((base, len(self.memory[base])) for base in self.files)
        return any(base <= address < base + size for base, size in sizes)


def _mapped(file: int, length: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(file, length), dtype=np.uint8)


def _flip(address: int) -> None:
    ctypes.c_uint8.from_address(address).value ^= 1
