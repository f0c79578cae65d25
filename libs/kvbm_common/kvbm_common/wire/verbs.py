"""Verbs: requests and replies on NATS, and the offers and hits that the host tier listens to.

A request goes to `kvbm.v1.<kind>.<verb>` (any replica) or to
`kvbm.v1.<kind>.<host>.<instance>.<verb>` (this one). An error is an `ErrorReply`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvbm_common.wire import VERSION
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.events import Hex128, HexDigest, Natural, Positive, Run, Tier, Token
from kvbm_common.wire.slot_entries import FilledSlot, LeasedSlot
from kvbm_common.wire.tier_stats import SizeStats, TenantStats, WorkerStats

OFFER_BLOCKS_MAX = 4_096
"""One offer pins device blocks until it is answered; more come in several offers."""
SNAPSHOT_PAGES_MAX = 10_000
AGENT_BYTES_MAX = 1024 * 1024
"""NIXL's metadata has some hundred bytes; the process that reads peers takes four times as much."""

LeaseToken = Annotated[str, Meta(max_length=64)]
Figure = Annotated[float, Meta(ge=-(2.0**63), le=2.0**63)]
"""Products of two have a JSON number."""

FILL_GRACE_MS = 10_000
"""After a fill's `until_ms` and this, the host tier reuses slots that were never answered for."""


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    v: Literal[1] = VERSION  # type: ignore[assignment]


# --- offers and hits ------------------------------------------------------------------------


class OfferRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of device blocks: `blocks[i]` holds `hashes[i]`, on every rank."""

    parent: Hex128
    hashes: list[str]
    blocks: list[Natural]


class Offer(_Message, frozen=True, kw_only=True):
    """An engine holds these device blocks until `deadline_ms` after it said so: pull them.

    Published on `kvbm.v1.offers.<host>` by the consolidator for the connector.
    """

    host: Token
    engine: Token
    incarnation: str
    """The engine's life: 16 hex digits, drawn at its start."""
    offer: Natural
    """Counts up inside an incarnation."""
    namespace: HexDigest
    deadline_ms: Annotated[int, Meta(ge=1)]
    priority: int = 0
    runs: list[OfferRun]


class Hits(_Message, frozen=True, kw_only=True):
    """Host blocks that an engine asked for again: they deserve the disk.

    Published on `kvbm.v1.hits.<host>` by the host tier.
    """

    namespace: HexDigest
    hashes: list[str]
    instance: str = ""
    """The host tier that has them; empty: whichever there is."""
    block_bytes: Natural = 0
    """Bytes of each of them; 0: not said."""


# --- host tier: for the disk tier -----------------------------------------------------------


class ArenaRequest(_Message, frozen=True, kw_only=True):
    """The question where the arena is, and how it is cut."""

    any_size: bool = False
    """The asker knows slots of several sizes. One that does not is refused: `one_size`."""


class ArenaReply(_Message, frozen=True, kw_only=True):
    """The arena: slot s begins at s × `slot_bytes`, which is 0 until the first engine has come."""

    path: str
    bytes: Natural
    slot_bytes: Natural
    slot_count: Natural
    epoch: Natural
    instance: str
    staging: bool = False
    """Disk-only mode: the arena is a small staging area, every block is for the disk."""
    sizes: list[Positive] = []
    """Lengths of the slots that there are, the first one first; empty: all have `slot_bytes`."""


class LeaseRequest(_Message, frozen=True, kw_only=True):
    """Pin the host blocks among `hashes` for `lease_ms`, so that they can be copied away."""

    owner: Annotated[str, Meta(min_length=1)]
    epoch: Natural
    """The arena's epoch as the asker knows it; another one is refused."""
    hashes: list[str]
    lease_ms: Annotated[int, Meta(ge=1)]
    trace: str = ""
    """The `traceparent` of the onboard that wants them; empty: not traced."""
    token: LeaseToken = ""
    """The random token with which the owner gives the lease back; empty: none is asked for."""


class LeaseReply(_Message, frozen=True, kw_only=True):
    """The blocks that are there, but for those over the owner's share: they can be had later."""

    lease: Natural
    slots: list[LeasedSlot]
    over_share: list[str] = []


class ReleaseRequest(_Message, frozen=True, kw_only=True):
    """Give a lease back: only with the token that it was asked for with."""

    lease: Natural
    token: LeaseToken = ""


class ReleaseReply(_Message, frozen=True, kw_only=True):
    """`valid` says whether the lease had held until now. If not, the copy is worthless."""

    valid: bool


# --- host tier: for the host tiers of other hosts --------------------------------------------


class DoorRequest(_Message, frozen=True, kw_only=True):
    """The question where another host reads this arena. It leases blocks before it reads them."""

    any_size: bool = False
    """The asker knows slots of several sizes. One that does not is refused: `one_size`."""


class DoorReply(_Message, frozen=True, kw_only=True):
    """The arena as NIXL reads it: slot s begins at `address` + s * `slot_bytes`.

    `epoch` is what a `LeaseRequest` wants. `agent` is NIXL's metadata, good until a read fails.
    """

    epoch: Natural
    slot_bytes: Positive
    slot_count: Natural
    address: Natural
    agent: Annotated[bytes, Meta(max_length=AGENT_BYTES_MAX)]


