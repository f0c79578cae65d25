"""Local messages: msgpack over ZMQ between an engine's connector and its host tier.

Those to and from the consolidator are in `consolidator`, which also uses `Beat` and `Refused`. Both
services bind a ROUTER; the connector connects a DEALER. One message is one frame, a map with a
`type`. Everything an engine imports to speak this is msgspec, pyzmq, numpy and nixl.

    connector                         host tier
    Hello ─────────────────────────►            (again when it was away for a while)
          ◄───────────────────────── Welcome | Refused | Moved
    Lookup ────────────────────────►
          ◄───────────────────────── Found      (once, when all of it is leased, or the deadline)
    Release ───────────────────────►
    Outcome ───────────────────────►            (what was found was not used, and why)
    Misses ────────────────────────►            (lookups that its filter has answered)
    SessionHint ───────────────────►            (what an agent does next with a session)
          ◄───────────────────────── Pulled     (an offer's blocks are in staged slots)
    Confirm ───────────────────────►            (they were still held: commit)
    Beat ──────────────────────────►
          ◄───────────────────────── Alive | Refused (say Hello again)
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvbm_common.identity import HASH_BYTES, Namespace
from kvbm_common.tier.kv_groups import GROUPS_MAX, GroupRun
from kvbm_common.tier.parts import Share, share_of_rank
from kvbm_common.tier.prefill_cost import PrefillCost
from kvbm_common.wire import VERSION
from kvbm_common.wire.codec import MsgpackCodec
from kvbm_common.wire.events import Count, Natural, Positive, Token, Version
from kvbm_common.wire.index_verbs import MATCH_BLOCKS_MAX
from kvbm_common.wire.local_fields import (
    GroupNamespaces,
    Incarnation,
    LookupMs,
)
from kvbm_common.wire.session_hint import SessionHint

MISSES_MAX = 1_024
"""Lookups of one message; a step of a busy engine admits some tens."""
REGIONS_MAX = 16_384
"""Regions of one worker: 128 layers with as many tensors. More would delay the host tier's step."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    v: Literal[1] = VERSION  # type: ignore[assignment]


