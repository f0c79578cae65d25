"""The consolidated stream: per engine rank, what it can use, wherever on its host that lies.

```
  an engine's own events ──► devices ─┐
                                      ├─► which tiers have it? ──► stored, removed, cleared
  the tiers' events ─────► tiers.py ──┘        per rank
```

`dedup` says a block's first store and its last removal, and nothing in between: both name the tier
of the first store. `passthrough` says every tier for itself. An engine's blocks in device memory
count for the rank that has them; those in host memory and on disk for every rank of every engine
of the same namespace. Where the engine's own view is cleared (a reset, a gap that could not be
replayed), so is the stream, with the same reason, and what the tiers hold is said again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from kvbm_common.announcer import runs_of
from kvbm_common.identity import SequenceHash, hashes_from_hex
from kvbm_common.wire.events import Cleared, Event, Removed, Stored, Tier
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply

from kvbm_connectors.consolidator.drafts import Drafts
from kvbm_connectors.consolidator.tiers import Blocks, Change, Tiers, pairs_of

TIER_BITS: dict[Tier, int] = {"device": 1, "host": 2, "disk": 4, "object": 8}
TIERS: dict[int, Tier] = {bit: tier for tier, bit in TIER_BITS.items()}
BITS: dict[int, tuple[int, ...]] = {
    mask: tuple(bit for bit in TIERS if mask & bit) for mask in range(16)
}


@dataclass(slots=True)
class View:
    """What one rank of an engine can use, of one namespace."""

    namespace: str
    rank: int
    group: int = 0
    device: Blocks = field(default_factory=dict)
    live: dict[SequenceHash, int] = field(default_factory=dict)
    """Every block that was said, and the tiers that it was said of."""


@dataclass(slots=True)
class Engine:
    """One engine: its position in its own consolidated stream, and its views."""

    name: str
    epoch: int = 0
    seq: int = 0
    views: dict[tuple[int, str], View] = field(default_factory=dict)
    """By rank and namespace."""
    cleared: set[int] = field(default_factory=set)
    """Ranks whose tiers' blocks must be said again."""


