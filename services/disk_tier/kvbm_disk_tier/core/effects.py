"""Effects: what the disk tier's core wants done. Inputs are in `messages`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbm_common.tier.slots import Block
from kvbm_common.wire.admin import FilterReply, TierReply
from kvbm_common.wire.events import Event
from kvbm_common.wire.verbs import ErrorBody, FillReply, LeaseRequest

from kvbm_disk_tier.core.journal import Record


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
    """Write `blocks[i]`, which begins at `sources[i]` in the arena of `epoch`, to `targets[i]`.

    Sources are in units of `unit_bytes`, targets are places of the store. Ends in Written or
    WriteFailed.
    """

    write: int
    epoch: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    blocks: tuple[Block, ...]
    unit_bytes: int


@dataclass(frozen=True, slots=True)
class ReadSlots:
    """Read `blocks[i]` from `sources[i]` to `targets[i]` in the arena of `epoch`, and verify it.

    Sources are places of the store, targets in units of `unit_bytes`. Ends in ReadDone or
    ReadFailed. `until_ms`: see wire.verbs.FillRequest.
    """

    read: int
    epoch: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    blocks: tuple[Block, ...]
    unit_bytes: int
    until_ms: int


@dataclass(frozen=True, slots=True)
class AppendJournal:
    """Make records durable, in order; with a `write`, ends in Journaled or JournalFailed."""

    write: int | None
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a request of a verb."""

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
    """Make a store that is cut for blocks of this size, whatever was there before.

    What a former life has left is opened instead where it could not be read until now; for 0 bytes
    nothing is made. Ends in StoreOpened, StoreAbsent or StoreFailed.
    """

    slot_bytes: int


@dataclass(frozen=True, slots=True)
class ProbeStore:
    """Try to read and to write, since it had failed; ends in StoreProbed."""


@dataclass(frozen=True, slots=True)
class RewriteJournal:
    """Write a part of a shorter journal, which takes the place of the long one with the last.

    What is appended after the first part goes into both. Ends in JournalPartWritten, of the last
    part and of any failure in JournalRewritten.
    """

    records: tuple[Record, ...]
    is_first: bool
    is_last: bool


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
    """Ask the host tier what it holds; brings HostSnapshot after HostSnapshot, or its failure."""

    instance: str


@dataclass(frozen=True, slots=True)
class SayAccepting:
    """Tell the other instances whether this one takes blocks; ends in their WritersKnown."""

    accepting: bool


Effect = (
    OpenStore
    | ProbeStore
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

Emit = Callable[[Effect], None]
"""Have the shell carry out an effect after this step: the one way in which effects leave a core."""
