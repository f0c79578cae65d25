"""Messages of the index's core: its inputs and its effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbm_common.wire.events import Event, Tier

from kvbm_index.core.event_decoder import DecodedEvent
from kvbm_index.core.image import SOURCES_MAX, Image
from kvbm_index.core.packed_batch import PackedPart
from kvbm_index.core.snapshot_loader import SnapshotLoader


class SourceKey(NamedTuple):
    """One source of events: a tier instance, or an engine."""

    host: str
    source: str


class Holder(NamedTuple):
    """A holder of blocks: one tier, rank and KV group of a source."""

    host: str
    source: str
    tier: Tier
    rank: int
    group: int


AnyEvent = Event | DecodedEvent
"""The service passes events decoded in part; those of the wire are taken as well."""
Received = AnyEvent | PackedPart
"""An event, or many in a row."""

# ---- inputs ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EventsReceived:
    """Events in the order of the stream."""

    events: tuple[Received, ...]
    position: int = 0
    """The position in the stream after them; 0: not said."""
    stream: str = ""
    """The identity of that stream: the time at which it was made."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The image that another replica stored. If there is one, it is the first input."""

    image: Image


@dataclass(frozen=True, slots=True)
class SnapshotReceived:
    """The snapshot that a source was asked for has arrived."""

    loader: SnapshotLoader


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """A source could not be asked, or did not answer in time."""

    key: SourceKey


@dataclass(frozen=True, slots=True)
class SourceJoined:
    """The registry has an entry of a source, of this life."""

    key: SourceKey
    epoch: int


@dataclass(frozen=True, slots=True)
class SourceLeft:
    """The entry of this life is gone: what it held is gone too."""

    key: SourceKey
    epoch: int


@dataclass(frozen=True, slots=True)
class RegistryRead:
    """Every source that the registry has was seen; others may be taken for dead from now on."""


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The stream is another one: events may be missing at its end, where no gap shows it."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines are looked at."""


Input = (
    EventsReceived
    | Restored
    | SnapshotReceived
    | SnapshotFailed
    | SourceJoined
    | SourceLeft
    | RegistryRead
    | StreamLost
    | Tick
)

# ---- effects ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Ask a source what it holds. Ends in SnapshotReceived or SnapshotFailed."""

    key: SourceKey


Effect = RequestSnapshot

# ---- limits and figures ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of the core."""

    sources_max: int = SOURCES_MAX
    """Hosts times services on each."""
    buffer_events_max: int = 10_000
    """Events per source that wait for a snapshot: seconds of a very busy one."""
    snapshots_max: int = 8
    """Snapshots in flight at the same time; each may have megabytes."""
    snapshot_deadline_ms: int = 10_000
    """The shell answers earlier; this is the fuse."""
    tidied_per_tick: int = 1_024
    """Blocks that one tick lists or forgets, of those that wait for it. Queries wait meanwhile: few
    and often, about a millisecond of every ten."""
    look_every_ms: int = 0
    """The time from one check of all sources' deadlines to the next; 0: at every tick."""
    retry_ms: int = 200
    retry_max_ms: int = 5_000
    settle_ms: int = 500
    """A registered source without an event so far is asked for a snapshot after this."""
    unregistered_ms: int = 5_000
    """A source that publishes but has no entry in the registry for so long is dead."""
    gone_ms: int = 60_000
    """The time for which a source that has left is remembered, so that its late events are known as
    such."""

    def __post_init__(self) -> None:
        """Assert that nothing waits without end for a bound of zero."""
        assert self.gone_ms > 0, self
        assert min(self.sources_max, self.buffer_events_max, self.snapshots_max) > 0, self
        assert self.snapshot_deadline_ms > 0, self
        assert 0 < self.retry_ms <= self.retry_max_ms, self
        assert min(self.tidied_per_tick, self.look_every_ms, self.settle_ms) >= 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Figures of the core, for the shell's counters."""

    sources: int
    sources_behind: int
    holders: int
    blocks: int
    """Over all holders: a block that two hold counts twice."""
    buffered_events: int
    snapshots_in_flight: int
    events: int
    snapshots: int
    lower_epochs: int = 0
    """Lives that began with a lower epoch than the one before, because the registry names them."""
    drops: Mapping[str, int] = field(default_factory=dict)
    """Reason → the number of drops."""
    buffered_most: int = 0
    """Events that wait after a gap of one source: the most of all."""

    def __post_init__(self) -> None:
        """Assert that no figure is negative."""
        assert 0 <= self.sources_behind <= self.sources, self
        assert min(self.holders, self.buffered_events, self.snapshots_in_flight) >= 0, self
        assert self.holders <= self.blocks, f"a holder without blocks: {self}"


@dataclass(frozen=True, slots=True)
class IndexView:
    """The part of the core that its shell reads between two steps, apart from questions."""

    statistics: Statistics
    position: int
    """The position in the stream after the last events; 0 when it is not known."""
    positions: Mapping[SourceKey, tuple[int, int]]
    """Source → (epoch, seq) applied, of all sources that are not gone."""