class Region(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Device memory of one worker: piece of block b = [address + b·stride, piece_bytes)."""

    address: Natural
    stride: Positive
    piece_bytes: Positive
    blocks: Positive


class Hello(_Message, frozen=True, kw_only=True):
    """An engine's worker (one per rank) or its scheduler half introduces itself.

    The host tier needs every rank's `agent` metadata and `regions` to pull blocks. The pieces of
    its regions, back to back, are what the rank's `share` says it holds of a block: layer after
    layer, and in a layer head group after head group. Without a share the block as stored is the
    pieces of rank 0, then those of rank 1, and so on.
    """

    engine: Token
    incarnation: Incarnation
    role: Literal["scheduler", "worker"]
    namespace: Namespace
    group_namespaces: GroupNamespaces = []
    """The namespaces of the model's other KV groups; `namespace` is the first group's."""
    rank: Natural = 0
    world_size: Positive = 1
    agent: bytes = b""
    regions: Annotated[list[Region], Meta(max_length=REGIONS_MAX)] = []
    pid: Natural = 0
    shards: Version = 0
    """The version of the shard map by which it comes here; 0: by the well-known endpoint."""
    verify: str = ""
    """The loads that this worker compares with their checksums: `always`, `sampled`, `never`."""
    share: Share | None = None
    """The parts of a block that this rank holds (`tier/parts.py`)."""

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """Return the namespaces of all KV groups, the first group's first."""
        return self.namespace, *self.group_namespaces

    @property
    def held_share(self) -> Share:
        """Return the parts that a worker holds, said or by its rank, which is below `world_size`;
        that is at most PARTS_MAX."""
        return self.share or share_of_rank(self.rank, self.world_size)


class Welcome(_Message, frozen=True, kw_only=True):
    """The host tier knows this worker. `agent` lets it pull from the arena."""

    host: Token
    instance: str
    epoch: Natural
    agent: bytes
    arena_address: Natural
    arena_path: str
    slot_bytes: Positive
    slot_count: Positive
    beat_ms: Positive
    """Say `Beat` at least this often, or everything you lease is taken back."""
    explains: bool = False
    """True if the host tier explains misses: tell it the `Outcome` of blocks that were not used."""
    traces: bool = False
    """True if the host tier passes spans on: give lookups a `trace`."""
    filter: Natural = 0
    """The generation of the miss filter beside its arena (`memory/miss_filter.py`), by which an
    engine may answer a lookup itself, and tell it by `Misses`; 0: no filter."""
    hints: bool = False
    """True if the host tier takes a `SessionHint`."""


class Refused(_Message, frozen=True, kw_only=True):
    """A message could not be served; `about` is its type."""

    about: str
    code: str
    message: str
    field: str = ""
    offer: Natural | None = None
    """The offer will not be pulled: its blocks need not be held."""


class Moved(_Message, frozen=True, kw_only=True):
    """Another host tier of this host serves this engine, by this version of the shard map.

    An attached half finishes what is under way, says `Bye` and introduces itself there.
    """

    endpoint: str
    version: Natural
    within_ms: Natural = 0
    """Grace period in which the sender answers as before; 0: it does not know this engine."""


class Beat(_Message, frozen=True, kw_only=True):
    """An engine is alive."""

    engine: Token
    incarnation: Incarnation


class Alive(_Message, frozen=True, kw_only=True):
    """The host tier's answer to a `Beat`: it is there, in this life."""

    epoch: Natural


class Bye(_Message, frozen=True, kw_only=True):
    """An engine leaves: its leases end, its offers are dropped."""

    engine: Token
    incarnation: Incarnation


class Lookup(_Message, frozen=True, kw_only=True):
    """The question how many of these blocks, from the first on, can be onboarded.

    The asker's lease ends `lease_ms` after it *sent* this, on its own clock. The answer comes once,
    within `deadline_ms`, with what was usable by then.
    """

    engine: Token
    incarnation: Incarnation
    lookup: Natural
    namespace: bytes
    """The 32-byte digest."""
    hashes: Annotated[bytes, Meta(max_length=HASH_BYTES * MATCH_BLOCKS_MAX)]
    """Packed, 16 bytes each, prefix first."""
    lease_ms: LookupMs
    deadline_ms: LookupMs
    request: str = ""
    """The engine's own name of the request, for people: a miss is explained under it."""
    content: bytes = b""
    """`identity.content_digest` of the first block's tokens, where these hashes begin a sequence:
    shows that a miss is one of salt or namespace alone."""
    avoided: Count = 0
    """Blocks after these that are not asked for: hits with them need one that failed to load."""
    trace: str = ""
    """A `traceparent` (W3C Trace Context) whose span is this onboard; empty: not traced."""
    sent_us: Natural = 0
    """With a trace: when the onboard began, wall clock."""
    parent: str = ""
    """With a trace: the `traceparent` of the engine's own span, if it has one."""
    groups: Annotated[list[GroupRun], Meta(max_length=GROUPS_MAX)] = []
    """The cut of `hashes` into KV groups, if the model has several. The answer is the largest
    boundary at which every group has what a hit needs."""
    prefill: PrefillCost | None = None
    """The engine's time to compute the blocks instead, as far as it was measured."""
    only_asks: bool = False
    """True if the blocks are not wanted yet. Those here or below are told by `usable`, and neither
    leased nor brought. The lookup counts for no hit rate, and is not explained."""


class Outcome(_Message, frozen=True, kw_only=True):
    """Blocks that were found for a request and not used, or not even asked for: why.

    Said once per lookup at most, and only to who `explains`. Nothing is decided by it.
    """

    engine: Token
    incarnation: Incarnation
    request: str
    lookup: Natural = 0
    """0: none was sent."""
    reason: str
    blocks: Count


class MissedLookup(msgspec.Struct, frozen=True, kw_only=True):
    """A lookup that was not sent, since it would have found nothing: fields as in `Lookup`."""

    lookup: Natural
    hashes: Annotated[bytes, Meta(max_length=HASH_BYTES * MATCH_BLOCKS_MAX)]
    request: str = ""
    content: bytes = b""
    avoided: Count = 0
    trace: str = ""
    sent_us: Natural = 0
    parent: str = ""
    groups: Annotated[list[GroupRun], Meta(max_length=GROUPS_MAX)] = []


class Misses(_Message, frozen=True, kw_only=True):
    """Lookups that the miss filter has answered, so that they are counted and explained.

    Said only to a host tier whose `Welcome` names a filter. Nothing is decided by it, and there is
    no answer.
    """

    engine: Token
    incarnation: Incarnation
    namespace: bytes
    """The 32-byte digest, as in `Lookup`."""
    lookups: Annotated[list[MissedLookup], Meta(max_length=MISSES_MAX)]
    in_vain: Count = 0
    """Lookups since the last time for which the filter gave hope, and that found nothing."""


class Found(_Message, frozen=True, kw_only=True):
    """The longest usable run, leased: block i is in arena slot `slots[i]`.

    `disk_blocks` of the run came from disk just now, `remote_blocks` from another host,
    `object_blocks` from the object store. `reason` says why the run is not longer (`""` when all
    was found).
    """

    lookup: Natural
    epoch: Natural
    lease: Natural
    """0 when nothing was found."""
    slots: list[Natural]
    checksums: list[int]
    block_bytes: Natural
    disk_blocks: list[Natural] = []
    """Indices in the run."""
    remote_blocks: list[Natural] = []
    reason: str = ""
    object_blocks: list[Natural] = []
    part_checksums: list[int] = []
    """A former release's checksums of parts: neither sent nor read."""
    boundary: Natural = 0
    """The tokens of the hit, in a lookup with groups. `slots` are those of the blocks that it needs
    (`tier/kv_groups.py`), group after group."""
    shared: Natural = 0
    """The tokens up to which every group that needs all blocks has them, in a lookup with groups.
    After `boundary`, blocks of other groups are missing: prompts part here."""
    usable: Natural = 0
    """Blocks from the first on that can be had, of a lookup that only asks."""
    part_sums: bytes = b""
    """The packed checksums of each block's parts (8 bytes each, little-endian), block after block.
    Empty where blocks have one part, whose checksum is in `checksums`."""


class Release(_Message, frozen=True, kw_only=True):
    """The holder is done with a lease. `corrupt` lists run indices whose bytes were wrong."""

    engine: Token
    incarnation: Incarnation
    lease: Natural
    corrupt: Annotated[list[Natural], Meta(max_length=MATCH_BLOCKS_MAX)] = []


class Pulled(_Message, frozen=True, kw_only=True):
    """An offer is over as far as the pull goes: the device blocks may be freed.

    When `confirm` is set, the host tier waits for a `Confirm` before it commits `pulled` blocks.
    """

    offer: Natural
    pulled: Natural
    skipped: Natural
    """Blocks that were there already."""
    failed: Natural = 0
    reason: str = ""
    confirm: bool = True


class Confirm(_Message, frozen=True, kw_only=True):
    """The answer to `Pulled`: whether the offer's device blocks were held until it arrived."""

    engine: Token
    incarnation: Incarnation
    offer: Natural
    held: bool


ToHostTier = Hello | Beat | Bye | Lookup | Release | Confirm | Outcome | Misses | SessionHint
FromHostTier = Welcome | Alive | Refused | Found | Pulled | Moved

to_host_tier: MsgpackCodec[ToHostTier] = MsgpackCodec(ToHostTier)
from_host_tier: MsgpackCodec[FromHostTier] = MsgpackCodec(FromHostTier)
