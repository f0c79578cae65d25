"""Events: what a source stored, removed or cleared, on `kvbm.v1.events.<host>.<source>.<kind>`.

An event is one batch of one kind. `epoch` is a life of the source and only grows; `seq` counts
1, 2, 3… inside it. The first event of every epoch is a `Cleared`. A consumer that misses a `seq`
asks the source for a snapshot; it never guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from kvbm_common.identity import SequenceHash, hashes_to_hex
from kvbm_common.wire import VERSION
from kvbm_common.wire.codec import JsonCodec

Hex128 = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$(?!\n)")]
"""A sequence hash in JSON."""
HexDigest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
"""A namespace digest in JSON."""
Token = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$(?!\n)")]
"""One element of a NATS subject: a host, a source, an instance."""
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**32)]
"""A number that is added up: a sum of these stays a `Natural` for years."""
Version = Annotated[int, Meta(ge=0, le=2**62)]
"""A number from which a receiver counts on: the next one must be a `Natural`, too."""
Tier = Literal["device", "host", "disk", "object"]
"""G1, G2, G3, G4."""

TIER_SOURCES = ("host-tier-", "disk-tier-", "object-tier-")
"""Beginnings of the sources that are tiers of a host: each engine of it can read from them."""

SUBJECT_PREFIX = "kvbm.v1.events"
CONSOLIDATED_PREFIX = "kvbm.v1.consolidated"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run of blocks: each one's parent is the one before it; the first one's is `parent`.

    `hashes` are not pattern-checked here: consumers convert them in bulk, which checks them too.
    """

    parent: Hex128
    hashes: list[str]


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The fields that every event carries."""

    v: Literal[1] = VERSION  # type: ignore[assignment]
    host: Token
    source: Token
    tier: Tier
    epoch: Natural
    seq: Positive
    ts_ms: Natural
    """Wall clock of the source, for people; nothing is decided by it."""
    rank: Natural = 0
    """Data-parallel rank of an engine; 0 for a tier."""
    group: Natural = 0
    """KV cache group of a hybrid model."""


class Stored(_Envelope, frozen=True, kw_only=True, tag="stored"):
    """Blocks that can be read from now on. Announced after commit, never before."""

    namespace: HexDigest
    runs: list[Run]
    block_bytes: Natural = 0
    """Bytes of each block, in events of a tier; 0: not said."""


class Removed(_Envelope, frozen=True, kw_only=True, tag="removed"):
    """Blocks that this tier has lost. Says nothing about other tiers."""

    namespace: HexDigest
    hashes: list[str]
    reason: str = ""
    """`evicted`, `corrupt`, `admin`…"""


class Cleared(_Envelope, frozen=True, kw_only=True, tag="cleared"):
    """This source holds nothing (on this rank, when `rank_only`)."""

    reason: str = ""
    rank_only: bool = False


Event = Stored | Removed | Cleared


class EventHead(TypedDict):
    """The head of an event: fields that its source fills in the same way in all kinds."""

    host: str
    source: str
    tier: Tier
    epoch: int
    seq: int
    ts_ms: int
    """A core leaves it at 0: wall-clock stamps are the business of its shell."""
    rank: NotRequired[int]


def run_of(parent: SequenceHash, hashes: Sequence[SequenceHash]) -> Run:
    """Return a run as events have it."""
    return Run(parent=parent.hex(), hashes=hashes_to_hex(hashes))


event_codec: JsonCodec[Event] = JsonCodec(Event)


def event_subject(event: Event) -> str:
    """Return the subject of an event that is published by itself.

    For tests: services call `json_subject` (packed_events.py), and pack what they can.
    """
    kind = event.__struct_config__.tag
    return f"{SUBJECT_PREFIX}.{event.host}.{event.source}.{kind}"
