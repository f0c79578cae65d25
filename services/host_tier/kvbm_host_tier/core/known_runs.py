"""Known runs: what answers to lookups contain of blocks that were looked up before.

    names      | 64 blocks | 64 blocks | 64 blocks | 23 blocks |
    stretches  | known     | known     | not known, looked up one by one …

Prompts begin alike, and a conversation asks for all of it again with each turn. A *stretch* is 64
blocks of such a run and their columns in an answer. It is valid while each of its slots has the
very block that it had. So a lookup costs what its new part costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from kvbm_common.identity import HASH_BYTES, SequenceHash, unpack_hashes
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.slots import SlotTable
from kvbm_common.wire.bounds import Usage

_parts_of = attrgetter("parts")
_OF_ONE_PART = frozenset({1})
STRETCHES_MAX = 1_024
"""Stretches that are remembered: 65,536 blocks."""
BLOCK_BYTES = HASH_BYTES + 96
"""Memory for what is remembered of one block."""


@dataclass(slots=True)
class Columns:
    """The columns of an answer for leading blocks of a run, and what it counts."""

    places: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    bytes: int = 0
    are_plain: bool = True
    """Every block has one part."""

    def add(self, other: Columns) -> None:
        """Add the columns of the blocks that follow."""
        self.places += other.places
        self.checksums += other.checksums
        self.bytes += other.bytes
        self.are_plain = self.are_plain and other.are_plain

    @classmethod
    def of(cls, table: SlotTable, slots: Sequence[int], blocks: Sequence[Block]) -> Columns:
        """Return the columns of these blocks in these slots."""
        assert len(slots) == len(blocks), f"{len(blocks)} blocks in {len(slots)} slots"
        return cls(
            table.places(slots),
            [block.checksum for block in blocks],
            sum([block.bytes for block in blocks]),
            _are_plain(blocks),
        )


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some blocks of a run that were looked up together."""

    packed: bytes
    names: list[SequenceHash]
    slots: list[int]
    blocks: list[Block]
    namespaces: frozenset[bytes]
    columns: Columns


@dataclass(slots=True)
class Run:
    """The names of a lookup, and what is known of the first of them."""

    names: list[SequenceHash] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    namespaces: set[bytes] = field(default_factory=set)
    columns: Columns = field(default_factory=Columns)

    def columns_of(
        self, table: SlotTable, slots: Sequence[int], blocks: Sequence[Block]
    ) -> Columns:
        """Return the columns of the blocks that are answered, which begin like this run."""
        known = len(self.slots)
        if len(slots) < known:
            return Columns.of(table, slots, blocks)
        assert not known or slots[known - 1] == self.slots[-1], "these are not the slots of the run"
        columns = Columns()
        columns.add(self.columns)
        if known < len(slots):
            columns.add(Columns.of(table, slots[known:], blocks[known:]))
        return columns


