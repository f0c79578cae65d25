"""An engine as the consolidator knows it, and drafts of its events with their numbers on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Cleared, Event, Removed, Stored

from kvbm_connectors.consolidator.merge import ClearedDraft, Draft, RemovedDraft, StoredDraft
from kvbm_connectors.consolidator.rank import Rank


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
    asked: bool = False
    """An AskEpoch flies."""
    ask_at_ms: int = 0

    def namespaces(self) -> tuple[str, ...]:
        """The namespace digests of all ranks, in hex."""
        return tuple(sorted({rank.namespace_hex for rank in self.ranks.values()}))

    def held(self) -> set[tuple[int, int, SequenceHash]]:
        """Every (rank, group, block)."""
        return {(number, *block) for number, rank in self.ranks.items() for block in rank.blocks()}

    def check(self) -> None:
        """Every invariant, O(n)."""
        assert self.ranks, f"{self.name} has no rank"
        assert (self.seq > 0) == (self.epoch > 0), f"{self.name}: an epoch begins with cleared"
        for number, rank in self.ranks.items():
            assert rank.key == (self.name, self.incarnation, number)
            rank.check()


def event_of(host: str, engine: Engine, rank: Rank | None, draft: Draft, ts_ms: int) -> Event:
    """A draft as the event that has the engine's present number. No rank: it is about all."""
    number = 0 if rank is None else rank.key.rank
    match draft:
        case StoredDraft(group, namespace, runs):
            return Stored(
                host=host, source=engine.name, tier="device", epoch=engine.epoch,
                seq=engine.seq, ts_ms=ts_ms, rank=number, group=group, namespace=namespace,
                runs=runs,
            )  # fmt: skip
        case RemovedDraft(group, namespace, hashes):
            return Removed(
                host=host, source=engine.name, tier="device", epoch=engine.epoch,
                seq=engine.seq, ts_ms=ts_ms, rank=number, group=group, namespace=namespace,
                hashes=hashes, reason="evicted",
            )  # fmt: skip
        case ClearedDraft(reason):
            return Cleared(
                host=host, source=engine.name, tier="device", epoch=engine.epoch,
                seq=engine.seq, ts_ms=ts_ms, rank=number, reason=reason,
                rank_only=rank is not None and len(engine.ranks) > 1,
            )  # fmt: skip
    assert_never(draft)


def mentions(event: Event, sequence_hash: SequenceHash) -> bool:
    """Whether an event is about a block."""
    text = sequence_hash.hex()
    match event:
        case Stored():
            return any(text in run.hashes for run in event.runs)
        case Removed():
            return text in event.hashes
        case Cleared():
            return True


def describe(event: Event) -> str:
    """An event without its blocks."""
    kind = event.__struct_config__.tag
    return f"{kind} {event.source} rank {event.rank} epoch {event.epoch} seq {event.seq}"
