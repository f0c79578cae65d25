"""The consolidator's core: the engines' events, and the merged streams made of them.

```
  engines ──► EnginesCore ──► events per tier ───────────────────────────────► NATS
                   │ Learn               │
                   ▼                     ▼
                 TokenNames       MergedStreams ──► merged events ──────► NATS
                   │                     ▲    └──► RouterStreams ─► vLLM's wire, ZMQ
                   └── tokens ──────────)│(────────────►┘
  tiers, on NATS ────────────────────────┘
```

One step runs both halves: the merged streams see every event of the engines in order, whatever
becomes of the bus.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvbm_common.identity import Hasher

from kvbm_connectors.consolidator.core.batch_merger import ClearedDraft, blocks_of
from kvbm_connectors.consolidator.core.engines import EnginesCore
from kvbm_connectors.consolidator.core.merged_stream import MergedStreams
from kvbm_connectors.consolidator.core.messages import (
    AnswerRouter,
    AskEpoch,
    AskSnapshot,
    Broadcast,
    ConsolidatorLimits,
    Describe,
    Effect,
    EngineEffect,
    EngineInput,
    EnginesStatistics,
    GoOn,
    GoOnLater,
    Input,
    Learn,
    Publish,
    PublishMerged,
    RevokeEpoch,
    RouterAsked,
    RouterJoined,
    Tick,
    TierEvents,
    TierJoined,
    TierLeft,
    TierSnapshot,
    TierSnapshotFailed,
    TierStreamLost,
)
from kvbm_connectors.consolidator.core.router_stream import RouterStreams
from kvbm_connectors.consolidator.core.token_names import TokenNames


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidatorStatistics:
    """Figures of both halves."""

    engines: EnginesStatistics
    merged_blocks: int
    """Blocks published on the merged stream, over all engines and ranks."""
    tier_blocks: int
    tiers_behind: int
    names: int
    unnamed_blocks: int
    """Blocks that are not sent to routers, because no engine has sent their tokens yet."""
    router_batches: int
    drops: dict[str, int]


class ConsolidatorCore:
    """Pure: both halves of the consolidator, in one step."""

    def __init__(
        self,
        host: str,
        limits: ConsolidatorLimits | None = None,
        *,
        dedup: bool = True,
        first_router_seq: int = 0,
        awaits_routers: bool = False,
        hasher: type[Hasher] = Hasher,
    ) -> None:
        self.engines = EnginesCore(host, limits, hasher)
        self._drops: Counter[str] = Counter()
        self.merged = MergedStreams(
            host, dedup=dedup, drops=self._drops,
            blocks_max=(limits or ConsolidatorLimits()).tier_blocks_max,
        )  # fmt: skip
        self.names = TokenNames()
        self._is_waiting = False
        """A GoOnLater is under way."""
        self._naming = limits is not None and limits.naming
        self.router = RouterStreams(
            self.names, dedup=dedup, first_seq=first_router_seq, awaits_readers=awaits_routers
        )

    @property
    def is_quiet(self) -> bool:
        """Tell whether ticks may come seldom: no engine and no tier waits for anything."""
        is_settled = self.engines.is_settled and self.merged.tiers.is_current
        return is_settled and not self.merged.is_going_on

    def step(self, event: Input, now_ms: int) -> list[Effect]:
        """Take one input; returns what is to be done about it, in order."""
        effects: list[Effect] = []
        tiers = self.merged.tiers
        match event:
            case TierJoined(source, tier, epoch):
                self.merged.tiers_changed(tiers.joined(source, tier, epoch, now_ms))
            case TierLeft(source, epoch):
                self.merged.tiers_changed(tiers.left(source, epoch, now_ms))
            case TierEvents(events):
                for one in events:
                    self.merged.tiers_changed(tiers.take(one, now_ms), one)
            case TierSnapshot(reply):
                self.merged.tiers_changed(tiers.snapshot(reply, now_ms))
            case TierSnapshotFailed(source):
                tiers.snapshot_failed(source, now_ms)
            case TierStreamLost(source):
                tiers.stream_lost(source, now_ms)
            case GoOn():
                self._is_waiting = False
            case RouterAsked(rank, from_seq, peer):
                frames = self.router.replay(rank, from_seq)
                effects.append(AnswerRouter(rank, peer, tuple(frames)))
            case RouterJoined(rank, topic):
                self.router.greet(rank, topic)
            case _:
                effects += self._step_engines(event, now_ms)
        # Large work goes on a part at a time after each `GoOn`, not with the inputs between.
        has_turn = not self._is_waiting
        # But events of tiers bring a part of what they wait for along: else they would outrun it.
        if (has_turn and tiers.is_going_on) or (
            isinstance(event, TierEvents) and tiers.is_catching_up
        ):
            self.merged.tiers_changed(tiers.go_on(now_ms))
        if isinstance(event, Tick | TierJoined):
            effects += [AskSnapshot(source) for source in tiers.ask(now_ms)]
        self.merged.rebuild(has_turn=has_turn)
        effects += self._take_published()
        if self.merged.is_going_on and not self._is_waiting:
            self._is_waiting = True
            effects.append(GoOnLater())
        self.router.forget_ended(now_ms)  # Now: what has just ended holds no blocks any more.
        return effects

    def _step_engines(self, event: EngineInput, now_ms: int) -> list[Effect]:
        """Have the engines' half take an input, and apply its effects to the merged streams."""
        assert not self.merged.touched, "drafts of an earlier step are touched"
        found = self.engines.step(event, now_ms)
        drafts = [one.draft for one in found if isinstance(one, Publish)]
        is_built = any(isinstance(draft, ClearedDraft) for draft in drafts)
        if is_built or self.merged.is_going_on:
            self.merged.touched = blocks_of(drafts)
        for effect in found:
            self._follow(effect, now_ms)
        self.merged.touched = set()
        return [effect for effect in found if not isinstance(effect, Learn)]

    def _follow(self, effect: EngineEffect, now_ms: int) -> None:
        """Apply an effect of the engines' half to the merged streams and the router streams."""
        match effect:
            case Publish(event, draft):
                self.merged.engine_event(event, draft)
            case Learn(named):
                self.router.learn(named)
            case AskEpoch() | Describe():
                self.merged.engine_known(effect.engine, effect.ranks, effect.groups)
                self.router.engine_known(effect.engine, effect.ranks)
            case RevokeEpoch(engine):
                self.merged.engine_left(engine)
                self.router.engine_left(engine, now_ms)
            case _:
                pass

    def _take_published(self) -> list[Effect]:
        """Return what the merged streams and the router streams publish after this step."""
        events = self.merged.take()
        if self._naming:
            for event in events:
                self.router.take_event(event)
            self.router.publish_named()
        published: list[Effect] = [PublishMerged(event) for event in events]
        return published + [Broadcast(frame) for frame in self.router.take()]

    def check(self) -> None:
        """Assert every invariant, in O(n)."""
        self.engines.check()
        self.merged.check()
        self.router.check()

    def statistics(self) -> ConsolidatorStatistics:
        """Return the figures for metrics."""
        return ConsolidatorStatistics(
            engines=self.engines.statistics(),
            merged_blocks=self.merged.block_count,
            tier_blocks=self.merged.tiers.block_count,
            tiers_behind=self.merged.tiers.behind_count,
            names=len(self.names),
            unnamed_blocks=self.router.unnamed_count,
            router_batches=self.router.batch_count,
            drops=dict(self._drops),
        )
