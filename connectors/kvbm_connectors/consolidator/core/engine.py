"""An engine as the consolidator knows it, and drafts of its events with their numbers on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import assert_never

from kvbm_common.tier.machine import Machine
from kvbm_common.wire.consolidator import Attach
from kvbm_common.wire.events import (
    TIER_SOURCES,
    Cleared,
    EventHead,
)
from kvbm_common.wire.local import Refused
from kvbm_common.wire.raw_events import RawEvent, RawRemoved, RawStored
from kvbm_common.wire.tier_stats import WorkerStats

from kvbm_connectors.consolidator.core.batch_merger import (
    ClearedDraft,
    Draft,
    RemovedDraft,
    StoredDraft,
)
from kvbm_connectors.consolidator.core.messages import GroupNamespace
from kvbm_connectors.consolidator.core.rank import Rank

Facts = tuple[str, str, tuple[int, ...], tuple[str, ...], tuple[GroupNamespace, ...]]


class EngineState(Enum):
    """The state of an engine in the registry."""

    UNREGISTERED = auto()
    ASKING = auto()
    """An AskEpoch is in flight."""
    REGISTERED = auto()
    """The engine has an epoch: its events are published."""


ENGINE = Machine(
    "consolidated engine",
    {
        (None, "joined"): EngineState.UNREGISTERED,
        (EngineState.UNREGISTERED, "asked"): EngineState.ASKING,
        (EngineState.ASKING, "granted"): EngineState.REGISTERED,
        (EngineState.ASKING, "failed"): EngineState.UNREGISTERED,
        (EngineState.UNREGISTERED, "restarted"): EngineState.UNREGISTERED,
        (EngineState.ASKING, "restarted"): EngineState.ASKING,
        (EngineState.REGISTERED, "restarted"): EngineState.UNREGISTERED,
        **{(state, "left"): None for state in EngineState},
    },
)


@dataclass(slots=True)
class Engine:
    """One life of an engine: a source of events."""

    name: str
    incarnation: str
    seen_ms: int
    ranks: dict[int, Rank] = field(default_factory=dict)
    epoch: int = 0
    """0 until the registry has granted one."""
    seq: int = 0
    state: EngineState = field(default_factory=partial(ENGINE.next, None, "joined"))
    ask: int = 0
    """The number of the last AskEpoch."""
    ask_at_ms: int = 0
    told: Facts | None = None
    """The facts that the registry was given last; None: none yet."""

    def is_another(self, attach: Attach) -> bool:
        """Return whether this is another life, or the same life with facts that cannot change."""
        assert attach.engine == self.name, f"{attach.engine} is no life of {self.name}"
        rank = self.ranks.get(attach.rank)
        return self.incarnation != attach.incarnation or (
            rank is not None and not rank.continues(attach)
        )

    @property
    def is_settled(self) -> bool:
        """Tell whether the engine has an epoch, and no rank waits for events."""
        assert not self.epoch or self.state is EngineState.REGISTERED, f"{self.name}: {self.state}"
        return bool(self.epoch) and all(
            rank.sequencer.is_live and not rank.orphans for rank in self.ranks.values()
        )

    def should_ask(self, now_ms: int) -> bool:
        """Tell whether it is time to ask the registry for an epoch."""
        return self.state is EngineState.UNREGISTERED and now_ms >= self.ask_at_ms

    def awaits(self, ask: int) -> bool:
        """Tell whether the answer to this AskEpoch is waited for."""
        return self.state is EngineState.ASKING and self.ask == ask

    def asked(self, ask: int) -> None:
        """Note that the AskEpoch of this number is in flight."""
        assert not self.epoch, f"{self.name} has epoch {self.epoch} already"
        assert ask > self.ask, f"{self.name}: question {ask} follows {self.ask}"
        self._move("asked")
        self.ask = ask

    @property
    def facts(self) -> Facts:
        """The facts of the engine beside its blocks: name, life, ranks, namespaces, KV groups."""
        ranks = tuple(sorted(self.ranks))
        return self.name, self.incarnation, ranks, self.namespaces(), self.groups()

    def tell(self) -> Facts:
        """Return the facts for the registry, and keep them as what it knows."""
        assert self.ranks, f"{self.name} has no rank to tell of"
        self.told = self.facts
        return self.told

    def granted(self, epoch: int) -> None:
        """Take an epoch: events count from 1."""
        assert epoch > 0, f"{self.name}: no epoch"
        assert not self.epoch, f"{self.name} has epoch {self.epoch}, and gets {epoch}"
        self._move("granted")
        self.epoch, self.seq = epoch, 0

    def failed(self, ask_at_ms: int) -> None:
        """Ask again, not before a time: the registry has not answered."""
        self.ask_at_ms = ask_at_ms
        self._move("failed")

    def restarted(self) -> None:
        """Give up the epoch: the publisher has begun again."""
        self._move("restarted")
        self.epoch = self.seq = 0
        assert self.state is not EngineState.REGISTERED, f"{self.name} has no epoch any more"

    def leave(self) -> None:
        """End this life, in any state."""
        assert (self.epoch > 0) == (self.state is EngineState.REGISTERED), self.name
        ENGINE.end(self.state, "left", self.name)

    def _move(self, event: str) -> None:
        self.state = ENGINE.next(self.state, event, f"{self.name} {self.incarnation}")

    def namespaces(self) -> tuple[str, ...]:
        """Return the namespace digests of the first KV group of all ranks, in hex."""
        return tuple(sorted({rank.namespace_hex for rank in self.ranks.values()}))

    def groups(self) -> tuple[GroupNamespace, ...]:
        """Return the namespaces of all KV groups of all ranks."""
        said = {one for rank in self.ranks.values() for one in rank.namespaces}
        assert said, f"{self.name} has no KV group"
        return tuple(sorted((one.group, one.digest.hex()) for one in said))

    def passing_through(self, now_ms: int) -> list[WorkerStats]:
        """Return its ranks that compute without a cache, each with its reason."""
        return [
            WorkerStats(
                engine=self.name, incarnation=self.incarnation, rank=number, world_size=1,
                namespace=rank.attach.namespace, block_bytes=0, seen_ms_ago=now_ms - self.seen_ms,
                passes_through=rank.attach.passes_through,
            )
            for number, rank in self.ranks.items()
            if rank.attach.passes_through
        ]  # fmt: skip

    def check(self) -> None:
        """Assert every invariant, in O(n)."""
        assert self.ranks, f"{self.name} has no rank"
        assert (self.seq > 0) == (self.epoch > 0), f"{self.name}: an epoch begins with cleared"
        assert (self.epoch > 0) == (self.state is EngineState.REGISTERED), self.name
        assert not self.epoch or self.told == self.facts, f"{self.name}: {self.told} is old"
        for number, rank in self.ranks.items():
            assert rank.key == (self.name, self.incarnation, number)
            rank.check()


def event_of(host: str, engine: Engine, rank: Rank | None, draft: Draft, ts_ms: int) -> RawEvent:
    """Return a draft as the event that has the engine's present number. Without a rank it is about
    all ranks."""
    assert engine.epoch > 0, f"{engine.name}: an event without an epoch"
    assert engine.seq > 0, f"{engine.name}: an event without a number"
    assert rank is None or rank.key.engine == engine.name, f"{rank.key} is not of {engine.name}"
    head = EventHead(
        host=host, source=engine.name, tier="device", epoch=engine.epoch, seq=engine.seq,
        ts_ms=ts_ms, rank=0 if rank is None else rank.key.rank,
    )  # fmt: skip
    match draft:
        case StoredDraft(group, namespace, runs):
            return RawStored(**head, group=group, namespace=namespace, runs=runs)
        case RemovedDraft(group, namespace, hashes):
            return RawRemoved(
                **head, group=group, namespace=namespace, hashes=hashes, reason="evicted"
            )
        case ClearedDraft(reason):
            rank_only = rank is not None and len(engine.ranks) > 1
            return Cleared(**head, reason=reason, rank_only=rank_only)
    assert_never(draft)


def refusal_of_attach(
    attach: Attach, engines: Mapping[str, Engine], streams_max: int
) -> Refused | None:
    """Return why a stream is not followed, or None."""
    if attach.engine.startswith(TIER_SOURCES):
        text = f"{attach.engine!r} is the name of a tier"
        return Refused(about="attach", code="bad_engine", message=text, field="engine")
    known = engines.get(attach.engine)
    assert streams_max > 0, "no engine could be followed"
    streams = sum(len(engine.ranks) for engine in engines.values())
    if streams >= streams_max and not (known and attach.rank in known.ranks):
        text = f"{streams} streams are followed already"
        return Refused(about="attach", code="too_many_streams", message=text)
    return None