class Consolidated:
    """The consolidated streams of all engines of one host."""

    def __init__(self, host: str, *, dedup: bool, drops: Counter[str]) -> None:
        self._host = host
        self._dedup = dedup
        self._drops = drops
        self._engines: dict[str, Engine] = {}
        self.tiers = Tiers(drops)
        self._out: list[Event] = []

    # ---- inputs ------------------------------------------------------------------------------

    def engine_known(self, name: str, ranks: Iterable[int], namespaces: Iterable[str]) -> None:
        """An engine has these ranks, or has one more."""
        engine = self._engines.setdefault(name, Engine(name))
        namespaces = tuple(namespaces)
        for rank in ranks:
            for namespace in namespaces:
                self._join(engine, rank, namespace)

    def engine_gone(self, name: str) -> None:
        """An engine's life is over, and its `cleared` was the last word."""
        self._engines.pop(name, None)

    def engine_event(self, event: Event) -> None:
        """What the consolidator has published of an engine."""
        engine = self._engines.setdefault(event.source, Engine(event.source))
        match event:
            case Cleared():
                self._engine_cleared(engine, event)
            case Stored():
                self._engine_stored(engine, event)
            case Removed():
                self._engine_removed(engine, event)

    def tier_events(self, events: Iterable[Event]) -> None:
        """Events of tiers, as the bus brought them."""
        for event in events:
            self._tiers_changed(self.tiers.take(event), event)

    def tier_snapshot(self, reply: SnapshotReply) -> None:
        """All that a tier holds."""
        self._tiers_changed(self.tiers.snapshot(reply))

    def tier_lost(self, source: str, epoch: int, now_ms: int) -> None:
        """A tier is gone."""
        self._tiers_changed(self.tiers.lost(source, epoch, now_ms))

    def rebuild(self) -> None:
        """Say again what the tiers hold, to those who are new or whose stream was cleared.

        Called at the end of a step: an engine that was cleared because it ended is gone by then.
        """
        for engine in self._engines.values():
            if not engine.cleared or not engine.epoch:
                continue
            ranks, engine.cleared = engine.cleared, set()
            for view in engine.views.values():
                if view.rank in ranks:
                    self._settle(engine, view, self.tiers.blocks(view.namespace).items(), 0)

    def take(self) -> list[Event]:
        """What is to be said, in order."""
        out, self._out = self._out, []
        return out

    # ---- questions ---------------------------------------------------------------------------

    def snapshot(self, name: str) -> SnapshotReply | None:
        """The whole consolidated stream of an engine, as of its last event; None: unknown."""
        engine = self._engines.get(name)
        if engine is None or not engine.epoch:
            return None
        parts = [
            SnapshotPart(
                namespace=view.namespace,
                rank=view.rank,
                group=view.group,
                runs=runs_of((block, self._parent_of(view, block)) for block in view.live),
            )
            for view in engine.views.values()
            if view.live
        ]
        return SnapshotReply(host=self._host, source=name, tier="device", epoch=engine.epoch,
                             seq=engine.seq, parts=parts)  # fmt: skip

    def live(self, name: str, rank: int = 0) -> dict[SequenceHash, set[Tier]]:
        """What was said of one rank and not taken back."""
        engine = self._engines.get(name, Engine(name))
        views = (view for view in engine.views.values() if view.rank == rank)
        return {
            block: {TIERS[bit] for bit in BITS[mask]}
            for view in views
            for block, mask in view.live.items()
        }

    @property
    def block_count(self) -> int:
        """Blocks said, over all engines and ranks."""
        return sum(len(v.live) for engine in self._engines.values() for v in engine.views.values())

    def check(self) -> None:
        """Every invariant, O(n)."""
        self.tiers.check()
        for engine in self._engines.values():
            assert (engine.seq > 0) == (engine.epoch > 0), "an epoch begins with cleared"
            for view in engine.views.values():
                if not engine.epoch or view.rank in engine.cleared:
                    continue
                for block, said in view.live.items():
                    have = self._tiers_of(view, block)
                    assert have, f"{block.hex()} is nowhere, and {engine.name} is told it is"
                    assert said == have if not self._dedup else said in TIERS
                missing = view.device.keys() - view.live.keys()
                assert not missing, "what a device holds was said"

    # ---- inside ------------------------------------------------------------------------------

    def _join(self, engine: Engine, rank: int, namespace: str, group: int = 0) -> View:
        view = engine.views.get((rank, namespace))
        if view is None:
            view = engine.views[rank, namespace] = View(namespace, rank, group)
            engine.cleared.add(rank)
        return view

    def _engine_cleared(self, engine: Engine, event: Cleared) -> None:
        ranks = {event.rank} if event.rank_only else {rank for rank, _ in engine.views}
        for view in engine.views.values():
            if view.rank in ranks:
                view.device.clear()
                view.live.clear()
        engine.cleared |= ranks
        if event.epoch > engine.epoch:
            engine.epoch, engine.seq = event.epoch, 0
        engine.seq += 1
        self._out.append(
            Cleared(host=self._host, source=engine.name, tier="device", epoch=engine.epoch,
                    seq=engine.seq, ts_ms=event.ts_ms, rank=event.rank, reason=event.reason,
                    rank_only=event.rank_only)
        )  # fmt: skip

    def _engine_stored(self, engine: Engine, event: Stored) -> None:
        view = self._join(engine, event.rank, event.namespace, event.group)
        blocks = dict(pairs_of(event.runs))
        view.device |= blocks
        if view.live.keys().isdisjoint(blocks) and not self._in_tiers(blocks, view):
            view.live.update(dict.fromkeys(blocks, TIER_BITS["device"]))
            self._pass_on(engine, event)
        else:
            self._settle(engine, view, blocks.items(), event.ts_ms)

    def _engine_removed(self, engine: Engine, event: Removed) -> None:
        view = self._join(engine, event.rank, event.namespace, event.group)
        hashes = hashes_from_hex(event.hashes)
        for block in hashes:
            view.device.pop(block, None)
        alone = all(view.live.get(block) == TIER_BITS["device"] for block in hashes)
        if alone and not self._in_tiers(hashes, view):
            for block in hashes:
                del view.live[block]
            self._pass_on(engine, event)
        else:
            gone = [(block, block) for block in hashes]
            self._settle(engine, view, gone, event.ts_ms, event.reason)

    def _pass_on(self, engine: Engine, event: Stored | Removed) -> None:
        """The engine's event is the consolidated one: only its number differs."""
        if engine.epoch:
            engine.seq += 1
            self._out.append(msgspec.structs.replace(event, seq=engine.seq))

    def _in_tiers(self, blocks: Iterable[SequenceHash], view: View) -> bool:
        return self.tiers.has_any(blocks, view.namespace)

    def _tiers_changed(self, changes: list[Change], event: Event | None = None) -> None:
        """Tell everybody whose view it changes."""
        ts_ms = event.ts_ms if event else 0
        reason = event.reason if isinstance(event, Removed) else ""
        for change in changes:
            blocks = [*change.stored, *((block, block) for block in change.removed)]
            for engine in self._engines.values():
                for view in engine.views.values():
                    if view.namespace == change.namespace and engine.epoch:
                        self._settle(engine, view, blocks, ts_ms, reason)

    def _settle(
        self,
        engine: Engine,
        view: View,
        blocks: Iterable[tuple[SequenceHash, SequenceHash]],
        ts_ms: int,
        reason: str = "",
    ) -> None:
        """Compare what was said of some blocks with what is true now, and say the difference."""
        live, drafts = view.live, Drafts()
        for block, parent in blocks:
            said, have = live.get(block, 0), self._tiers_of(view, block)
            # The lowest bit of what it has is the tier that an engine reaches first.
            want = (said or have & -have) if self._dedup and have else have
            if want == said:
                continue
            if want:
                live[block] = want
            else:
                del live[block]
            for bit in BITS[said & ~want]:
                drafts.removed(TIERS[bit], block)
            for bit in BITS[want & ~said]:
                drafts.stored(TIERS[bit], parent, block)
        for draft in drafts.take() if engine.epoch else ():
            engine.seq += 1
            self._out.append(
                draft.event(
                    host=self._host, source=engine.name, epoch=engine.epoch, seq=engine.seq,
                    ts_ms=ts_ms, rank=view.rank, group=view.group, namespace=view.namespace,
                    reason=reason,
                )
            )  # fmt: skip

    def _tiers_of(self, view: View, block: SequenceHash) -> int:
        mask = TIER_BITS["device"] if block in view.device else 0
        for tier in self.tiers.holding(block, view.namespace):
            mask |= TIER_BITS[tier]
        return mask

    def _parent_of(self, view: View, block: SequenceHash) -> SequenceHash:
        parent = view.device.get(block)
        return self.tiers.parent_of(block, view.namespace) if parent is None else parent
