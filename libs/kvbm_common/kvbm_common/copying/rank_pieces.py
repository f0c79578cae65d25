"""Pieces of a rank's blocks: where each is on the device, in a slot, and in the rank's own bytes.

A piece is one run of bytes on both sides. A transfer needs few of them, the *coarse* ones; for a
checksum each must be in one part of the block, as the *fine* ones are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvbm_common.copying import Lanes, Numbers, Places
from kvbm_common.nixl.layout import part_bytes
from kvbm_common.tier.parts import Share
from kvbm_common.wire.local import Region


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of every block of a rank, in the order of its own bytes."""

    slot: Numbers
    """Offsets in a slot."""
    own: Numbers
    """Offsets among the rank's own bytes."""
    lengths: Numbers

    def in_slots(self, starts: Numbers) -> Places:
        """Return where the rank's share is in the slots that start at these addresses."""
        return Places(_column(starts) + self.slot, self.lengths)

    def back_to_back(self, starts: Numbers) -> Places:
        """Return the same runs where the rank's bytes lie densely from these addresses on."""
        return Places(_column(starts) + self.own, self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces(Runs):
    """Runs that are one run of bytes on the device, too."""

    device: Numbers
    """Addresses in device block 0."""
    strides: Numbers
    """From one device block to the next."""

    def on_device(self, blocks: Sequence[int]) -> Places:
        """Return where these device blocks are."""
        return Places(self.device + _column(blocks) * self.strides, self.lengths)


class RankPieces:
    """The pieces of a rank whose memory is `regions` and that holds `share` of every block."""

    def __init__(self, regions: Sequence[Region], share: Share) -> None:
        self.share = share
        self.bytes = part_bytes(regions)
        """Bytes of the rank's part of a block."""
        self.block_bytes = share.block_bytes(self.bytes)
        """Bytes of a whole block."""
        assert self.block_bytes, f"{self.bytes} bytes of {share}"
        self._regions = tuple(regions)
        self._run_bytes = self.block_bytes // share.grid.run_count
        self._run = share.runs()
        parts = share.grid.parts_of_runs()[self._run]
        self._lane_of_run = np.searchsorted(np.array(share.parts), parts)
        """Run → the index of the rank's part that it belongs to."""

    @cached_property
    def runs(self) -> Runs:
        """The fewest runs, wherever they are on the device."""
        return self._runs_between(self._ends(np.diff(self._run) != 1))

    @cached_property
    def coarse(self) -> Pieces:
        """The fewest pieces, for a transfer."""
        return self._pieces_between(self._ends(np.diff(self._run) != 1))

    @cached_property
    def fine(self) -> Pieces:
        """The fewest pieces that each lie in one part; `lanes` says in which."""
        borders = (np.diff(self._run) != 1) | (np.diff(self._lane_of_run) != 0)
        return self._pieces_between(self._ends(borders))

    @cached_property
    def lanes(self) -> Lanes:
        """The parts that the fine pieces are in; lane p is the rank's p-th part."""
        lanes = self._lane_of_run[self.fine.own.astype(np.int64) // self._run_bytes]
        return Lanes(lanes.astype(np.uint32), len(self.share.parts))

    def part_regions(self) -> list[list[Region]]:
        """Return the fine pieces of each part as regions of memory."""
        fine, blocks = self.fine, min(region.blocks for region in self._regions)
        parts: list[list[Region]] = [[] for _ in self.share.parts]
        rows = zip(fine.device.tolist(), fine.strides.tolist(), fine.lengths.tolist(), strict=True)
        for lane, (address, stride, length) in zip(self.lanes.of_piece.tolist(), rows, strict=True):
            region = Region(address=address, stride=stride, piece_bytes=length, blocks=blocks)
            parts[lane].append(region)
        return parts

    def _ends(self, borders: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Return the ends of bytes after which `borders` has something else begin."""
        runs = np.append(np.flatnonzero(borders) + 1, len(self._run))
        return runs * self._run_bytes

    def _runs_between(self, ends: NDArray[np.intp]) -> Runs:
        begins = np.append(0, ends[:-1])
        run, rest = np.divmod(begins, self._run_bytes)
        slot = self._run[run] * self._run_bytes + rest
        return Runs(*(numbers.astype(np.uint64) for numbers in (slot, begins, ends - begins)))

    def _pieces_between(self, ends: NDArray[np.intp]) -> Pieces:
        """Return the pieces that end there, and where a region does."""
        sizes = np.array([region.piece_bytes for region in self._regions])
        region_ends = np.cumsum(sizes)
        runs = self._runs_between(np.union1d(ends, region_ends))
        region = np.searchsorted(region_ends, runs.own.astype(np.intp), side="right")
        addresses = np.array([one.address for one in self._regions], dtype=np.uint64)
        strides = np.array([one.stride for one in self._regions], dtype=np.uint64)
        inside = runs.own - (region_ends - sizes)[region].astype(np.uint64)
        return Pieces(
            runs.slot, runs.own, runs.lengths, addresses[region] + inside, strides[region]
        )


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """Device blocks of a rank, each with the address of its slot."""

    pieces: RankPieces
    blocks: Sequence[int]
    slots: Numbers

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    @property
    def bytes(self) -> int:
        """Bytes of the rank's share of all blocks."""
        return self.count * self.pieces.bytes

    @property
    def device(self) -> Places:
        """The blocks on the device, in coarse pieces."""
        return self.pieces.coarse.on_device(self.blocks)

    @property
    def arena(self) -> Places:
        """The pieces of `device` in the arena."""
        return self.pieces.coarse.in_slots(self.slots)


def slot_starts(slots: Sequence[int], *, arena_address: int, slot_bytes: int) -> Numbers:
    """Return the address at which each of these slots begins."""
    return np.asarray(slots, dtype=np.uint64) * np.uint64(slot_bytes) + np.uint64(arena_address)


def _column(numbers: Sequence[int] | Numbers) -> Numbers:
    return np.asarray(numbers, dtype=np.uint64).reshape(-1, 1)
