"""The engines' half of the core: the event streams of one host's engines become our events.

```
  Attach ──► AskEpoch ──► EpochGranted ──► cleared (seq 1), everything held
    │                                          │
    └─► Subscribe, RequestReplay ──► batches ──┴──► stored, removed, cleared …
                                                    │
  Detach · another incarnation · no Beat and no batch: cleared, Unsubscribe, RevokeEpoch
```

An engine is one source: its epoch is its life in the registry, its `seq` counts over all its ranks
and KV groups. A rank is one stream (rank.py), followed from the moment that it is attached, even
before there is an epoch: what is held when it comes is announced then. A publisher that restarts
under the same incarnation gets the engine a new epoch, and all its ranks begin again.
"""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from kvbm_common.identity import Hasher, SequenceHash
from kvbm_common.tier.announcer import Pages
from kvbm_common.wire.consolidator import Attach, Attached
from kvbm_common.wire.engine_events import EngineBatch
from kvbm_common.wire.local import Refused
from kvbm_common.wire.tier_stats import WorkerStats
from kvbm_common.wire.verbs import SnapshotReply

from kvbm_connectors.consolidator.core.batch_merger import ClearedDraft, Draft
from kvbm_connectors.consolidator.core.engine import Engine, event_of, refusal_of_attach
from kvbm_connectors.consolidator.core.engine_statistics import statistics_of
from kvbm_connectors.consolidator.core.events import PublishedEvents
from kvbm_connectors.consolidator.core.messages import (
    AskEpoch,
    BeatReceived,
    ConsolidatorLimits,
    Describe,
    EngineBatchesReceived,
    EngineDetached,
    EngineEffect,
    EngineInput,
    EngineLeft,
    EnginesStatistics,
    EpochFailed,
    EpochGranted,
    Learn,
    Publish,
    ReplayDone,
    ReplayFailed,
    Reply,
    RequestReplay,
    RevokeEpoch,
    StreamAttached,
    StreamKey,
    Subscribe,
    Tick,
    Unsubscribe,
)
from kvbm_connectors.consolidator.core.rank import Rank
from kvbm_connectors.consolidator.core.sequencer import Ready
from kvbm_connectors.consolidator.core.snapshot_pages import pages_of