class KnownRuns:
    """The stretches that were looked up last, by the name of their last block."""

    def __init__(self, table: SlotTable, stretch_blocks: int) -> None:
        assert stretch_blocks > 0, f"stretches of {stretch_blocks} blocks"
        self._table = table
        self._stretch_blocks, self._stretch_bytes = stretch_blocks, HASH_BYTES * stretch_blocks
        self._stretches: dict[bytes, Stretch] = {}
        self._answered: tuple[bytes, Sequence[int], Sequence[Block]] | None = None
        self._forgotten = 0

    def usage(self) -> Usage:
        """Return how many stretches are known, and how many made room for newer ones."""
        assert len(self._stretches) <= STRETCHES_MAX, f"{len(self._stretches)} stretches"
        return Usage(len(self._stretches), STRETCHES_MAX, self._forgotten)

    def run_of(self, packed: bytes) -> Run:
        """Return the names of a lookup, and what is known of them; raises IdentityError."""
        run = Run()
        start = 0
        while (stretch := self._stretch_at(packed, start)) is not None:
            run.names += stretch.names
            run.slots += stretch.slots
            run.blocks += stretch.blocks
            run.namespaces |= stretch.namespaces
            run.columns.add(stretch.columns)
            start += self._stretch_bytes
        if start < len(packed):
            run.names += unpack_hashes(packed[start:])
        assert len(run.slots) == len(run.blocks) <= len(run.names), f"{len(run.slots)} slots"
        return run

    def _stretch_at(self, packed: bytes, start: int) -> Stretch | None:
        """Return what is known of the stretch that begins here, if all of it still holds."""
        end = start + self._stretch_bytes
        stretch = self._stretches.get(packed[end - HASH_BYTES : end])
        if stretch is None or stretch.packed != packed[start:end]:
            return None
        return stretch if self._table.has_still(stretch.slots, stretch.blocks) else None

    def answered(self, packed: bytes, slots: Sequence[int], blocks: Sequence[Block]) -> None:
        """Note what the answer to a lookup was: `settle` remembers it."""
        assert len(slots) == len(blocks), f"{len(blocks)} blocks in {len(slots)} slots"
        assert HASH_BYTES * len(slots) <= len(packed), f"{len(slots)} slots of a shorter lookup"
        if len(slots) >= self._stretch_blocks:
            self._answered = packed, slots, blocks

    def settle(self) -> None:
        """Remember the stretches of the last answer that are not known."""
        if self._answered is None:
            return
        (packed, slots, blocks), self._answered = self._answered, None
        count = self._stretch_blocks
        for first in range(0, len(slots) - count + 1, count):
            if self._stretch_at(packed, first * HASH_BYTES) is None:
                until = first + count
                part = packed[first * HASH_BYTES : until * HASH_BYTES]
                self._keep(part, [*slots[first:until]], [*blocks[first:until]])

    def _keep(self, packed: bytes, slots: list[int], blocks: list[Block]) -> None:
        if not self._table.has_still(slots, blocks):
            return  # One was discarded, or left, since the answer.
        names = [block.hash for block in blocks]
        assert b"".join(names) == packed, f"slot {slots[0]} and those after it have other blocks"
        key = packed[-HASH_BYTES:]
        self._stretches.pop(key, None)
        if len(self._stretches) == STRETCHES_MAX:
            del self._stretches[next(iter(self._stretches))]
            self._forgotten += 1
        namespaces = frozenset([block.namespace for block in blocks])
        columns = Columns.of(self._table, slots, blocks)
        self._stretches[key] = Stretch(packed, names, slots, blocks, namespaces, columns)

    def check(self) -> None:
        """Assert every invariant; O(stretches)."""
        assert len(self._stretches) <= STRETCHES_MAX
        for key, stretch in self._stretches.items():
            assert stretch.packed.endswith(key), f"the stretch of {key.hex()} ends otherwise"
            if self._table.has_still(stretch.slots, stretch.blocks):
                now = Columns.of(self._table, stretch.slots, stretch.blocks)
                assert stretch.columns == now, f"{stretch.columns} were told, {now} are there"
                found = [self._table.find(name) for name in stretch.names]
                assert found == stretch.slots, f"{found} are the slots, {stretch.slots} are known"


def _are_plain(blocks: Sequence[Block]) -> bool:
    """Tell whether each of these has one part; compared in C, since lookups have hundreds."""
    return _OF_ONE_PART.issuperset(map(_parts_of, blocks))


def part_sums_of(blocks: Sequence[Block]) -> bytes:
    """Return what ranks verify, block after block; empty where blocks have one part.

    A namespace says how blocks are cut, so all blocks of a run are cut alike. An engine that asks
    for blocks of several namespaces gets no checksums that it could misread.
    """
    if _are_plain(blocks) or len({block.code for block in blocks}) != 1:
        return b""
    return b"".join(block.part_sums for block in blocks)
