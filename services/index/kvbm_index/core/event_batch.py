"""Event batches: consecutive events of a source, decoded as one.

Engines publish one event per stored or evicted block, and most of its cost is overhead.
Neighbouring events of a source usually continue each other and become one run. Anything unusual
is decoded singly by event_decoder.py, which reports what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter
from typing import cast

import msgspec
import numpy as np
from kvbm_common.identity import IdentityError, packed_from_json
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.wire.codec import UNREADABLE, WireError
from kvbm_common.wire.events import Event

from kvbm_index.core import event_decoder, packed_batch
from kvbm_index.core.event_decoder import (
    HASHES_BEGIN,
    PARENT_ENDS,
    RUN,
    DecodedEvent,
    DecodedRemoved,
    DecodedStored,
)
from kvbm_index.core.packed_batch import PARTS, PackedPart, PackedRemoved, PackedStored

DIGITS = PARENT_ENDS - len(RUN[0])
"""Digits of one name."""
HASHES_END = -len(b"]" + RUN[2])
TAIL_BEGINS, TAIL_ENDS = HASHES_END - len(b'"') - DIGITS, HASHES_END - len(b'"')
"""The last name of a run, from its end."""
SHAPE = RUN[1] + b"[", b"]" + RUN[2]
LAYOUTS_MAX = 256
"""Lengths whose layouts are remembered."""

ReadEvent = DecodedEvent | PackedPart
"""One event as the index reads it from a message, or a packed part of many in a row."""

_subject, _payload = itemgetter(0), itemgetter(1)
_seq = attrgetter("seq")
_names = attrgetter("host", "source", "__class__")
_namespace, _runs, _hashes = attrgetter("namespace"), attrgetter("runs"), attrgetter("hashes")
_events = msgspec.json.Decoder(list[DecodedEvent])


def read(
    messages: Sequence[EventMessage], refuse: Callable[[EventMessage, WireError], None]
) -> list[ReadEvent]:
    """Read the events of messages, in order; those that cannot be read go to `refuse`.

    Of a packed message its parts are returned, all or none.
    """
    found: list[ReadEvent] = []
    for subject, group in groupby(messages, _subject):
        several, packed = list(group), packed_batch.is_packed(subject)
        events = _read_all(several) if len(several) > 1 and not packed else None
        if events is not None:
            found += events
            continue
        for message in several:
            try:
                if packed:
                    found += packed_batch.read(subject, message.payload)
                else:
                    found.append(event_decoder.read(subject, message.payload))
            except WireError as error:
                refuse(message, error)
    return found


def next_seq(events: Sequence[Event | ReadEvent], seq: int) -> int | None:
    """Return the number after these events, all of one kind, if they are in a row from `seq` on;
    None if not."""
    assert events, "no event is in a row"
    if not isinstance(events[0], PARTS):
        end = seq + len(events)
        return end if list(map(_seq, events)) == list(range(seq, end)) else None
    for part in cast("Sequence[PackedPart]", events):
        if part.seq != seq:
            return None
        seq += part.count
    return seq


def _read_all(messages: Sequence[EventMessage]) -> list[DecodedEvent] | None:
    """Read the events of messages with one subject at once; None: read them one by one."""
    assert len(messages) > 1, "one message is read as one"
    try:
        events = _events.decode(b"[" + b",".join(map(_payload, messages)) + b"]")
    except UNREADABLE:
        return None
    named = set(map(_names, events))
    if len(events) != len(messages) or named != {event_decoder.names_on(messages[0].subject)}:
        return None
    return events


def one_by_one(events: Sequence[Event | ReadEvent]) -> Iterator[Event | DecodedEvent]:
    """Yield events, those of packed parts as well."""
    for event in events:
        if isinstance(event, PARTS):
            yield from packed_batch.one_by_one(event)
        else:
            yield event


def stored_by(
    events: Sequence[DecodedStored] | Sequence[PackedStored],
) -> list[event_decoder.NamedRun] | None:
    """Return the runs of all of these, in order, those that continue each other as one.

    None: the events cannot be read this way.
    """
    assert events, "nothing was stored"
    if isinstance(events[0], PackedStored):
        return packed_batch.stored_by(cast("Sequence[PackedStored]", events))
    try:
        return _stored_by(cast("Sequence[DecodedStored]", events))
    except IdentityError:  # A namespace that is no hex: read one by one, the bad event is known.
        return None


def _stored_by(events: Sequence[DecodedStored]) -> list[event_decoder.NamedRun] | None:
    namespaces = set(map(_namespace, events))
    if len(namespaces) != 1:
        return None
    texts = list(map(_runs, events))
    columns = _equal_columns(texts) if len(set(map(len, texts))) == 1 else _columns(texts)
    if columns is None:
        return None
    parents, tails, hashes = columns
    assert len(parents) == len(tails) == len(hashes) == len(events), "a run per event"
    breaks = [0, *_breaks(parents, tails), len(events)]
    found = []
    (namespace,) = namespaces
    for at, end in pairwise(breaks):
        run = event_decoder.named_run(
            parents[at], b"[" + b",".join(hashes[at:end]) + b"]", namespace
        )
        if run is None:
            return None
        found.append(run)
    return found


Columns = tuple[list[bytes], list[bytes], list[bytes]]
"""The only run of each event: its parent, its last block, and its blocks as in a JSON array."""


def _columns(texts: Sequence[msgspec.Raw]) -> Columns | None:
    """Return parents, tails and hashes of these runs; None: they cannot be read this way."""
    # The part of a run after its first words.
    first, *runs = b"".join(texts).split(RUN[0])
    if first or len(runs) != len(texts):
        return None
    begin, end = PARENT_ENDS - len(RUN[0]), HASHES_BEGIN - len(RUN[0]) + 1
    if {(run[begin:end], run[HASHES_END:]) for run in runs} != {SHAPE}:
        return None
    return (
        [run[:begin] for run in runs],
        [run[TAIL_BEGINS:TAIL_ENDS] for run in runs],
        [run[end:HASHES_END] for run in runs],
    )


def _equal_columns(texts: Sequence[msgspec.Raw]) -> Columns | None:
    """Return the columns of texts of one length, which are a table, and cut by numpy.

    None: they cannot be read this way.
    """
    length = len(texts[0])
    if length < PARENT_ENDS + len(SHAPE[0]) + len(SHAPE[1]) + DIGITS + 2:
        return None
    table = np.frombuffer(b"".join(texts), _layout(length))
    assert len(table) == len(texts), f"{len(table)} rows of {len(texts)} runs"
    for field, words in zip(("0", "1", "2"), (RUN[0], *SHAPE), strict=True):
        if table[field].tobytes() != words * len(texts):
            return None
    parents, tails, hashes = (table[field].tolist() for field in ("parent", "tail", "hashes"))
    return parents, tails, hashes


@lru_cache(maxsize=LAYOUTS_MAX)
def _layout(length: int) -> np.dtype[np.void]:
    """Return where the parts of a run are whose text has this length."""
    hashes = PARENT_ENDS + len(SHAPE[0])
    assert length + TAIL_BEGINS > hashes, f"no name has room in {length} bytes"
    return np.dtype(
        {
            "names": ["0", "parent", "1", "hashes", "tail", "2"],
            "formats": [
                f"V{len(RUN[0])}", f"S{DIGITS}", f"V{len(SHAPE[0])}",
                f"S{length + HASHES_END - hashes}", f"S{DIGITS}", f"V{len(SHAPE[1])}",
            ],
            "offsets": [
                0, len(RUN[0]), PARENT_ENDS, hashes, length + TAIL_BEGINS, length + HASHES_END,
            ],
            "itemsize": length,
        }
    )  # fmt: skip


def removed_by(events: Sequence[DecodedRemoved] | Sequence[PackedRemoved]) -> bytes | None:
    """Return the blocks that are gone with all of these; None: they cannot be read this way.

    The last event first: engines evict from the leaf on, so this is from the root on, like chains.
    """
    assert events, "nothing was removed"
    if isinstance(events[0], PackedRemoved):
        return packed_batch.removed_by(cast("Sequence[PackedRemoved]", events))
    text = b",".join([bytes(hashes)[1:-1] for hashes in map(_hashes, reversed(events))])
    return packed_from_json(b"[" + text + b"]")


def _breaks(parents: list[bytes], tails: list[bytes]) -> list[int]:
    """Return the positions where a run does not continue the one before it."""
    if parents[1:] == tails[:-1]:
        return []
    pairs = zip(parents[1:], tails[:-1], strict=True)
    return [at for at, (parent, tail) in enumerate(pairs, start=1) if parent != tail]
