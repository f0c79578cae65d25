"""Copying: moves blocks between two places of this host's memory and sums them up in one pass.

`native/` is a small C library that `hatch_build.py` compiles where there is a compiler. Without a
compiler, `memmove` and xxhash do the same with the same result, and every byte is read twice. What
is summed is what was stored, so a source that changes meanwhile cannot go unnoticed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvbm_common.checksum import parts_checksum
from kvbm_common.nixl.spans import Spans

log = logging.getLogger(__name__)

Numbers = npt.NDArray[np.uint64]
LaneNumbers = npt.NDArray[np.uint32]
LIBRARY = Path(__file__).parent / "_native.so"
THREADS_MAX = 4
"""Threads of ours that copy in one process: more than a host's memory can serve."""
LANES_MAX = 64
"""Checksums of one block: the library keeps a state of each while it goes through the block."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The places of blocks in memory: block b is `lengths[p]` bytes at `addresses[b, p]`, for
    every piece p, back to back."""

    addresses: Numbers
    lengths: Numbers

    def __post_init__(self) -> None:
        assert self.addresses.shape[1:] == self.lengths.shape, (
            self.addresses.shape,
            self.lengths.shape,
        )
        for numbers in (self.addresses, self.lengths):  # The library reads them as C arrays.
            assert numbers.flags.c_contiguous, numbers.strides
            assert numbers.dtype == np.uint64, numbers.dtype

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.addresses)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return int(self.lengths.sum())

    @property
    def spans(self) -> Spans:
        """These pieces as spans for a transfer, block by block."""
        lengths = np.broadcast_to(self.lengths, self.addresses.shape)
        zeros = np.zeros(self.addresses.size, dtype=np.uint64)
        return Spans(np.stack([self.addresses.reshape(-1), lengths.reshape(-1), zeros], axis=1))

    def split(self, parts: int) -> Places:
        """Cut blocks of one piece each into equal parts; each part is a block by itself."""
        [length] = self.lengths.tolist()
        assert length % parts == 0, (length, parts)
        offsets = np.arange(parts, dtype=np.uint64) * np.uint64(length // parts)
        starts = (self.addresses + offsets).reshape(-1, 1)
        return Places(starts, np.array([length // parts], dtype=np.uint64))

    def only(self, blocks: Sequence[int]) -> Places:
        """Return some of the blocks, by their index."""
        return Places(np.ascontiguousarray(self.addresses[list(blocks)]), self.lengths)

    def inside(self, address: int, length: int) -> bool:
        """Return whether every piece is inside the range of `length` bytes at `address`."""
        starts, end = self.addresses, np.uint64(address + length)
        if not self.count:
            return True
        fits = (starts >= np.uint64(address)) & (starts <= end) & (end - starts >= self.lengths)
        return bool(fits.all())

    def moved(self, distance: int) -> Places:
        """Return the same blocks `distance` bytes further on, or before: in another mapping."""
        return Places(self.addresses + np.uint64(distance % (1 << 64)), self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """The pieces of a block that are summed together: piece p is in lane `of_piece[p]`.

    Pieces go in their own order, that of memory: a lane waits while others have their turn.
    """

    of_piece: LaneNumbers
    count: int

    def __post_init__(self) -> None:
        assert self.of_piece.dtype == np.uint32, self.of_piece.dtype
        assert self.of_piece.flags.c_contiguous, self.of_piece.strides
        assert 1 <= self.count <= LANES_MAX, self.count
        assert int(self.of_piece.max(initial=0)) < self.count, (self.of_piece.tolist(), self.count)


def slot_places(
    slots: Sequence[int], length: int, *, arena_address: int, slot_bytes: int
) -> Places:
    """Return where blocks of `length` bytes are in the slots of an arena."""
    starts = np.asarray(slots, dtype=np.uint64) * np.uint64(slot_bytes)
    addresses = starts + np.uint64(arena_address)
    return Places(addresses.reshape(-1, 1), np.array([length], dtype=np.uint64))


class Copier(Protocol):
    """One way to move blocks. Both methods run without the GIL, and may run in many threads.

    Checksums are those of blocks or, with lanes, of each block's lanes, block after block.
    """

    name: str

    def copy(
        self, target: Places, source: Places, *, summed: bool = True, lanes: Lanes | None = None
    ) -> list[int]:
        """Copy block by block; return the checksums, or nothing unless `summed`."""

    def sums(self, source: Places, *, lanes: Lanes | None = None) -> list[int]:
        """Return the checksums of blocks where they are."""


class NativeCopier:
    """The compiled library: one look at the source, and stores past the caches."""

    name = "native"

    def __init__(self, path: Path = LIBRARY, entry: str = "kvbm_move_lanes") -> None:
        """Load the library; `entry` may name one variant of it for every processor.

        Raises OSError where the library is missing or of another platform, AttributeError where it
        was compiled from sources of another version.
        """
        self._move = getattr(ctypes.CDLL(str(path)), entry)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._move.argtypes = (pointer, pointer, pointer, pointer, size, size, size, pointer)
        self._move.restype = None

    def copy(
        self, target: Places, source: Places, *, summed: bool = True, lanes: Lanes | None = None
    ) -> list[int]:
        """Copy block by block; return the checksums, or nothing unless `summed`."""
        _check(target, source, lanes)
        return self._run(target.addresses.ctypes.data, source, lanes if summed else None, summed)

    def sums(self, source: Places, *, lanes: Lanes | None = None) -> list[int]:
        """Return the checksums of blocks where they are."""
        _check(source, source, lanes)
        return self._run(None, source, lanes, True)

    def _run(
        self, targets: int | None, source: Places, lanes: Lanes | None, summed: bool
    ) -> list[int]:
        lane_count = 1 if lanes is None else lanes.count
        sums = np.empty(source.count * lane_count if summed else 0, dtype=np.uint64)
        self._move(
            targets, source.addresses.ctypes.data, source.lengths.ctypes.data,
            None if lanes is None else lanes.of_piece.ctypes.data,
            source.count, len(source.lengths), lane_count, sums.ctypes.data if summed else None,
        )  # fmt: skip
        found: list[int] = sums.tolist()
        return found


class PlainCopier:
    """`memmove`, and xxhash over what it has stored."""

    name = "plain"

    def copy(
        self, target: Places, source: Places, *, summed: bool = True, lanes: Lanes | None = None
    ) -> list[int]:
        """Copy block by block; return the checksums, or nothing unless `summed`."""
        _check(target, source, lanes)
        found: list[int] = []
        lengths = source.lengths.tolist()
        rows = zip(target.addresses.tolist(), source.addresses.tolist(), strict=True)
        for to, origin in rows:
            for place, start, length in zip(to, origin, lengths, strict=True):
                ctypes.memmove(place, start, length)
            if summed:
                found += _sums(to, lengths, lanes)
        return found

    def sums(self, source: Places, *, lanes: Lanes | None = None) -> list[int]:
        """Return the checksums of blocks where they are."""
        _check(source, source, lanes)
        lengths = source.lengths.tolist()
        return [
            one for places in source.addresses.tolist() for one in _sums(places, lengths, lanes)
        ]


def _sums(addresses: Sequence[int], lengths: Sequence[int], lanes: Lanes | None) -> list[int]:
    pieces: list[list[memoryview]] = [[] for _ in range(1 if lanes is None else lanes.count)]
    of_piece = [0] * len(lengths) if lanes is None else lanes.of_piece.tolist()
    for address, length, lane in zip(addresses, lengths, of_piece, strict=True):
        pieces[lane].append(memoryview((ctypes.c_uint8 * length).from_address(address)).cast("B"))
    return [parts_checksum(one) for one in pieces]


def _check(target: Places, source: Places, lanes: Lanes | None) -> None:
    assert target.addresses.shape == source.addresses.shape, "blocks pair by position"
    assert np.array_equal(target.lengths, source.lengths), "pieces pair by position"
    assert lanes is None or lanes.of_piece.shape == source.lengths.shape, "a lane for each piece"


def clear(target: Places) -> None:
    """Fill blocks with zeros."""
    lengths = target.lengths.tolist()
    for places in target.addresses.tolist():
        for address, length in zip(places, lengths, strict=True):
            ctypes.memset(address, 0, length)


def best_copier(path: Path = LIBRARY) -> Copier:
    """Return the compiled copier where it can be loaded, and the plain one elsewhere.

    A library of older sources has other names, and is not used: its functions take other arguments.
    """
    try:
        return NativeCopier(path)
    except OSError as error:
        log.debug("blocks are copied by memmove: %s", error)
    except AttributeError:
        log.warning("blocks are copied by memmove: %s is of another version; make setup", path)
    return PlainCopier()


COPIER = best_copier()
"""The copier of this process: the compiled one where it can be loaded, and the plain one
elsewhere."""


def thread_count(cpus: int | None = None) -> int:
    """Return how many threads shall copy: one per processor that may be used, at most a few."""
    usable = cpus if cpus is not None else len(os.sched_getaffinity(0))  # Linux only, as all of us.
    return max(1, min(THREADS_MAX, usable))


def copy_threads(name: str) -> ThreadPoolExecutor:
    """Start threads that copy. They take their processors from the caller: later, it may be a
    thread that asks for a copy which an engine has bound to one of them. Raises RuntimeError."""
    count = thread_count()
    threads = ThreadPoolExecutor(count, thread_name_prefix=name)
    together = threading.Barrier(count)
    try:
        for _ in range(count):
            threads.submit(together.wait)
    except RuntimeError:  # No more can be started: those that wait would wait for it.
        together.abort()
        threads.shutdown(wait=False)
        raise
    return threads
