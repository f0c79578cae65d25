"""Messages of the host tier's core: its inputs (`Input`) and its effects (`Effect`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbm_common.tier.parts import Share
from kvbm_common.wire.admin import PrefetchReply, PrefetchRequest, TierReply, TierRequest
from kvbm_common.wire.events import Event, Tier
from kvbm_common.wire.explain import FatesReply, FatesRequest
from kvbm_common.wire.local import FromHostTier, Region, ToHostTier
from kvbm_common.wire.verbs import (
    ErrorBody,
    FillReply,
    FillRequest,
    Hits,
    LeaseReply,
    LeaseRequest,
    Offer,
    ReleaseReply,
    ReleaseRequest,
)

from kvbm_host_tier.core.filter_messages import FilterEffect, FilterFailed
from kvbm_host_tier.core.lower_snapshot import LowerSnapshot
from kvbm_host_tier.core.peer_messages import PeerEffect, PeerInput
from kvbm_host_tier.core.scrub_messages import ScrubEffect, ScrubInput
from kvbm_host_tier.core.shard_map import ShardEffect, ShardInput


@dataclass(frozen=True, slots=True)
class EngineId:
    """One life of one engine."""

    engine: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.engine}:{self.incarnation}"


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """The place of the arena. `agent` is the NIXL metadata through which others read it."""

    path: str
    address: int
    capacity_bytes: int
    agent: bytes = b""


NO_ARENA = ArenaInfo("", 0, 0)
"""Before the first engine, when the arena's size is a number of blocks."""


# --- inputs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromEngine:
    """A message from a connector; `connection` is where an answer goes."""

    connection: bytes
    message: ToHostTier


@dataclass(frozen=True, slots=True)
class OfferReceived:
    """An engine holds device blocks for us to pull."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class PeerAttached:
    """NIXL knows the worker under the name `peer` from now on."""

    engine: EngineId
    rank: int
    peer: str


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """NIXL refused the worker's metadata."""

    engine: EngineId
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class PullDone:
    """The bytes of every rank are in the slots.

    `sums` has, for each slot, the packed checksums of the block's parts.
    """

    pull: int
    sums: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PullFailed:
    """The pull did not succeed. Unless `settled`, late bytes may still land in the slots."""

    pull: int
    reason: str
    settled: bool


@dataclass(frozen=True, slots=True)
class PullSettled:
    """The last late byte of a failed pull has landed: its slots are free."""

    pull: int


@dataclass(frozen=True, slots=True)
class LowerTierEvent:
    """A lower tier of this host announced something; `instance` answers fills for its blocks."""

    instance: str
    event: Event
    tier: Tier = "disk"


@dataclass(frozen=True, slots=True)
class LowerTierJoined:
    """A lower tier of this host has joined, or the registry names it again, perhaps in another
    life."""

    instance: str
    tier: Tier = "disk"
    epoch: int = 0
    """The life that the registry names; 0: it is not known."""


@dataclass(frozen=True, slots=True)
class LowerTierLeft:
    """A lower tier of this host has left, or died."""

    instance: str
    tier: Tier = "disk"
    epoch: int = 0
    """The life that has ended, as the registry says."""


@dataclass(frozen=True, slots=True)
class LowerEventsLost:
    """Events of lower tiers may be lost, and leave no gap: the stream dropped some, or is new."""


@dataclass(frozen=True, slots=True)
class LowerTierSnapshot:
    """The blocks that a lower tier holds; None: it did not answer."""

    instance: str
    snapshot: LowerSnapshot | None
    tier: Tier = "disk"


@dataclass(frozen=True, slots=True)
class FillDone:
    """A lower tier has answered a fill."""

    fill: int
    reply: FillReply


@dataclass(frozen=True, slots=True)
class FillFailed:
    """A fill got no answer. Unless `settled`, the lower tier may still read into the slots."""

    fill: int
    reason: str
    settled: bool


@dataclass(frozen=True, slots=True)
class ArenaMade:
    """The arena that was asked for is there."""

    arena: ArenaInfo


