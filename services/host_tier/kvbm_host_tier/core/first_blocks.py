"""First blocks: prompts that were looked up last, to see that only salt or namespace differ.

A name history holds them: 60 bytes each at most. Each entry is a first block's tokens together with
one of its hashes, under a key of 16 bytes:

    key    = second half of the block's hash ‖ second half of the digest of its tokens
    time   = first half of the hash, but its lowest bit
    number = checksum of the namespace, but its lowest bit ‖ that bit of the hash

Keys with one ending are found together: they are the hashes of the same tokens.
"""

from __future__ import annotations

from binascii import crc32
from typing import NamedTuple

from kvbm_common.identity import HASH_BYTES, SequenceHash
from kvbm_common.tier.name_history import NameHistory, Noted, entries_for
from kvbm_common.wire.bounds import Usage

FIRST_BLOCKS_MAX = 262_144
FIRST_BLOCKS_MIN = 65_536
"""The least, 4 MB, also for a small arena: there may be a large disk or a bucket below it."""
HASHES_MAX = 4
"""Hashes of the same tokens: tenants whose prompts begin alike."""
HALF = HASH_BYTES // 2


def first_blocks_for(slot_count: int, chosen: int | None = None) -> int:
    """Return how many first blocks a tier with so many slots keeps, unless a number is chosen."""
    return entries_for(slot_count, FIRST_BLOCKS_MIN, FIRST_BLOCKS_MAX, chosen)


class FirstBlock(NamedTuple):
    """The hash of a prompt's first block, and the namespace that it was looked up in."""

    name: SequenceHash
    namespace: int
    """The 31 bits of `namespace_bits`."""


class FirstBlocks:
    """The first blocks that were looked up last."""

    def __init__(self, chosen: int | None = None) -> None:
        """Start empty; so many are kept as an operator has chosen, or by the slots."""
        self._chosen = chosen
        self._history = NameHistory(chosen or FIRST_BLOCKS_MIN, by_tail=True)
        self._forgotten = 0

    def __len__(self) -> int:
        return len(self._history)

    def size_for(self, slot_count: int) -> None:
        """Keep as many first blocks as a tier with so many slots needs, or as are chosen."""
        self._history.resize(first_blocks_for(slot_count, self._chosen))

    def usage(self) -> Usage:
        """Return how full this history is. Its entries have no time, so no reach is known."""
        return Usage(len(self), self._history.entries_max, self._forgotten)

    def note(self, content: bytes, name: SequenceHash, namespace: bytes) -> list[FirstBlock]:
        """Make a first block the newest; returns the others with its tokens, as `alike` does."""
        assert len(content) == HASH_BYTES, f"a digest of {len(content)} bytes"
        assert len(name) == HASH_BYTES, f"a hash of {len(name)} bytes"
        history, key = self._history, SequenceHash(name[HALF:] + content[HALF:])
        noted = history.alike(key)
        others = [_unpacked(one) for one in noted if one.name != key]
        if len(others) < len(noted) and noted[-1].name != key:
            history.remove(key)  # So it comes in as the last, again.
        elif len(others) >= HASHES_MAX:
            history.remove(noted[0].name)
        upper, lowest = divmod(int.from_bytes(name[:HALF]), 2)
        number = namespace_bits(namespace) << 1 | lowest
        self._forgotten += len(history.note(key, upper, number))
        assert len(others) <= HASHES_MAX, f"{len(others)} other hashes of one first block"
        return others


def namespace_bits(namespace: bytes) -> int:
    """Return 31 bits that tell a namespace from others."""
    assert namespace, "a namespace has a digest"
    return crc32(namespace) >> 1


def _unpacked(noted: Noted) -> FirstBlock:
    assert noted.at_ms >= 0, f"{noted.name.hex()} has no first half"
    half = (noted.at_ms << 1 | noted.value & 1).to_bytes(HALF)
    return FirstBlock(SequenceHash(half + noted.name[:HALF]), noted.value >> 1)