# --- disk tier: for the host tier -----------------------------------------------------------


class FillSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A staged arena slot that is lent to the disk tier until it answers."""

    hash: Hex128
    slot: Natural


class FillRequest(_Message, frozen=True, kw_only=True):
    """Read these blocks into these staged slots of the arena, prefix first, and verify them.

    The slots are lent until `until_ms`, an instant on CLOCK_MONOTONIC, which both sides of a host
    share. A request that comes later is refused, and FILL_GRACE_MS after it the disk tier touches
    none of the slots any more, whatever happens to its answer.
    """

    epoch: Natural
    until_ms: Natural
    slots: list[FillSlot]
    slot_bytes: Natural = 0
    """Length of each of these slots; 0: as in ArenaReply. A longer block is refused."""
    ahead: Natural = 0
    """Blocks of the same run that this disk tier was asked for before these: it serves the fronts
    of all runs before their tails."""
    trace: str = ""
    """The `traceparent` of the onboard that wants them; empty: not traced."""


class FillReply(_Message, frozen=True, kw_only=True):
    """One entry per asked slot, in the asked order."""

    slots: list[FilledSlot]


# --- every source ---------------------------------------------------------------------------


class SnapshotRequest(_Message, frozen=True, kw_only=True):
    """The question what a source holds now. Only a consolidator reads `source`."""

    source: Token
    consolidated: bool = False
    """True if a consolidator returns the engine's consolidated stream, not its device blocks."""
    page: Annotated[int, Meta(ge=0, le=SNAPSHOT_PAGES_MAX)] = 0
    """A further page of the snapshot as of (`epoch`, `seq`); 0: a new one."""
    epoch: Natural = 0
    seq: Natural = 0


class SnapshotPart(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one namespace, rank, group and size as runs (a run may be a single block)."""

    namespace: HexDigest
    rank: Natural = 0
    group: Natural = 0
    runs: list[Run]
    block_bytes: Natural = 0


class SnapshotReply(_Message, frozen=True, kw_only=True):
    """The whole truth of a source as of (`epoch`, `seq`); later events apply on top of it."""

    host: Token
    source: Token
    tier: Tier
    epoch: Natural
    seq: Natural
    parts: list[SnapshotPart]
    page: Natural = 0
    pages: Annotated[int, Meta(ge=1, le=SNAPSHOT_PAGES_MAX)] = 1
    """Pages of the snapshot, each asked for by a SnapshotRequest; 1: it fits into one message."""


class StatsRequest(_Message, frozen=True, kw_only=True):
    """Ask a service for its statistics."""


class StatsReply(_Message, frozen=True, kw_only=True):
    """Figures of one instance. `ready` is what /readyz reports; `reasons` say what it cannot do."""

    kind: str
    host: Token
    instance: str
    epoch: Natural
    ready: bool
    reasons: list[str] = []
    seq: Natural = 0
    """The last event that this source has published."""
    tier: Tier | None = None
    slots: dict[str, Natural] = {}
    """Tiers: slots by state (`reset`, `staged`, `inactive`, `active`, `retired`) and `total`:
    those that may be used, which `retired` ones may not."""
    slot_bytes: Natural = 0
    """Tiers: length of the slots that the medium was cut for first."""
    block_bytes: Natural = 0
    """Tiers: bytes of the blocks in these slots."""
    capacity_bytes: Natural = 0
    """Tiers: bytes of the medium that may be used; 0: all slots have `slot_bytes`."""
    slab_bytes: Natural = 0
    slabs: dict[str, Natural] = {}
    """Tiers: length of the slabs, and how many have each state (`free`, `cut`, `leaving`)."""
    sizes: list[SizeStats] = []
    """Tiers: what each size of slots has, the first size first."""
    tenants: list[TenantStats] = []
    """Tiers: what each tenant has; empty while no engine names one."""
    policy: str = ""
    """Tiers: the eviction policy in force."""
    leases: Natural = 0
    figures: dict[str, Figure] = {}
    """Everything else that the service counts."""
    positions: dict[str, list[Natural]] = {}
    """Index: source → [epoch, seq] applied. Consolidator: source → [epoch, seq] published."""
    workers: list[WorkerStats] = []
    """Host tier: the engine workers that are attached. Consolidator: engines that pass through."""


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """A typed error: a stable `code`, a sentence, and the field at fault where there is one."""

    code: str
    message: str
    field: str = ""


class ErrorReply(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to a request that could not be served."""

    error: ErrorBody


offer_codec: JsonCodec[Offer] = JsonCodec(Offer)
hits_codec: JsonCodec[Hits] = JsonCodec(Hits)


def offers_subject(host: str) -> str:
    """Return the subject of the offers of a host's engines."""
    return f"kvbm.v1.offers.{host}"


def hits_subject(host: str) -> str:
    """Return the subject of the hits of a host's host tier."""
    return f"kvbm.v1.hits.{host}"


def verb_subject(kind: str, verb: str, *, host: str = "", instance: str = "") -> str:
    """Return the subject of a verb, of any replica or of one instance."""
    if host:
        return f"kvbm.v1.{kind}.{host}.{instance}.{verb}"
    return f"kvbm.v1.{kind}.{verb}"
