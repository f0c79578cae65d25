"""Spans of memory or of a file: those that are registered, and those that a transfer moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Registration:
    """A range of memory (DRAM, or VRAM on GPU `device`) or a file (FILE, `device` is its fd)."""

    kind: str
    address: int
    bytes: int
    device: int


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Ranges of memory or of a file: N×3 uint64, each row (address or offset, bytes, device).

    `kind` is NIXL's memory type: DRAM, VRAM (the device is the GPU), FILE (the descriptor) or OBJ
    (a number that NIXL knows the object by).
    """

    rows: NDArray[np.uint64]
    kind: str = "DRAM"

    def __post_init__(self) -> None:
        assert self.rows.shape[1:] == (3,), self.rows.shape
        assert len(self.rows) > 0, "a transfer moves at least one span"

    @classmethod
    def of(cls, addresses: ArrayLike, length: int, *, device: int = 0, kind: str = "DRAM") -> Self:
        """Make equal spans of `length` bytes at `addresses` (in a file: offsets), in that order."""
        starts = np.asarray(addresses, dtype=np.uint64).reshape(-1)
        rows = np.empty((len(starts), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = starts, length, device
        return cls(rows, kind)

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> int:
        return int(self.rows[:, 1].sum())

    def in_file(self, fd: int) -> Spans:
        """Return the same offsets and lengths as places in the file `fd`."""
        rows = self.rows.copy()
        rows[:, 2] = fd
        return Spans(rows, "FILE")

    def on_device(self, device: int) -> Spans:
        """Return the same addresses as places in the memory of a GPU."""
        rows = self.rows.copy()
        rows[:, 2] = device
        return Spans(rows, "VRAM")

    def touch(self, registration: Registration) -> bool:
        """Return whether any of these spans lies, even in part, in the registered range."""
        if self.kind != registration.kind:
            return False
        starts, lengths, devices = self.rows.T
        begin, end = registration.address, registration.address + registration.bytes
        inside = (starts < end) & (starts + lengths > begin) & (devices == registration.device)
        return bool(inside.any())
