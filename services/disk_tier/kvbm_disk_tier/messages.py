"""What the disk tier's core takes in (`Input`) and what it wants done (`Effect`)."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.slots import Block
from kvbm_common.wire.admin import FilterReply, FilterRequest, TierReply, TierRequest
from kvbm_common.wire.events import Event
from kvbm_common.wire.verbs import (
    ArenaReply,
    ErrorBody,
    FillReply,
    FillRequest,
    Hits,
    LeaseReply,
    LeaseRequest,
    SnapshotReply,
)

from kvbm_disk_tier.journal import Record, Replay

STALE_ARENA = "stale_arena"
"""Another life's arena was mapped between the core's decision and its execution: these slots are
somebody else's by now."""


@dataclass(frozen=True, slots=True)
class HostEvent:
    """The host tier `instance` announced something."""

    instance: str
    event: Event


@dataclass(frozen=True, slots=True)
class HostSeen:
    """A host tier of this host has joined, or lives a new life."""

    instance: str


@dataclass(frozen=True, slots=True)
class HostLost:
    """… or has left, or died."""

    instance: str


@dataclass(frozen=True, slots=True)
class HostEventsLost:
    """NATS has dropped events of the host tier before we had them."""


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """What the host tier held before we listened."""

    instance: str
    reply: SnapshotReply


@dataclass(frozen=True, slots=True)
class HitsTold:
    """The host tier says what was asked for again."""

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
    """… or it did not answer."""

    write: int
    reason: str


@dataclass(frozen=True, slots=True)
class Written:
    """The bytes of a batch are in the store, but for entries `lost` of it."""

    write: int
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """They are not (all)."""

    write: int
    reason: str


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
    """Those that became so together."""


@dataclass(frozen=True, slots=True)
class JournalFailed:
    """They are not."""

    write: int
    reason: str


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
    `corrupt` or `gone` is lost; for any other reason it may be read again.
    """

    read: int
    intact: tuple[bool, ...]
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A read has failed as a whole, and nothing writes into the arena any more."""

    read: int
    reason: str


@dataclass(frozen=True, slots=True)
class Depth:
    """How many blocks in flight keep a store busy; None: that is not known."""

    reads: int | None = None
    writes: int | None = None
    written_bytes: int = 0
    """What it took to find out."""


@dataclass(frozen=True, slots=True)
class StoreOpened:
    """The file is there, cut into slots; `replay` is what the journal says is in it."""

    slot_count: int
    slot_bytes: int
    replay: Replay
    depth: Depth = Depth()


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """There is no store: the disk is full, or does not let us. `reason` is for the operator."""

    reason: str


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
    """It works again."""


@dataclass(frozen=True, slots=True)
class AdminAsked:
    """An operator wants to know or to change something."""

    reply_to: int
    verb: str
    request: TierRequest | FilterRequest


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Input = (
    StoreOpened
    | StoreFailed
    | AnnounceMore
    | StoreDown
    | StoreUp
    | HostSeen
    | HostLost
    | HostEvent
    | HostEventsLost
    | HostSnapshot
    | HitsTold
    | ArenaKnown
    | ArenaFailed
    | Leased
    | LeaseFailed
    | Written
    | WriteFailed
    | Released
    | Journaled
    | JournalFailed
    | FillAsked
    | ReadLanded
    | ReadDone
    | ReadFailed
    | WritersKnown
    | AdminAsked
    | Tick
)


@dataclass(frozen=True, slots=True)
class LeaseHost:
    """Ask the host tier to pin a batch; ends in Leased or LeaseFailed."""

    write: int
    instance: str
    request: LeaseRequest


@dataclass(frozen=True, slots=True)
class ReleaseHost:
    """Give the lease back; ends in Released (not valid when there is no answer)."""

    write: int
    instance: str
    lease: int


@dataclass(frozen=True, slots=True)
class WriteSlots:
    """Write arena slot `sources[i]` to file slot `targets[i]`; ends in Written or WriteFailed.

    `epoch`: the arena that the slots are of. `blocks`: what they hold.
    """

    write: int
    epoch: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    slot_bytes: int
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadSlots:
    """Read file slot `sources[i]` into arena slot `targets[i]` and verify `blocks[i]`.

    Ends in ReadDone or ReadFailed. `epoch`: the arena that the slots are of. `until_ms`: see
    wire.verbs.FillRequest.
    """

    read: int
    epoch: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    blocks: tuple[Block, ...]
    slot_bytes: int
    until_ms: int


@dataclass(frozen=True, slots=True)
class AppendJournal:
    """Make records durable, in order; with a `write`, ends in Journaled or JournalFailed."""

    write: int | None
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a verb."""

    reply_to: int
    reply: FillReply | TierReply | FilterReply | ErrorBody


@dataclass(frozen=True, slots=True)
class Publish:
    """Announce an event, in this order."""

    event: Event


@dataclass(frozen=True, slots=True)
class AnnounceLater:
    """There is more to announce: let others have their turn. Ends in AnnounceMore."""


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Make a store of slots of this size, whatever was there before.

    Ends in StoreOpened or StoreFailed.
    """

    slot_bytes: int


@dataclass(frozen=True, slots=True)
class RewriteJournal:
    """Replace the journal by these records: it has grown too long."""

    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class DropArena:
    """A host tier is gone: its arena need not stay mapped."""

    instance: str


@dataclass(frozen=True, slots=True)
class AskArena:
    """Ask the host tier for its arena and map it; ends in ArenaKnown or ArenaFailed."""

    instance: str


@dataclass(frozen=True, slots=True)
class AskHostSnapshot:
    """Ask the host tier what it holds; ends in HostSnapshot, or nothing."""

    instance: str


@dataclass(frozen=True, slots=True)
class SayAccepting:
    """Tell the other instances whether this one takes blocks; ends in their WritersKnown."""

    accepting: bool


Effect = (
    OpenStore
    | RewriteJournal
    | AskArena
    | DropArena
    | AskHostSnapshot
    | LeaseHost
    | ReleaseHost
    | WriteSlots
    | ReadSlots
    | AppendJournal
    | Answer
    | AnnounceLater
    | Publish
    | SayAccepting
)
