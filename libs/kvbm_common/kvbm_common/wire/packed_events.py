"""Packed events: what a source has stored and removed since its last message, with raw hashes.

```
  {v, epoch, seq, parts: [part, …]}             on kvbm.v1.events.<host>.<source>.packed
     stored   tier, ts_ms, namespace, runs: [{parent, hashes}, …]   sizes: [blocks of each event, …]
     removed  tier, ts_ms, namespace, hashes                        sizes: [blocks of each event, …]
```

An event as JSON is an envelope around a block or two; here many share one envelope, and a hash has
16 bytes instead of 35. A part is consecutive events that differ in their blocks alone. `seq` is the
number of the first event, and `sizes` has an entry for each: their numbers have no holes. Runs of
neighbouring events that continue each other are one run. Nothing else is lost: `unpack` returns the
events as they would be in JSON. A `cleared` is never packed, and neither is an event without
blocks.

Host and source are in the subject, so no payload can contradict it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, groupby
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, TypeVar, cast

import msgspec
from msgspec import Meta

from kvbm_common.identity import HASH_BYTES, SequenceHash, pack_hashes, packed_from_hex
from kvbm_common.wire import VERSION
from kvbm_common.wire.codec import MsgpackCodec, WireError
from kvbm_common.wire.events import (
    SUBJECT_PREFIX,
    Event,
    Natural,
    Positive,
    Removed,
    Run,
    Stored,
    Tier,
    Token,
    event_codec,
)
from kvbm_common.wire.raw_events import RawRemoved, RawStored

PACKED = "packed"
"""The last word of a subject, where JSON has the kind of an event."""
PACKED_BLOCKS_MAX = 1_024
"""Blocks of all events of a message; a single event may have more. A reader takes a hundred
messages in one step, so this bounds for how long it answers nothing."""
SEQ_MAX = 2**63 - 1
SUBJECT_NAMES = 3
"""After the prefix: host, source, kind."""
SUBJECTS_MAX = 4_096
"""Subjects that are remembered."""

RawHash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
RawDigest = Annotated[bytes, Meta(min_length=2 * HASH_BYTES, max_length=2 * HASH_BYTES)]
Sizes = Annotated[list[Positive], Meta(min_length=1)]
Packable = Stored | Removed | RawStored | RawRemoved
_AllStored = list[Stored] | list[RawStored]
_AllRemoved = list[Removed] | list[RawRemoved]
Name = TypeVar("Name", str, SequenceHash)
AnEvent = TypeVar("AnEvent", bound=Event | RawStored | RawRemoved)


class PackedRun(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run of blocks: each one's parent is the one before it; the first one's is `parent`."""

    parent: RawHash
    hashes: bytes


class _Part(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True, gc=False
):
    """The fields in which the events of a part are alike."""

    tier: Tier
    ts_ms: Natural
    rank: Natural = 0
    group: Natural = 0
    namespace: RawDigest
    sizes: Sizes
    """The number of blocks of each event."""


class StoredPart(_Part, frozen=True, kw_only=True, tag="stored", gc=False):
    """Consecutive `stored` events. Their blocks are those of the runs, one after the other."""

    runs: Annotated[list[PackedRun], Meta(min_length=1)]
    block_bytes: Natural = 0


class RemovedPart(_Part, frozen=True, kw_only=True, tag="removed", gc=False):
    """Consecutive `removed` events. Their blocks are in their order."""

    hashes: bytes
    reason: str = ""


Part = StoredPart | RemovedPart