@dataclass(frozen=True, slots=True)
class ArenaRefused:
    """There is no room for it."""

    reason: str
    left: ArenaInfo = NO_ARENA
    """The arena that was to be replaced, if it is still there."""


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """Another process (the disk tier) wants to copy host blocks away."""

    reply_to: int
    request: LeaseRequest


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    """… and is done with it."""

    reply_to: int
    request: ReleaseRequest


@dataclass(frozen=True, slots=True)
class AdminAsked:
    """An operator wants to know or to change something."""

    reply_to: int
    verb: str
    request: TierRequest | PrefetchRequest


@dataclass(frozen=True, slots=True)
class DeparturesTold:
    """A lower tier's answer about missed blocks; None: it has not answered."""

    question: int
    instance: str
    reply: FatesReply | None
    tier: Tier = "disk"


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines are looked at."""


LowerInput = LowerTierEvent | LowerTierJoined | LowerTierLeft | LowerTierSnapshot
Input = (
    ArenaMade
    | ArenaRefused
    | FromEngine
    | OfferReceived
    | PeerAttached
    | PeerFailed
    | PullDone
    | PullFailed
    | PullSettled
    | LowerInput
    | LowerEventsLost
    | FillDone
    | FillFailed
    | LeaseAsked
    | ReleaseAsked
    | AdminAsked
    | DeparturesTold
    | FilterFailed
    | PeerInput
    | ScrubInput
    | ShardInput
    | Tick
)


# --- effects --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MakeArena:
    """Make an arena of this size; no engine has seen one before."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class ToEngine:
    """Send a message to a connector."""

    connection: bytes
    message: FromHostTier


@dataclass(frozen=True, slots=True)
class AttachPeer:
    """Make a worker's memory reachable; ends in PeerAttached or PeerFailed."""

    engine: EngineId
    rank: int
    agent: bytes


@dataclass(frozen=True, slots=True)
class DetachPeer:
    """Forget a worker's memory."""

    peer: str


@dataclass(frozen=True, slots=True)
class PullPart:
    """One rank's part in a pull: its pieces go where its share is in every slot."""

    peer: str
    regions: tuple[Region, ...]
    share: Share


@dataclass(frozen=True, slots=True)
class StartPull:
    """Read device block `blocks[i]` of these ranks into slot `slots[i]`, then sum it up.

    Together the ranks hold every part of a block once.

    Slots are named by their places, here and in all that leaves the core. Ends in PullDone or
    PullFailed within `deadline_ms` from now.
    """

    pull: int
    parts: tuple[PullPart, ...]
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    block_bytes: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class AskFill:
    """Ask a disk tier to read blocks into staged slots; ends in FillDone or FillFailed."""

    fill: int
    instance: str
    request: FillRequest
    tier: Tier = "disk"


@dataclass(frozen=True, slots=True)
class AskLowerTierSnapshot:
    """Ask a lower tier what it holds; ends in LowerTierSnapshot."""

    instance: str
    tier: Tier = "disk"


@dataclass(frozen=True, slots=True)
class AskDepartures:
    """Ask a lower tier what became of blocks; ends in DeparturesTold."""

    question: int
    instance: str
    request: FatesRequest
    tier: Tier = "disk"


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a request of a verb."""

    reply_to: int
    reply: LeaseReply | ReleaseReply | TierReply | PrefetchReply | ErrorBody


@dataclass(frozen=True, slots=True)
class Publish:
    """Announce an event, in this order."""

    event: Event


@dataclass(frozen=True, slots=True)
class TellHits:
    """Tell the disk tier what was asked for again."""

    hits: Hits


Effect = (
    MakeArena
    | ToEngine
    | AttachPeer
    | DetachPeer
    | StartPull
    | AskFill
    | AskLowerTierSnapshot
    | AskDepartures
    | Answer
    | Publish
    | TellHits
    | PeerEffect
    | ScrubEffect
    | ShardEffect
    | FilterEffect
)

Emit = Callable[[Effect], None]
"""Have the shell carry out an effect after this step: the one way in which effects leave a core."""
