"""Messages: the inputs and effects of the consolidator's core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbm_common.wire.consolidator import Attach, Attached
from kvbm_common.wire.engine_events import EngineBatch
from kvbm_common.wire.events import Event, Tier
from kvbm_common.wire.local import Refused
from kvbm_common.wire.raw_events import RawEvent
from kvbm_common.wire.verbs import SnapshotReply

from kvbm_connectors.consolidator.core.batch_merger import Draft
from kvbm_connectors.consolidator.core.router_stream import Frame
from kvbm_connectors.consolidator.core.token_names import NamedBlocks


class StreamKey(NamedTuple):
    """One event stream: one data-parallel rank of one life of an engine."""

    engine: str
    incarnation: str
    rank: int


# ---- inputs ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamAttached:
    """A connector asks to follow its engine. `peer` is where the answer goes."""

    attach: Attach
    peer: bytes = b""


@dataclass(frozen=True, slots=True)
class EngineDetached:
    """An engine says that it ends."""

    engine: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class EngineLeft:
    """An engine's place in the registry was taken by another life of it, elsewhere."""

    engine: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class BeatReceived:
    """A connector says that its engine lives, and hears whether we know it."""

    engine: str
    incarnation: str
    peer: bytes


@dataclass(frozen=True, slots=True)
class EpochGranted:
    """The registry has numbered an engine's life."""

    engine: str
    ask: int
    """The number of the AskEpoch that this answers."""
    epoch: int


@dataclass(frozen=True, slots=True)
class EpochFailed:
    """The registry could not be reached; the core asks again."""

    engine: str
    ask: int


@dataclass(frozen=True, slots=True)
class EngineBatchesReceived:
    """Batches of a stream: what they change is announced together.

    `replay` is the number of the replay that they belong to, 0 when live.
    """

    key: StreamKey
    batches: tuple[tuple[int, EngineBatch], ...]
    """(seq, batch) in the order of arrival; at least one."""
    replay: int = 0


@dataclass(frozen=True, slots=True)
class ReplayDone:
    """The engine has sent all that it still had."""

    key: StreamKey
    replay: int


@dataclass(frozen=True, slots=True)
class ReplayFailed:
    """The engine did not answer in time."""

    key: StreamKey
    replay: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines are looked at."""

    offers_open: bool = True
    """True if offers can be put on the bus now."""


@dataclass(frozen=True, slots=True)
class TierJoined:
    """The registry names a tier of this host."""

    source: str
    tier: Tier
    epoch: int


@dataclass(frozen=True, slots=True)
class TierLeft:
    """A tier's place in the registry is gone."""

    source: str
    epoch: int


@dataclass(frozen=True, slots=True)
class TierEvents:
    """Events of tiers of this host, as the bus brought them."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """All that a tier holds."""

    reply: SnapshotReply


@dataclass(frozen=True, slots=True)
class TierSnapshotFailed:
    """A tier has not said what it holds."""

    source: str


@dataclass(frozen=True, slots=True)
class TierStreamLost:
    """The bus has lost events of a tier."""

    source: str


@dataclass(frozen=True, slots=True)
class RouterAsked:
    """A router asks the port of a rank for everything from a number on."""

    rank: int
    from_seq: int
    peer: bytes


@dataclass(frozen=True, slots=True)
class RouterJoined:
    """A router has begun to listen on the port of a rank, to topics that begin like this."""

    rank: int
    topic: bytes


@dataclass(frozen=True, slots=True)
class GoOn:
    """The others have had their turn: GoOnLater is done."""


EngineInput = (
    StreamAttached
    | EngineDetached
    | EngineLeft
    | BeatReceived
    | EpochGranted
    | EpochFailed
    | EngineBatchesReceived
    | ReplayDone
    | ReplayFailed
    | Tick
)
"""Inputs of `EnginesCore`, the engines' half of the core."""
TierInput = TierJoined | TierLeft | TierEvents | TierSnapshot | TierSnapshotFailed | TierStreamLost
Input = EngineInput | TierInput | RouterAsked | RouterJoined | GoOn

# ---- effects ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Publish:
    """Put an event on the bus. A `ts_ms` of 0 is the shell's to fill."""

    event: RawEvent
    draft: Draft
    """The draft that the event was made of."""


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Follow an engine's PUB."""

    key: StreamKey
    endpoint: str
    topic: str


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Stop following an event stream."""

    key: StreamKey


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask an engine for everything from `from_seq` on. Ends in ReplayDone or ReplayFailed."""

    key: StreamKey
    endpoint: str
    from_seq: int
    replay: int


