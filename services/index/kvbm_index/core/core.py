"""The index's core: which holder has which block, as the events of all sources say.

Each source's events are applied once, in the order of (epoch, seq). When one is missing, the source
is asked for a snapshot, and its events wait until it comes (`kvbm_common/tier/follow.py` has the
rule and the drawing). Queries are plain methods between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, repeat
from operator import attrgetter
from typing import assert_never, cast

from kvbm_common.identity import IdentityError
from kvbm_common.tier.follow import FollowState, Verdict
from kvbm_common.wire.events import Cleared, Removed, Stored

from kvbm_index.core.event_batch import next_seq, one_by_one, removed_by, stored_by
from kvbm_index.core.event_decoder import (
    DecodedCleared,
    DecodedRemoved,
    DecodedStored,
    removed_of,
    runs_of,
)
from kvbm_index.core.image import HolderTuple, Image
from kvbm_index.core.messages import (
    AnyEvent,
    Effect,
    EventsReceived,
    Input,
    Limits,
    Received,
    RegistryRead,
    RequestSnapshot,
    Restored,
    SnapshotFailed,
    SnapshotReceived,
    SourceJoined,
    SourceKey,
    SourceLeft,
    StreamLost,
    Tick,
)
from kvbm_index.core.packed_batch import PARTS, PackedRemoved, PackedStored
from kvbm_index.core.queries import Queries
from kvbm_index.core.snapshot_loader import SnapshotLoader
from kvbm_index.core.sources import Source

CLEARED = (Cleared, DecodedCleared)
DROPPED = {
    Verdict.OLD_EPOCH: "old_epoch",
    Verdict.DUPLICATE: "duplicate",
    Verdict.FULL: "buffer_full",
}
"""Verdict → the counter of the events that are dropped for it."""

_holder_and_kind = attrgetter("host", "source", "epoch", "__class__", "tier", "rank", "group")


class IndexCore(Queries):
    """The state machine of the index: time comes in with each step, IO goes out as effects."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self._registry_read = False
        self._asking = False
        """True if some source may be due for a snapshot: all are looked at as the step ends."""
        self._is_quiet = False
        self._looked_ms = -self._limits.look_every_ms
        self._now_ms = 0

    # ---- the only door -----------------------------------------------------------------------

    def step(self, event: Input, now_ms: int) -> list[Effect]:
        """Take one input; return the effects that the shell carries out."""
        assert now_ms >= self._now_ms, f"{now_ms} ms after {self._now_ms} ms"
        self._now_ms = now_ms
        match event:
            case EventsReceived(events, position, stream):
                self._on_events(events, now_ms)
                self._position, self._stream = position, stream
            case Restored(image):
                self._on_restored(image, now_ms)
            case SnapshotReceived(loader):
                self._on_snapshot(loader, now_ms)
            case SnapshotFailed(key):
                self._on_snapshot_failed(key, now_ms)
            case SourceJoined(key, epoch):
                self._on_joined(key, epoch, now_ms)
            case SourceLeft(key, epoch):
                self._on_left(key, epoch, now_ms)
            case RegistryRead():
                self._on_registry_read(now_ms)
            case StreamLost():
                self._on_stream_lost(now_ms)
            case Tick():
                self._on_tick(now_ms)
            case _:
                assert_never(event)
        self._is_quiet = self._is_quiet and isinstance(event, Tick)
        return self._ask_snapshots(now_ms) if self._asking else []

    @property
    def is_quiet(self) -> bool:
        """Tell whether ticks may come seldom: all sources were in order at the last look, and no
        input has come since."""
        return self._is_quiet

    # ---- events ------------------------------------------------------------------------------

    def _on_events(self, events: Sequence[Received], now_ms: int) -> None:
        """Apply consecutive events of one holder and kind together, if they are in order."""
        for _, group in groupby(events, _holder_and_kind):
            several = list(group)
            alone = len(several) == 1 and not isinstance(several[0], PARTS)
            if alone or not self._apply_together(several, now_ms):
                for event in one_by_one(several):
                    self._on_next(event, now_ms)

    def _apply_together(self, events: list[Received], now_ms: int) -> bool:
        """Apply the next events of a current source; return False if nothing was done."""
        first = events[0]
        source = self._sources.get((first.host, first.source))  # type: ignore[call-overload]
        if source is None or source.state is not FollowState.CURRENT or first.epoch != source.epoch:
            return False
        next_number, holder = next_seq(events, source.seq + 1), _holder_of(first)
        if next_number is None:
            return False
        if isinstance(first, DecodedStored | PackedStored):
            runs = stored_by(cast("list[DecodedStored]", events))
            if runs is None:
                return False
            for parent, run, rooted in runs:
                self._holdings.add(holder, parent, run, rooted=rooted)
        elif isinstance(first, DecodedRemoved | PackedRemoved):
            blocks = removed_by(cast("list[DecodedRemoved]", events))
            if blocks is None:
                return False
            self._holdings.discard(holder, blocks)
        else:
            return False
        assert not source.waiting, f"{source.key} is current, and {len(source.waiting)} events wait"
        self._event_count += next_number - 1 - source.seq
        source.seq = next_number - 1  # What `take` and `ready` do when no event waits.
        self._applied.extend(zip(repeat(now_ms), events))
        return True

    def _on_next(self, event: AnyEvent, now_ms: int) -> None:
        """Apply one event; the next one of a current source, the usual case, takes a short way."""
        # A plain tuple is as good a key as a SourceKey, and a third of the time to make.
        source = self._sources.get((event.host, event.source))  # type: ignore[call-overload]
        if (
            source is None
            or event.seq != source.seq + 1
            or event.epoch != source.epoch
            or source.state is not FollowState.CURRENT
        ):
            self._on_event(event, now_ms)
            return
        try:
            self._change(source.key, event)
        except IdentityError:
            self._refuse(source, now_ms)
            return
        source.seq = event.seq
        self._event_count += 1
        self._applied.append((now_ms, event))

    def _on_event(self, event: AnyEvent, now_ms: int) -> None:
        source = self._sources.get_or_make(SourceKey(event.host, event.source), now_ms)
        if source is None:
            self._drops["sources_full"] += 1
            return
        self._begin(source, event.epoch)
        clears = isinstance(event, CLEARED) and not event.rank_only
        verdict = source.take(event, now_ms, clears=clears)
        if verdict in DROPPED:
            self._drops[DROPPED[verdict]] += 1
        self._apply_ready(source, now_ms)
        self._asking = self._asking or source.state is FollowState.BEHIND

    def _apply_ready(self, source: Source, now_ms: int) -> None:
        for event in source.ready():
            try:
                self._change(source.key, event)
            except IdentityError:
                self._refuse(source, now_ms)
            else:
                self._event_count += 1
                self._applied.append((now_ms, event))

    def _refuse(self, source: Source, now_ms: int) -> None:
        """Count a malformed event and let the source fall behind: only a snapshot repairs it."""
        self._drops["malformed"] += 1
        source.refuse(now_ms)
        assert source.state is FollowState.BEHIND, f"{source.key} is {source.state.name}"
        self._asking = True

    def _change(self, key: SourceKey, event: AnyEvent) -> None:
        match event:
            case DecodedStored() | Stored():
                holder = _holder_of(event)
                # All of an event is read before any of it is applied.
                for parent, run, rooted in runs_of(event):
                    self._holdings.add(holder, parent, run, rooted=rooted)
            case DecodedRemoved() | Removed():
                self._holdings.discard(_holder_of(event), removed_of(event))
            case DecodedCleared() | Cleared():
                self._holdings.drop(key, event.rank if event.rank_only else None)

    # ---- snapshots ---------------------------------------------------------------------------

    def _ask_snapshots(self, now_ms: int) -> list[Effect]:
        self._asking = False
        effects: list[Effect] = []
        assert 0 <= self._snapshots_in_flight <= self._limits.snapshots_max, (
            self._snapshots_in_flight
        )
        for source in self._sources.values():
            if self._snapshots_in_flight >= self._limits.snapshots_max:
                break
            if source.should_request(now_ms):
                source.begin_request(now_ms)
                self._snapshots_in_flight += 1
                effects.append(RequestSnapshot(source.key))
        return effects

    def _on_snapshot(self, loader: SnapshotLoader, now_ms: int) -> None:
        snapshot = loader.snapshot
        source = self._end_request(SourceKey(snapshot.host, snapshot.source))
        if source is None or source.state is not FollowState.BEHIND:
            return
        if snapshot.epoch < source.epoch and self._begin(source, snapshot.epoch):
            self._fall_behind(source, now_ms)
        if not source.accepts(snapshot.epoch, snapshot.seq):
            self._drops["old_snapshot"] += 1
            source.retry_later(now_ms)
            return
        if loader.malformed:
            self._drops["malformed"] += 1
            source.retry_later(now_ms)
            return
        self._holdings.drop(source.key)
        for holder, chains in loader.chains.items():
            self._holdings.take(holder, chains)
        self._snapshot_count += 1
        source.restore(snapshot.epoch, snapshot.seq, now_ms)
        assert source.epoch == snapshot.epoch, f"{source.key} is in epoch {source.epoch}"
        assert not source.needs_snapshot, f"{source.key} holds less than its snapshot says"
        self._apply_ready(source, now_ms)

    def _on_snapshot_failed(self, key: SourceKey, now_ms: int) -> None:
        source = self._end_request(key)
        self._drops["snapshot_failed"] += 1
        if source is not None:
            source.retry_later(now_ms)

    def _end_request(self, key: SourceKey) -> Source | None:
        """Return the source whose snapshot has come; None: it took longer than its deadline."""
        source = self._sources.get(key)
        if source is None or not source.end_request():
            self._drops["late_snapshot"] += 1
            return None
        self._snapshots_in_flight -= 1
        assert self._snapshots_in_flight >= 0, f"{key}: more answers than requests"
        self._asking = True
        return source

    # ---- lives -------------------------------------------------------------------------------

    def _on_joined(self, key: SourceKey, epoch: int, now_ms: int) -> None:
        """Note a registered source; ask for a snapshot if a new life of it stays silent.

        A lower epoch may be a new life, or the late entry of an old one: the source says which.
        """
        assert epoch >= 0, f"{key} has joined with epoch {epoch}"
        source = self._sources.get_or_make(key, now_ms)
        if source is None:
            self._drops["sources_full"] += 1
            return
        begun = self._begin(source, epoch)
        source.registered, source.registered_epoch = True, epoch
        source.ahead_of_registry_since_ms = None
        if epoch < source.epoch:
            source.mark_snapshot_stale()
        if begun or epoch < source.epoch:
            self._fall_behind(source, now_ms + self._limits.settle_ms)
        elif source.state is FollowState.GONE:
            self._fall_behind(source, now_ms)

    def _on_left(self, key: SourceKey, epoch: int, now_ms: int) -> None:
        assert epoch >= 0, f"{key} has left with epoch {epoch}"
        source = self._sources.get(key)
        if source is None:
            return
        if epoch >= source.epoch:
            self._leave(source, now_ms)
        elif source.registered and epoch == source.registered_epoch:
            source.unregister(now_ms)

    def _on_registry_read(self, now_ms: int) -> None:
        self._registry_read = True
        for source in self._sources.values():
            source.unregistered_since_ms = now_ms

    def _on_restored(self, image: Image, now_ms: int) -> None:
        """Take an image. No source is registered yet; those that were behind are asked, because
        what waited is not in an image."""
        assert not self._sources, "a restored index begins with its image"
        assert not self._snapshots_in_flight, f"{self._snapshots_in_flight} snapshots are asked for"
        self._stream, self._position = image.stream, image.position
        for saved in image.sources:
            key = SourceKey(saved.host, saved.source)
            self._sources[key] = Source(
                key, epoch=saved.epoch, seq=saved.seq, state=FollowState[saved.state],
                needs_snapshot=saved.needs_snapshot, limits=self._follow_limits,
                next_request_ms=now_ms + self._limits.settle_ms, unregistered_since_ms=now_ms,
            )  # fmt: skip
        assert len(self._sources) == len(image.sources), "a source is twice in the image"
        for holder in image.holders:
            self._holdings.load(holder)
        self._holdings.tidy(self._holdings.block_count)
        self._asking = True

    def _on_stream_lost(self, now_ms: int) -> None:
        """Let every source fall behind until its next event, or a snapshot that is newer."""
        self._position, self._stream, self._asking = 0, "", True
        for source in self._sources.values():
            source.stream_lost(now_ms + self._limits.settle_ms)
            assert source.state is not FollowState.CURRENT, f"{source.key} may miss events"

    def _on_tick(self, now_ms: int) -> None:
        is_tidy = self._holdings.tidy(self._limits.tidied_per_tick)
        assert now_ms >= self._looked_ms, f"{now_ms} ms after a look at {self._looked_ms} ms"
        if now_ms - self._looked_ms < self._limits.look_every_ms:
            return
        self._looked_ms = now_ms
        self._asking = True
        self._sources.forget_old(now_ms)
        for source in self._sources.values():
            requested_at_ms = source.requested_at_ms
            if requested_at_ms is not None and (
                now_ms - requested_at_ms > self._limits.snapshot_deadline_ms
            ):
                self._on_snapshot_failed(source.key, now_ms)
            silent_ms = now_ms - source.unregistered_since_ms
            dead = not source.registered and silent_ms > self._limits.unregistered_ms
            if self._registry_read and dead and source.state is not FollowState.GONE:
                self._leave(source, now_ms)
                is_tidy = False
            elif source.end_wait_for_registry(now_ms, self._limits.unregistered_ms):
                source.mark_snapshot_stale()
                self._fall_behind(source, now_ms)
        behind = any(source.state is FollowState.BEHIND for source in self._sources.values())
        self._is_quiet = is_tidy and not behind and not self._snapshots_in_flight

    def _begin(self, source: Source, epoch: int) -> bool:
        """Begin a source's life, unless it is under way; drop the old life's blocks. Return whether
        it has begun.

        A lower epoch begins a life only if the registry names it.
        """
        is_lower = epoch < source.epoch
        begun = source.begin(epoch)
        assert source.epoch >= epoch, f"{source.key} has not begun {epoch}"
        if begun:
            self._holdings.drop(source.key)
            self._lower_epoch_count += is_lower
            is_named = not source.registered or epoch == source.registered_epoch
            source.ahead_of_registry_since_ms = None if is_named else self._now_ms
            assert source.epoch == epoch, f"{source.key} begins {epoch}, is in {source.epoch}"
            assert not self._holdings.of(source.key), f"{source.key} holds blocks of another life"
        return begun

    def _fall_behind(self, source: Source, next_request_ms: int) -> None:
        source.fall_behind(next_request_ms)
        assert source.state is FollowState.BEHIND, f"{source.key} is {source.state.name}"
        self._asking = True

    def _leave(self, source: Source, now_ms: int) -> None:
        source.leave()
        source.unregister(now_ms)
        self._holdings.drop(source.key)
        assert source.state is FollowState.GONE, f"{source.key} is {source.state.name}"
        assert not self._holdings.of(source.key), f"{source.key} has left, and holds something"


def _holder_of(event: Received) -> HolderTuple:
    return (event.host, event.source, event.tier, event.rank, event.group)
