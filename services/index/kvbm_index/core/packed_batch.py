"""Packed events as the index takes them: a part of a message at a time, not an event at a time.

A part is many events of one holder and kind in a row. If the first of them is the next of its
source, all are, and they are applied as one. Otherwise `one_by_one` returns them as events, which
take the usual way: some may be known already, or have to wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from kvbm_common.identity import HASH_BYTES
from kvbm_common.wire import packed_events
from kvbm_common.wire.events import SUBJECT_PREFIX, Event, Tier
from kvbm_common.wire.packed_events import (
    PACKED,
    PackedEvents,
    RemovedPart,
    StoredPart,
    SubjectNames,
    decode_packed,
    names_of,
)

from kvbm_index.core.event_decoder import NamedRun

ENDING = f".{PACKED}"
_PREFIX = f"{SUBJECT_PREFIX}."


class _Packed(msgspec.Struct, frozen=True, gc=False):
    """The fields of both kinds of parts, under the names that single events have."""

    host: str
    source: str
    tier: Tier
    epoch: int
    seq: int
    ts_ms: int
    rank: int
    group: int

    count: int
    """The number of events that were packed together."""


class PackedStored(_Packed, frozen=True, tag="stored", gc=False):
    """Events that store blocks, one after the other."""

    part: StoredPart

    def runs(self) -> list[NamedRun]:
        """Return the runs of all events, those that continue each other as one."""
        root = self.part.namespace[:HASH_BYTES]
        assert len(root) == HASH_BYTES, f"{root.hex()} is no root"
        return [(run.parent, run.hashes, run.parent == root) for run in self.part.runs]


class PackedRemoved(_Packed, frozen=True, tag="removed", gc=False):
    """Events that remove blocks, one after the other."""

    part: RemovedPart

    def blocks(self) -> bytes:
        """Return the blocks of all events, the last event first.

        Engines evict from the leaf on, so this is from the root on, like chains.
        """
        hashes, sizes = self.part.hashes, self.part.sizes
        assert sum(sizes) * HASH_BYTES == len(hashes), f"{sum(sizes)} blocks, {len(hashes)} bytes"
        if len(sizes) * HASH_BYTES == len(hashes):
            return np.frombuffer(hashes, f"V{HASH_BYTES}")[::-1].tobytes()
        return b"".join(reversed(list(packed_events.removed_of_events(self.part))))


PackedPart = PackedStored | PackedRemoved
PARTS = (PackedStored, PackedRemoved)


def is_packed(subject: str) -> bool:
    """Tell whether what is on this subject is packed."""
    return subject.endswith(ENDING) and subject.startswith(_PREFIX)


def read(subject: str, payload: bytes) -> list[PackedPart]:
    """Read the parts of a packed message, in order; raises WireError, then none is of use."""
    message, (_, host, source, _) = decode_packed(payload), names_of(subject)
    found: list[PackedPart] = []
    seq = message.seq
    for part in message.parts:
        count = len(part.sizes)
        assert count > 0, "a part without events was decoded"
        head = (
            host, source, part.tier, message.epoch, seq, part.ts_ms, part.rank, part.group, count
        )  # fmt: skip
        if isinstance(part, StoredPart):
            found.append(PackedStored(*head, part))
        else:
            found.append(PackedRemoved(*head, part))
        seq += count
    return found


def one_by_one(part: PackedPart) -> Iterator[Event]:
    """Yield the events of a part."""
    assert part.count == len(part.part.sizes), f"{part.count} events, {part.part.sizes}"
    names = SubjectNames(SUBJECT_PREFIX, part.host, part.source, PACKED)
    message = PackedEvents(epoch=part.epoch, seq=part.seq, parts=[part.part])
    return packed_events.unpack(names, message)


def stored_by(parts: Sequence[PackedStored]) -> list[NamedRun]:
    """Return the runs of these parts, in order, those that continue each other as one."""
    assert parts, "nothing was stored"
    found: list[tuple[bytes, list[bytes], bool]] = []
    tail = b""
    for part in parts:
        for parent, blocks, rooted in part.runs():
            if parent == tail:
                found[-1][1].append(blocks)
            else:
                found.append((parent, [blocks], rooted))
            tail = blocks[-HASH_BYTES:]
    return [(parent, b"".join(blocks), rooted) for parent, blocks, rooted in found]


def removed_by(parts: Sequence[PackedRemoved]) -> bytes:
    """Return the blocks that are gone with these parts, the last event first."""
    assert parts, "nothing was removed"
    return b"".join([part.blocks() for part in reversed(parts)])