GroupNamespace = tuple[int, str]
"""A KV group and its namespace, as a digest in hex."""


@dataclass(frozen=True, slots=True)
class AskEpoch:
    """Register an engine's life. Ends in EpochGranted or EpochFailed."""

    ask: int
    """Counts up: a life may end with a question in flight, and its engine come again at once."""
    engine: str
    incarnation: str
    ranks: tuple[int, ...]
    namespaces: tuple[str, ...]
    """The namespaces of first KV groups, as digests in hex."""
    groups: tuple[GroupNamespace, ...]


@dataclass(frozen=True, slots=True)
class Describe:
    """Renew what the registry says about an engine."""

    engine: str
    incarnation: str
    ranks: tuple[int, ...]
    namespaces: tuple[str, ...]
    groups: tuple[GroupNamespace, ...]


@dataclass(frozen=True, slots=True)
class RevokeEpoch:
    """An engine's life is over: take it out of the registry."""

    engine: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Send an answer to a connector."""

    peer: bytes
    message: Attached | Refused


@dataclass(frozen=True, slots=True)
class Learn:
    """An engine has said what is in some blocks."""

    named: NamedBlocks


@dataclass(frozen=True, slots=True)
class PublishMerged:
    """Put an event on the merged stream. A `ts_ms` of 0 is the shell's to fill."""

    event: RawEvent


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send a batch to all subscribers on the port of its rank."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class AnswerRouter:
    """Send a router what it has missed, then the end."""

    rank: int
    peer: bytes
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Ask a tier what it holds. Ends in TierSnapshot or TierSnapshotFailed."""

    source: str


@dataclass(frozen=True, slots=True)
class GoOnLater:
    """Let others have their turn: blocks of tiers are still to be read or sent. Ends in GoOn."""


EngineEffect = (
    Publish
    | Subscribe
    | Unsubscribe
    | RequestReplay
    | AskEpoch
    | Describe
    | RevokeEpoch
    | Reply
    | Learn
)
"""Effects of `EnginesCore`, the engines' half of the core; `Learn` stays inside the core."""
Effect = EngineEffect | PublishMerged | Broadcast | AnswerRouter | AskSnapshot | GoOnLater

# ---- limits and figures ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidatorLimits:
    """The bounds of the core. Sizes are per stream."""

    lost_after_ms: int = 5_000
    """An engine that neither beats nor publishes for so long is lost."""
    epoch_retry_ms: int = 500
    streams_max: int = 1_024
    """Engines on one host times ranks: far below."""
    pending_batches_max: int = 10_000
    """Batches that wait after a gap; vLLM's own replay buffer has as many."""
    orphan_blocks_max: int = 16_384
    """Blocks whose parent is unknown."""
    orphan_age_ms: int = 2_000
    """A parent that comes at all comes within a step or two of the engine."""
    probe_after_ms: int = 1_000
    """A stream that falls silent is asked whether we missed its last batch, then less and less
    often. It costs one small message each way."""
    probe_every_max_ms: int = 16_000
    tier_blocks_max: int = 512
    """Blocks of tiers that one step reads of a snapshot, or tells of: some 5 µs each, by rank."""
    naming: bool = False
    """True if what engines say of their blocks is kept, for routers."""
    replay_attempts_max: int = 3
    replay_retry_ms: int = 500

    def __post_init__(self) -> None:
        """Assert that nothing waits without end for a bound of zero."""
        assert min(self.lost_after_ms, self.epoch_retry_ms, self.replay_retry_ms) > 0, self
        assert min(self.streams_max, self.pending_batches_max, self.replay_attempts_max) > 0, self
        assert 0 < self.probe_after_ms <= self.probe_every_max_ms, self
        assert min(self.orphan_blocks_max, self.orphan_age_ms) >= 0, self
        assert self.tier_blocks_max > 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesStatistics:
    """Figures of the core, for the shell's counters."""

    engines: int
    streams: int
    passing_through: int
    """Streams of engines that compute without a cache."""
    blocks: int
    """Device blocks held, over all engines, ranks and groups; equal content counts once each."""
    pending_batches: int
    orphan_blocks: int
    batches: int
    published: int
    replays: int
    drops: Mapping[str, int] = field(default_factory=dict)
    """Reason → the number of drops."""
    pending_most: int = 0
    orphan_most: int = 0
    """Batches and blocks that wait in one stream: the most of all."""
