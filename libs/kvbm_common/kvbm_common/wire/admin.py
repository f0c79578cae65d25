"""Verbs of operators: what a tier knows of one block, and changes to what it holds.

Their messages; `operator_verbs` has their table. Every change names its `actor` and is written to
the audit stream by the service that carries it out, with its outcome. A change of many blocks is
made in steps: a reply with `more` wants to be asked again, so that no step of a core takes long and
a client can stop between two.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvbm_common.wire import VERSION
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.events import Hex128, HexDigest, Natural, Token
from kvbm_common.wire.index_verbs import MATCH_BLOCKS_MAX

AUDIT_SUBJECT_PREFIX = "kvbm.v1.audit"
STEP_BLOCKS_MAX = 4_096
"""Blocks that one request may name, and that one step of a core removes: about 10 ms."""
PIN_TTL_MS_MAX = 7 * 24 * 3600 * 1000
"""A pin ends by itself within a week: the slots of a forgotten one come free."""

PREFETCH_DEADLINE_MS_MAX = 4_000
"""For one request, which is answered within the deadline of a verb; who wants more asks again."""

LogLevel = Literal["debug", "info", "warning", "error"]
Hashes = Annotated[list[str], Meta(min_length=1, max_length=STEP_BLOCKS_MAX)]
Actor = Annotated[str, Meta(max_length=128)]


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    v: Literal[1] = VERSION  # type: ignore[assignment]


class _Change(_Message, frozen=True, kw_only=True):
    actor: Actor = ""
    """The person who asks, for the audit stream; no right follows from it."""


# --- one block ------------------------------------------------------------------------------


class BlockRequest(_Message, frozen=True, kw_only=True):
    """The request for all that a service knows of a block."""

    hash: Hex128


class BlockLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that holds the block now."""

    id: Natural
    owner: str
    reason: str
    left_ms: int


class BlockEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to the block."""

    ago_ms: Natural
    what: str


class BlockReply(_Message, frozen=True, kw_only=True):
    """A block in one tier. When `held` is false there is at most a story, oldest entry first."""

    held: bool
    slot: Natural = 0
    bytes: Natural = 0
    checksum: int = 0
    parent: Hex128 = "0" * 32
    namespace: HexDigest = "0" * 64
    pins: Natural = 0
    leases: list[BlockLease] = []
    story: list[BlockEntry] = []
    part_count: Annotated[int, Meta(ge=1)] = 1
    """The number of parts of equal size that the block has: ranges of layers, by groups of
    heads."""
    part_checksums: list[int] = []
    """The xxh3-64 of each part; empty: it has one, or this tier keeps only how it is cut."""


# --- changes --------------------------------------------------------------------------------


class RemoveRequest(_Change, frozen=True, kw_only=True):
    """Remove committed blocks: exactly one of hashes, prefix, namespace and everything.

    The verb `evict` leaves those that are being read; `reset` makes these, too, unfindable at once
    (a read under a lease ends undisturbed). What is on its way in is not touched.
    """

    hashes: Hashes | None = None
    prefix: Hex128 | None = None
    """Select this block and all after it, as far as this tier has the chain without a hole."""
    namespace: HexDigest | None = None
    everything: bool = False
    job: Annotated[str, Meta(max_length=64)] = ""
    """The job that asks: a fresh name for each reset, one for all its questions. It waits for the
    deletes that a bucket has not answered at the first of them, and for its own. Without a name a
    reset waits for its own alone."""


class RemoveReply(_Message, frozen=True, kw_only=True):
    """`kept`: in use, so not evicted. With `more`, the same request goes on, also if nothing was
    removed yet: a tier of many blocks is looked through in steps."""

    removed: Natural
    kept: Natural = 0
    missing: list[str] = []
    """Named blocks that are not here."""
    more: bool = False


class PinRequest(_Change, frozen=True, kw_only=True):
    """Keep these blocks from eviction for a while, counted from the arrival of the request."""

    hashes: Hashes
    ttl_ms: Annotated[int, Meta(ge=1, le=PIN_TTL_MS_MAX)]


class PinReply(_Message, frozen=True, kw_only=True):
    """The pin's id in this life of the instance; 0 when nothing of it is here."""

    pin: Natural
    pinned: Natural
    missing: list[str] = []


class UnpinRequest(_Change, frozen=True, kw_only=True):
    """End a pin before its deadline."""

    pin: Annotated[int, Meta(ge=1, le=2**63 - 1)]


class UnpinReply(_Message, frozen=True, kw_only=True):
    """`ended` is false when there is no such pin (any more)."""

    ended: bool


class PinsRequest(_Message, frozen=True, kw_only=True):
    """The request for the list of pins."""


class PinEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One pin of a tier."""

    pin: Natural
    owner: str
    blocks: Natural
    left_ms: int


class PinsReply(_Message, frozen=True, kw_only=True):
    """All pins, the oldest first."""

    pins: list[PinEntry]


class DrainRequest(_Change, frozen=True, kw_only=True):
    """Take no new blocks (verb `drain`), or take them again (`undrain`). Reads go on."""


class DrainReply(_Message, frozen=True, kw_only=True):
    """The state from now on, and the one before."""

    draining: bool
    was: bool


class PrefetchRequest(_Change, frozen=True, kw_only=True):
    """Bring the leading blocks of a run into host memory, from wherever this host can read them."""

    hashes: Annotated[list[str], Meta(min_length=1, max_length=MATCH_BLOCKS_MAX)]
    """Prefix first, each once: the whole run, also what is here."""
    deadline_ms: Annotated[int, Meta(ge=1, le=PREFETCH_DEADLINE_MS_MAX)]


class PrefetchReply(_Message, frozen=True, kw_only=True):
    """The blocks, from the first on, that are in host memory; `filled` of them were brought now."""

    blocks: Natural
    filled: Natural
    reason: str = ""
    """The reason why the run ends before its last block; empty when it does not."""


class ResizeRequest(_Change, frozen=True, kw_only=True):
    """Use so many slots of the medium, until the process ends or the medium is cut again.

    Fewer: empty slots go out of use first, then blocks are evicted for it. What is pinned or on its
    way in stays; who still wants it smaller asks again.
    """

    slots: Annotated[int, Meta(ge=1, le=2**40)]
    goes_on: bool = False
    """True if the request asks for the next steps of the same resize. It is refused as `superseded`
    when a newer resize has another goal."""


class ResizeReply(_Message, frozen=True, kw_only=True):
    """The slots that may be used now and before, and all that there are. With `more`, the request
    has not ended: send it again, with `goes_on`."""

    slots: Natural
    was: Natural
    capacity: Natural
    evicted: Natural = 0
    more: bool = False


class PolicyRequest(_Change, frozen=True, kw_only=True):
    """Choose victims by this eviction policy from now on; what the tier holds stays."""

    policy: Annotated[str, Meta(max_length=32)]


class PolicyReply(_Message, frozen=True, kw_only=True):
    """The policy from now on, and the one before."""

    policy: str
    was: str


class FilterRequest(_Change, frozen=True, kw_only=True):
    """Change the frequency filter of a lower tier; what is not named stays."""

    enabled: bool | None = None
    pass_count: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """A block passes from this count on: 1 when it is new, doubled with each sight."""
    decay_ms: Annotated[int, Meta(ge=1_000, le=7 * 24 * 3600 * 1000)] | None = None
    """A count loses 1 with each such time since the last sight."""


class FilterReply(_Message, frozen=True, kw_only=True):
    """The filter's settings from now on; `entries`: blocks that are counted."""

    enabled: bool
    pass_count: Natural
    decay_ms: Natural
    entries: Natural


class LogLevelRequest(_Change, frozen=True, kw_only=True):
    """Write log lines from this level on, until the process ends."""

    level: LogLevel


class LogLevelReply(_Message, frozen=True, kw_only=True):
    """The level that held before."""

    was: str


class ForgetRequest(_Change, frozen=True, kw_only=True):
    """Forget the lost services of a host that is gone for good. One that answers is refused."""

    lost_host: Token


class ForgetReply(_Message, frozen=True, kw_only=True):
    """`forgotten`: the lost services that this metrics service has remembered until now."""

    forgotten: Natural


class Audited(_Message, frozen=True, kw_only=True):
    """A change that an operator has asked for, on `kvbm.v1.audit.<kind>.<host>.<instance>`."""

    ts_ms: Natural
    kind: str
    host: Token
    instance: str
    verb: str
    actor: str
    request: str
    """The request as it came, cut after 4,096 characters."""
    outcome: Annotated[str, Meta(description="`ok`, or the code of the error.")]
    reply: str = ""
    """The reply, cut likewise; of an error its text."""


TierRequest = (
    BlockRequest | RemoveRequest | PinRequest | UnpinRequest | PinsRequest | DrainRequest
    | ResizeRequest | PolicyRequest
)  # fmt: skip
"""The requests that every tier answers (`kvbm_common.tier.admin`)."""
TierReply = (
    BlockReply | RemoveReply | PinReply | UnpinReply | PinsReply | DrainReply
    | ResizeReply | PolicyReply
)  # fmt: skip

audit_codec: JsonCodec[Audited] = JsonCodec(Audited)


def audit_subject(kind: str, host: str, instance: str) -> str:
    """Return the subject on which the changes of one instance are written."""
    return f"{AUDIT_SUBJECT_PREFIX}.{kind}.{host}.{instance}"
