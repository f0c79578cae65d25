"""Messages: the inputs of the disk tier's core. What it wants done is in `effects`."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.tier.layout import Layout
from kvbm_common.wire.admin import FilterRequest, TierRequest
from kvbm_common.wire.events import Event
from kvbm_common.wire.verbs import ArenaReply, FillRequest, Hits, LeaseReply, SnapshotReply

from kvbm_disk_tier.core.journal import Replay

STALE_ARENA = "stale_arena"
"""Another life's arena was mapped between the core's decision and its execution: these slots hold
other blocks by now."""


@dataclass(frozen=True, slots=True)
class HostEvent:
    """The host tier `instance` announced something."""

    instance: str
    event: Event


@dataclass(frozen=True, slots=True)
class HostJoined:
    """A host tier of this host has joined, or lives a new life."""

    instance: str
    epoch: int = 0
    """The life of the arena; 0: it was not said."""


@dataclass(frozen=True, slots=True)
class HostLeft:
    """A host tier of this host has left, or died."""

    instance: str


@dataclass(frozen=True, slots=True)
class HostEventsLost:
    """NATS has dropped events of the host tiers before they came here."""


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """Some of the blocks that a host tier held before its events were followed: see
    `snapshot_pieces.py`."""

    instance: str
    reply: SnapshotReply


@dataclass(frozen=True, slots=True)
class HostSnapshotFailed:
    """A host tier did not say what it holds."""

    instance: str


@dataclass(frozen=True, slots=True)
class HitsTold:
    """A host tier says which blocks were asked for again."""

    instance: str
    hits: Hits


@dataclass(frozen=True, slots=True)
class ArenaKnown:
    """The host tier's arena has been mapped."""

    arena: ArenaReply


@dataclass(frozen=True, slots=True)
class ArenaFailed:
    """The arena could not be asked for or mapped."""

    instance: str


@dataclass(frozen=True, slots=True)
class Leased:
    """The host tier has pinned what it had of a batch."""

    write: int
    reply: LeaseReply


@dataclass(frozen=True, slots=True)
class LeaseFailed:
    """The host tier refused a lease, or did not answer."""

    write: int
    reason: str


@dataclass(frozen=True, slots=True)
class Written:
    """The bytes of a batch are in the store, but for entries `lost` of it."""

    write: int
    lost: tuple[int, ...] = ()
    failure: str = ""
    """The reason why the store has taken none of the blocks that it was given; empty: it has taken
    some."""


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The bytes of a batch are not in the store, or not all of them."""

    write: int
    reason: str
    detail: str = ""
    """For the operator: what the system said."""


@dataclass(frozen=True, slots=True)
class Released:
    """The host tier says whether the lease had held through the write, or does not answer."""

    write: int
    valid: bool
    answered: bool = True


@dataclass(frozen=True, slots=True)
class Journaled:
    """The records of batches are as durable as the configuration asks."""

    writes: tuple[int, ...]
    """The writes that became durable together."""


@dataclass(frozen=True, slots=True)
class JournalFailed:
    """Records could not be made durable: those of a batch, or of blocks that are removed."""

    write: int | None
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class JournalPartWritten:
    """A part of a rewrite is written, and is not the last one."""


@dataclass(frozen=True, slots=True)
class JournalRewritten:
    """The journal has been replaced by a shorter one, or, with a `failure`, has not."""

    failure: str = ""


@dataclass(frozen=True, slots=True)
class Synchronised:
    """The end of a synchronisation; with a `failure` it has failed. See `disk_sync`."""

    failure: str = ""


@dataclass(frozen=True, slots=True)
class FillAsked:
    """The host tier wants blocks read into staged slots of its arena."""

    reply_to: int
    request: FillRequest


@dataclass(frozen=True, slots=True)
class ReadLanded:
    """A read's bytes are in the arena, and are summed up now: the disk has time for others.

    A medium may say so, before the read's end.
    """

    read: int


@dataclass(frozen=True, slots=True)
class ReadDone:
    """A read has ended; `intact[i]` says whether block i is there and has the right checksum.

    `reasons[i]` says what is wrong with it otherwise: without it `corrupt`. A block that is
    `corrupt` or `gone` is lost; for any other reason it may be read again. `sums[i]` are the
    packed checksums of the parts that were read; without it every block has one part.
    """

    read: int
    intact: tuple[bool, ...]
    reasons: tuple[str, ...] = ()
    sums: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A read has failed as a whole, and nothing writes into the arena any more."""

    read: int
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Depth:
    """The blocks in flight that keep a store busy; None: not known."""

    reads: int | None = None
    writes: int | None = None
    written_bytes: int = 0
    """Bytes that were written to find out."""