class PackedEvents(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Consecutive events of one source in one epoch."""

    v: Literal[1] = VERSION  # type: ignore[assignment]
    epoch: Natural
    seq: Positive
    """The number of the first event; each further one has the next."""
    parts: Annotated[list[Part], Meta(min_length=1)]


packed_codec: MsgpackCodec[PackedEvents] = MsgpackCodec(PackedEvents)
_alike = attrgetter("__class__", "tier", "ts_ms", "rank", "group", "namespace")


class SubjectNames(NamedTuple):
    """The names in a subject of the stream."""

    prefix: str
    host: str
    source: str
    kind: str


# ---- writing ---------------------------------------------------------------------------------


def can_pack(event: Event | RawStored | RawRemoved) -> TypeGuard[Packable]:
    """Tell whether an event has a packed form: it has blocks, and no run is empty."""
    match event:
        case Stored(runs=runs):
            return bool(runs) and all(run.hashes for run in runs)
        case Removed(hashes=hashes):
            return bool(hashes)
        case RawStored() | RawRemoved():
            return True
        case _:
            return False


def kind_of(event: Event | RawStored | RawRemoved) -> str:
    """Return what an event is called: `stored`, `removed` or `cleared`."""
    return str(event.__struct_config__.tag)


def block_count(event: Packable) -> int:
    """Return how many blocks an event has."""
    match event:
        case Stored(runs=runs):
            return sum(len(run.hashes) for run in runs)
        case RawStored(runs=runs):
            return sum(len(blocks) for _, blocks in runs)
        case _:
            return len(event.hashes)


def pack(events: Sequence[Packable]) -> bytes:
    """Pack consecutive events of one source and epoch; raises IdentityError for a bad hash."""
    assert events, "a message has an event"
    first = events[0]
    numbers = [(one.host, one.source, one.epoch, one.seq) for one in events]
    wanted = [(first.host, first.source, first.epoch, first.seq + n) for n in range(len(events))]
    assert numbers == wanted, f"{numbers} are no consecutive events"
    parts = list(chain.from_iterable(_parts(list(alike)) for _, alike in groupby(events, _alike)))
    return packed_codec.encode(PackedEvents(epoch=first.epoch, seq=first.seq, parts=parts))


def stamped(event: AnEvent, now_ms: int) -> AnEvent:
    """Return an event with a time stamp: its own, if it has one."""
    return event if event.ts_ms else msgspec.structs.replace(event, ts_ms=now_ms)


def json_subject(prefix: str, event: Event) -> str:
    """Return the subject of an event's own message."""
    return f"{prefix}.{event.host}.{event.source}.{kind_of(event)}"


def packed_subject(prefix: str, event: Event | RawStored | RawRemoved) -> str:
    """Return the subject on which an event's source publishes packed events."""
    return f"{prefix}.{event.host}.{event.source}.{PACKED}"


def _parts(events: list[Packable]) -> Iterator[Part]:
    """Yield the parts of events of one kind that share what `_alike` compares."""
    match events[0]:
        case Stored() | RawStored():
            for size, stored in groupby(events, attrgetter("block_bytes")):
                yield _stored_part(cast("_AllStored", list(stored)), size)
        case _:
            for reason, removed in groupby(events, attrgetter("reason")):
                yield _removed_part(cast("_AllRemoved", list(removed)), reason)


def _stored_part(events: _AllStored, block_bytes: int) -> StoredPart:
    """Return the part of events in one form: their runs, those that continue each other as one."""
    if isinstance(events[0], RawStored):
        raw = _joined([event.runs for event in events])
        runs = [PackedRun(parent=parent, hashes=pack_hashes(blocks)) for parent, blocks in raw]
    else:
        hexes = [[(run.parent, run.hashes) for run in event.runs] for event in events]
        runs = [
            PackedRun(parent=packed_from_hex([parent]), hashes=packed_from_hex(hashes))
            for parent, hashes in _joined(hexes)
        ]
    return StoredPart(
        **_shared(events[0]),
        sizes=list(map(block_count, events)), runs=runs, block_bytes=block_bytes,
    )  # fmt: skip


def _joined(events: Sequence[Sequence[tuple[Name, list[Name]]]]) -> list[tuple[Name, list[Name]]]:
    """Return the runs of all events. A run is continued across events only: what is two runs in one
    event stays two."""
    runs: list[tuple[Name, list[Name]]] = []
    for some in events:
        rest = iter(some)
        if runs and some[0][0] == runs[-1][1][-1]:
            runs[-1][1].extend(next(rest)[1])
        runs += [(parent, list(blocks)) for parent, blocks in rest]
    return runs


def _removed_part(events: _AllRemoved, reason: str) -> RemovedPart:
    names = chain.from_iterable(event.hashes for event in events)
    if isinstance(events[0], RawRemoved):
        hashes = pack_hashes(cast("Iterator[SequenceHash]", names))
    else:
        hashes = packed_from_hex(cast("list[str]", list(names)))
    sizes = list(map(block_count, events))
    return RemovedPart(**_shared(events[0]), sizes=sizes, hashes=hashes, reason=reason)


def _shared(event: Packable) -> dict[str, Any]:
    return {
        "tier": event.tier, "ts_ms": event.ts_ms, "rank": event.rank, "group": event.group,
        "namespace": packed_from_hex([event.namespace[:32], event.namespace[32:]]),
    }  # fmt: skip


# ---- reading ---------------------------------------------------------------------------------


def events_on(subject: str, payload: bytes, *, prefix: str = SUBJECT_PREFIX) -> list[Event]:
    """Return the events of a message of either form; raises WireError, then none is of use."""
    names = names_of(subject)
    if names.prefix == prefix and names.kind == PACKED:
        return list(unpack(names, decode_packed(payload)))
    event = event_codec.decode(payload)
    kind = kind_of(event)
    if (prefix, event.host, event.source, kind) != names:
        text = f"{kind} of {event.host}/{event.source} on another subject"
        raise WireError(text, kind="wrong_subject")
    return [event]


@lru_cache(maxsize=SUBJECTS_MAX)
def names_of(subject: str) -> SubjectNames:
    """Return what a subject says; raises WireError if host or source is no name."""
    prefix, *names = subject.rsplit(".", SUBJECT_NAMES)
    if len(names) != SUBJECT_NAMES:
        raise WireError(f"{subject!r} is no subject of events", kind="wrong_subject")
    for name in names[:2]:
        try:
            msgspec.convert(name, Token)
        except msgspec.ValidationError as error:
            raise WireError(f"{subject!r}: {error}", kind="wrong_subject") from error
    return SubjectNames(prefix, *names)


def decode_packed(payload: bytes) -> PackedEvents:
    """Decode a packed message and check all that its types cannot say; raises WireError."""
    message = packed_codec.decode(payload)
    count = 0
    for part in message.parts:
        count += len(part.sizes)
        size = 0
        for run in part.runs if isinstance(part, StoredPart) else (part,):
            length = len(run.hashes)
            if not length or length % HASH_BYTES:
                raise _malformed("hashes", "a run is one or more hashes of 16 bytes")
            size += length
        if sum(part.sizes) * HASH_BYTES != size:
            text = f"{sum(part.sizes)} blocks in all events, {size / HASH_BYTES:g} in all runs"
            raise _malformed("sizes", text)
    if message.seq > SEQ_MAX - count:
        raise _malformed("seq", f"{count} events from {message.seq} on")
    return message


def unpack(names: SubjectNames, message: PackedEvents) -> Iterator[Event]:
    """Yield the events of a message that `decode_packed` has returned, as they are in JSON."""
    seq = message.seq
    for part in message.parts:
        head: dict[str, Any] = {
            "host": names.host, "source": names.source, "tier": part.tier, "epoch": message.epoch,
            "ts_ms": part.ts_ms, "rank": part.rank, "group": part.group,
            "namespace": part.namespace.hex(),
        }  # fmt: skip
        if isinstance(part, StoredPart):
            for runs in runs_of_events(part):
                named = [Run(parent=parent.hex(), hashes=_names(run)) for parent, run in runs]
                yield Stored(**head, seq=seq, runs=named, block_bytes=part.block_bytes)
                seq += 1
        else:
            for hashes in removed_of_events(part):
                yield Removed(**head, seq=seq, hashes=_names(hashes), reason=part.reason)
                seq += 1


def runs_of_events(part: StoredPart) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield the runs of each event of a part: parent, and blocks back to back."""
    runs = iter(part.runs)
    parent, hashes, at = b"", b"", 0
    for size in part.sizes:
        wanted, found = size * HASH_BYTES, list[tuple[bytes, bytes]]()
        while wanted:
            if at == len(hashes):
                run = next(runs)
                parent, hashes, at = run.parent, run.hashes, 0
            taken = hashes[at : at + wanted]
            at += len(taken)
            found.append((parent, taken))
            parent, wanted = taken[-HASH_BYTES:], wanted - len(taken)
        yield found


def removed_of_events(part: RemovedPart) -> Iterator[bytes]:
    """Yield the blocks of each event of a part, back to back."""
    at = 0
    for size in part.sizes:
        yield part.hashes[at : at + size * HASH_BYTES]
        at += size * HASH_BYTES


def _names(hashes: bytes) -> list[str]:
    digits = hashes.hex()
    return [digits[at : at + 2 * HASH_BYTES] for at in range(0, len(digits), 2 * HASH_BYTES)]


def _malformed(field: str, text: str) -> WireError:
    return WireError(f"{field}: {text}", kind="malformed", field=field)