class EnginesCore:
    """The attached engines, what each rank holds, and the number of its next event. Pure."""

    def __init__(
        self, host: str, limits: ConsolidatorLimits | None = None, hasher: type[Hasher] = Hasher
    ) -> None:
        self._host, self._hasher = host, hasher
        self._limits = limits or ConsolidatorLimits()
        self._engines: dict[str, Engine] = {}
        self._asks = 0
        self._drops: Counter[str] = Counter()
        self._effects: list[EngineEffect] = []
        self._published = PublishedEvents()
        self._now_ms = 0
        self._offers_open = True
        self._batch_count = 0
        self._publish_count = 0
        self._replay_count = 0

    # ---- the only door -----------------------------------------------------------------------

    def step(self, event: EngineInput, now_ms: int) -> list[EngineEffect]:
        """Take one input; returns what is to be done about it, in order."""
        assert now_ms >= self._now_ms, f"{now_ms} ms after {self._now_ms} ms"
        assert not self._effects, f"effects of an earlier step are left: {self._effects}"
        self._now_ms = now_ms
        match event:
            case EngineBatchesReceived(key, batches, replay):
                self._on_batches(key, batches, replay)
            case StreamAttached(attach, peer):
                self._on_attached(attach, peer)
            case BeatReceived():
                self._on_beat(event)
            case EngineDetached(engine, incarnation):
                self._on_detached(engine, incarnation)
            case EngineLeft():
                self._on_left(event)
            case EpochGranted():
                self._on_epoch(event)
            case EpochFailed():
                self._on_epoch_failed(event)
            case ReplayDone(key, replay):
                self._on_replay_over(key, replay, failed=False)
            case ReplayFailed(key, replay):
                self._on_replay_over(key, replay, failed=True)
            case Tick(offers_open):
                self._on_tick(offers_open)
            case _:
                assert_never(event)
        effects, self._effects = self._effects, []
        return effects

    # ---- questions ---------------------------------------------------------------------------

    def snapshot_pages(self, engine: str) -> Pages | None:
        """Return all that an engine holds as of its last event, of every rank and KV group.

        None if the engine is unknown or has no epoch.
        """
        found = self._engines.get(engine)
        if found is None or not found.epoch:
            return None
        head = SnapshotReply(host=self._host, source=engine, tier="device", epoch=found.epoch,
                             seq=found.seq, parts=[])  # fmt: skip
        return pages_of(head, [p for rank in found.ranks.values() for p in rank.pieces()])

    @property
    def is_settled(self) -> bool:
        """Tell whether every engine has its epoch, and no rank waits for events."""
        return all(engine.is_settled for engine in self._engines.values())

    def knows(self, engine: str, incarnation: str) -> bool:
        """Return whether this life of an engine is attached."""
        return engine in self._engines and self._engines[engine].incarnation == incarnation

    def awaits(self, engine: str, ask: int) -> bool:
        """Return whether the answer to an AskEpoch is waited for, and not to a later one."""
        return engine in self._engines and self._engines[engine].awaits(ask)

    def positions(self) -> dict[str, tuple[int, int]]:
        """Return a mapping from each engine to the (epoch, seq) of its last event."""
        return {name: (engine.epoch, engine.seq) for name, engine in self._engines.items()}

    def passing_through(self) -> list[WorkerStats]:
        """Return the engines that compute without a cache, each with its reason."""
        return [w for e in self._engines.values() for w in e.passing_through(self._now_ms)]

    def story(self, sequence_hash: SequenceHash) -> list[str]:
        """Return what was lately published about a block, newest last."""
        return self._published.story(sequence_hash)

    def statistics(self) -> EnginesStatistics:
        """Return the figures for metrics."""
        return statistics_of(
            self._engines.values(), batches=self._batch_count, published=self._publish_count,
            replays=self._replay_count, drops=self._drops,
        )  # fmt: skip

    def check(self) -> None:
        """Assert every invariant, in O(n)."""
        assert not self._effects, "effects leave with their step"
        for name, engine in self._engines.items():
            assert name == engine.name
            engine.check()

    # ---- lives -------------------------------------------------------------------------------

    def _on_attached(self, attach: Attach, peer: bytes) -> None:
        refusal = refusal_of_attach(attach, self._engines, self._limits.streams_max)
        if refusal is not None:
            self._drops[refusal.code] += 1
            self._effects.append(Reply(peer, refusal))
            return
        engine = self._engines.get(attach.engine)
        if engine is not None and engine.is_another(attach):
            self._end(engine, "replaced")
            engine = None
        if engine is None:
            engine = Engine(attach.engine, attach.incarnation, self._now_ms)
            self._engines[attach.engine] = engine
        engine.seen_ms = self._now_ms
        rank = engine.ranks.get(attach.rank)
        if rank is None:
            rank = Rank(attach, peer, self._limits, self._drops, self._now_ms, self._hasher)
            engine.ranks[attach.rank] = rank
            if attach.endpoint:
                self._effects.append(Subscribe(rank.key, attach.endpoint, attach.topic))
            self._poll(rank)
            self._register(engine)
        elif rank.attach != attach:
            rank.describe(attach)
            self._announce(engine, rank, 0)
        rank.peer = peer
        assert rank.key.incarnation == engine.incarnation, f"{rank.key} is of another life"
        if engine.epoch:
            self._answer(engine, rank)

    def _register(self, engine: Engine) -> None:
        """Ask for an epoch, or say that there is one more rank."""
        assert engine.ranks, f"{engine.name} has no rank to register"
        if engine.epoch:
            self._effects.append(Describe(*engine.tell()))
        elif engine.should_ask(self._now_ms):
            self._asks += 1
            engine.asked(self._asks)
            self._effects.append(AskEpoch(self._asks, *engine.tell()))

    def _on_epoch(self, event: EpochGranted) -> None:
        engine = self._engines.get(event.engine)
        if engine is None or not engine.awaits(event.ask):
            self._drops["stale_epoch"] += 1
            if engine is None:
                self._effects.append(RevokeEpoch(event.engine))
            return
        engine.granted(event.epoch)
        if engine.told != engine.facts:  # A rank has come since it was asked.
            self._register(engine)
        self._publish_draft(engine, None, ClearedDraft("attached"), 0)
        for rank in engine.ranks.values():
            for draft in rank.everything():
                self._publish_draft(engine, rank, draft, 0)
            self._answer(engine, rank)

    def _on_epoch_failed(self, event: EpochFailed) -> None:
        engine = self._engines.get(event.engine)
        if engine is not None and engine.awaits(event.ask):
            engine.failed(self._now_ms + self._limits.epoch_retry_ms)

    def _on_beat(self, event: BeatReceived) -> None:
        """Refuse a beat from a peer that has attached no rank of this life: it attaches again."""
        engine = self._engines.get(event.engine)
        if engine is not None and engine.incarnation == event.incarnation:
            engine.seen_ms = self._now_ms
            for rank in engine.ranks.values():
                if rank.peer == event.peer:
                    self._answer(engine, rank)
                    return
        text = f"{event.engine} {event.incarnation} is not attached by you"
        refused = Refused(about="beat", code="unknown_engine", message=text, field="engine")
        self._effects.append(Reply(event.peer, refused))

    def _on_detached(self, name: str, incarnation: str) -> None:
        engine = self._engines.get(name)
        if engine is None or engine.incarnation != incarnation:
            self._drops["stale_detach"] += 1
            return
        self._end(engine, "detached")

    def _on_left(self, event: EngineLeft) -> None:
        engine = self._engines.get(event.engine)
        if engine is not None and engine.epoch == event.epoch:
            self._end(engine, event.reason)

    def _end(self, engine: Engine, reason: str) -> None:
        """Announce that the device blocks of this life are gone."""
        assert reason, f"{engine.name} ends for a reason"
        assert self._engines.get(engine.name) is engine, f"{engine.name} has ended: {reason}"
        if engine.epoch:
            self._publish_draft(engine, None, ClearedDraft(reason), 0)
        followed = [rank for rank in engine.ranks.values() if rank.attach.endpoint]
        self._effects += [Unsubscribe(rank.key) for rank in followed]
        self._effects.append(RevokeEpoch(engine.name))
        engine.leave()
        del self._engines[engine.name]

    def _on_tick(self, offers_open: bool) -> None:
        if offers_open != self._offers_open:
            self._offers_open = offers_open
            for engine in self._engines.values():
                for rank in engine.ranks.values():
                    self._answer(engine, rank)
        for engine in list(self._engines.values()):
            assert engine.seen_ms <= self._now_ms, f"{engine.name} was heard in the future"
            if self._now_ms - engine.seen_ms > self._limits.lost_after_ms:
                self._end(engine, "lost")
                continue
            if not engine.epoch:
                self._register(engine)
            for rank in engine.ranks.values():
                rank.age(self._now_ms)
                self._poll(rank)

    # ---- streams -----------------------------------------------------------------------------

    def _on_batches(
        self, key: StreamKey, batches: tuple[tuple[int, EngineBatch], ...], replay: int
    ) -> None:
        assert batches, "an input has a batch"
        found = self._find(key)
        if found is None or replay not in (0, found[1].sequencer.replay):
            self._drops["stale_batch"] += len(batches)
            return
        engine, rank = found
        engine.seen_ms = self._now_ms
        self._batch_count += len(batches)
        for seq, batch in batches:
            if replay:
                self._apply(engine, rank, rank.sequencer.take_replayed(seq, batch))
            elif self._apply(engine, rank, rank.sequencer.take_live(seq, batch, self._now_ms)):
                # The batch that gave it away belongs to the new life.
                self._apply(engine, rank, rank.sequencer.take_live(seq, batch, self._now_ms))
        rank.settle(self._now_ms)
        self._announce(engine, rank, batches[0][1].ts)

    def _on_replay_over(self, key: StreamKey, replay: int, *, failed: bool) -> None:
        found = self._find(key)
        if found is None or not replay or found[1].sequencer.replay != replay:
            self._drops["stale_replay"] += 1
            return
        engine, rank = found
        if failed:
            self._drops["replay_failed"] += 1
        sequencer = rank.sequencer
        ready = sequencer.replay_failed(self._now_ms) if failed else sequencer.replay_done()
        assert not sequencer.replay, f"{key}: replay {sequencer.replay} is over"
        self._apply(engine, rank, ready)
        rank.settle(self._now_ms)
        self._announce(engine, rank, 0)
        rank.drop_orphans()

    def _apply(self, engine: Engine, rank: Rank, ready: Ready) -> bool:
        """Apply what is in order; return True if it shows that the publisher had restarted."""
        restarted = bool(ready) and rank.apply(ready, self._now_ms)
        if restarted:
            self._begin_again(engine)
        return restarted

    def _announce(self, engine: Engine, rank: Rank, ts: float) -> None:
        """Announce what has changed, and ask for what is missing."""
        assert engine.ranks.get(rank.key.rank) is rank, f"{rank.key} is no rank of {engine.name}"
        self._effects += [Learn(named) for named in rank.take_named()]
        for draft in rank.take_drafts():
            self._publish_draft(engine, rank, draft, int(ts * 1000))
        self._poll(rank)

    def _begin_again(self, engine: Engine) -> None:
        """Begin another life: the publisher has restarted under the same incarnation."""
        self._drops["restarted"] += 1
        if engine.epoch:
            self._publish_draft(engine, None, ClearedDraft("restarted"), 0)
        engine.restarted()
        assert not engine.epoch, f"{engine.name} restarts in epoch {engine.epoch}"
        for rank in engine.ranks.values():
            rank.restart(self._now_ms)
            self._poll(rank)
        self._register(engine)

    def _poll(self, rank: Rank) -> None:
        # The numbers run over all streams and lives: an answer never meets another question.
        replay = self._replay_count + 1
        from_seq = rank.sequencer.poll(self._now_ms, replay)
        if from_seq is not None:
            self._replay_count = replay
            assert rank.sequencer.replay == replay, f"{rank.key}: {rank.sequencer.replay}"
            endpoint = rank.attach.replay_endpoint
            self._effects.append(RequestReplay(rank.key, endpoint, from_seq, replay))

    # ---- out ---------------------------------------------------------------------------------

    def _publish_draft(self, engine: Engine, rank: Rank | None, draft: Draft, ts_ms: int) -> None:
        """Number a draft and publish it. Without a rank it is about all ranks.

        It is dropped while the engine has no epoch: all that is held is announced with the epoch.
        """
        if not engine.epoch:
            return
        engine.seq += 1
        event = event_of(self._host, engine, rank, draft, ts_ms)
        self._published.add(event, self._now_ms)
        self._publish_count += 1
        self._effects.append(Publish(event, draft))

    def _answer(self, engine: Engine, rank: Rank) -> None:
        """Tell the connector that its rank is attached; epoch 0: the registry has not answered."""
        assert engine.ranks.get(rank.key.rank) is rank, f"{rank.key} is no rank of {engine.name}"
        message = Attached(
            engine=engine.name, rank=rank.key.rank, epoch=engine.epoch, offers=self._offers_open,
            generation=rank.attach.generation,
        )  # fmt: skip
        self._effects.append(Reply(rank.peer, message))

    def _find(self, key: StreamKey) -> tuple[Engine, Rank] | None:
        engine = self._engines.get(key.engine)
        if engine is None or engine.incarnation != key.incarnation:
            return None
        rank = engine.ranks.get(key.rank)
        return None if rank is None else (engine, rank)