@dataclass(frozen=True, slots=True)
class StoreOpened:
    """The file is there, cut into slabs; `replay` is what the journal says is in their slots."""

    layout: Layout
    replay: Replay
    depth: Depth = Depth()
    replaced_format: bool = False
    """True if a store of another format was replaced, whose blocks are lost."""
    write_failure: str = ""
    """The reason why blocks can be read from the store, and not be written; empty: they can."""


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """There is no store: the disk is full, or does not let us. `reason` is for the operator."""

    reason: str


@dataclass(frozen=True, slots=True)
class StoreAbsent:
    """A store can be made, and nothing is there that could be opened."""


@dataclass(frozen=True, slots=True)
class StoreProbed:
    """The end of a probe of the store; a failure is for the operator, and empty if all is well."""

    read_failure: str = ""
    write_failure: str = ""


@dataclass(frozen=True, slots=True)
class AnnounceMore:
    """Others have had their turn: go on with the announcement of a former life's blocks."""


@dataclass(frozen=True, slots=True)
class WritersKnown:
    """These instances of this host, this one included or not, take blocks now."""

    instances: frozenset[str]


@dataclass(frozen=True, slots=True)
class StoreDown:
    """The store does not work for now. `reason` is for the operator."""

    reason: str


@dataclass(frozen=True, slots=True)
class StoreUp:
    """The store works again."""


@dataclass(frozen=True, slots=True)
class DeletesRefused:
    """The store keeps what it was to delete, and reads and writes go on. Texts are for operators.

    `reason` is empty where it deletes again, or keeps only some.
    """

    reason: str
    waiting: str = ""
    """The objects that it has not deleted when it was last asked; empty: none."""


@dataclass(frozen=True, slots=True)
class DeletesAnswered:
    """A bucket has answered the deletes of all blocks that were removed up to a record's order."""

    order: int


@dataclass(frozen=True, slots=True)
class AdminAsked:
    """An operator wants to know or to change something."""

    reply_to: int
    verb: str
    request: TierRequest | FilterRequest


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines are looked at."""


HostInput = (
    HostJoined
    | HostLeft
    | HostEvent
    | HostEventsLost
    | HostSnapshot
    | HostSnapshotFailed
    | HitsTold
    | ArenaKnown
    | ArenaFailed
)
"""Inputs about host tiers."""
WriteInput = Leased | LeaseFailed | Written | WriteFailed | Released | Journaled | JournalFailed
"""Inputs that tell how a step of a write has ended."""
ReadInput = FillAsked | ReadLanded | ReadDone | ReadFailed
"""Fills, and how their reads have ended."""
StoreInput = (
    StoreOpened
    | StoreFailed
    | StoreAbsent
    | AnnounceMore
    | StoreDown
    | StoreUp
    | DeletesRefused
    | DeletesAnswered
)
"""Inputs about the store."""
HealthInput = StoreProbed | JournalRewritten | Synchronised
"""Inputs that tell whether the store works, beside those of reads and writes."""
Input = (
    HostInput
    | WriteInput
    | ReadInput
    | StoreInput
    | HealthInput
    | JournalPartWritten
    | WritersKnown
    | AdminAsked
    | Tick
)
