"""The events that are published: the order of their blocks, their drafts, and the last of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.announcer import EVENT_BLOCKS_MAX
from kvbm_common.wire.events import Cleared, EventHead, Tier
from kvbm_common.wire.raw_events import RawEvent, RawRemoved, RawRun, RawStored

Key = TypeVar("Key")
STORY_EVENTS_MAX = 2_000
"""Published events that are remembered for stories."""


def parents_first(held: Mapping[Key, Any], parent_of: Callable[[Key], Key | None]) -> Iterator[Key]:
    """Yield every key once, each after its parent if that is held; else in the order of `held`.

    Dynamo's router refuses a block before its parent. A parent that went and came back stands
    after its child in `held`.
    """
    done: set[Key] = set()
    for key in held:
        chain: list[Key] = []
        at: Key | None = key
        while at is not None and at in held and at not in done:
            done.add(at)
            chain.append(at)
            at = parent_of(at)
        yield from reversed(chain)


@dataclass(slots=True)
class EventDraft:
    """One event without its number. Either `runs` or `hashes` is used."""

    tier: Tier
    runs: list[RawRun] = field(default_factory=list)
    hashes: list[SequenceHash] = field(default_factory=list)
    count: int = 0

    def event(
        self, head: EventHead, group: int, namespace: str, reason: str
    ) -> RawStored | RawRemoved:
        """Return the draft as an event that begins like `head`; `reason` is that of a removal."""
        assert bool(self.runs) != bool(self.hashes), (
            f"{len(self.runs)} runs, {len(self.hashes)} gone"
        )
        if self.runs:
            return RawStored(**head, group=group, namespace=namespace, runs=self.runs)
        return RawRemoved(
            **head, group=group, namespace=namespace, hashes=self.hashes, reason=reason
        )


class EventBuilder:
    """Gathers changes in the order in which they happened; an event is of one kind and tier."""

    def __init__(self) -> None:
        self._drafts: list[EventDraft] = []

    def stored(self, tier: Tier, parent: SequenceHash, block: SequenceHash) -> None:
        """Add a block that is new in a tier to the last draft, or begin another one."""
        last = self._drafts[-1] if self._drafts else None
        if last is None or last.tier != tier or last.hashes or last.count >= EVENT_BLOCKS_MAX:
            last = EventDraft(tier)
            self._drafts.append(last)
        if last.runs and last.runs[-1][1][-1] == parent:
            last.runs[-1][1].append(block)
        else:
            last.runs.append((parent, [block]))
        last.count += 1
        assert last.count <= EVENT_BLOCKS_MAX, f"{last.count} blocks in one event of {tier}"

    def removed(self, tier: Tier, block: SequenceHash) -> None:
        """Add a block that is gone from a tier to the last draft, or begin another one."""
        last = self._drafts[-1] if self._drafts else None
        if last is None or last.tier != tier or last.runs or last.count >= EVENT_BLOCKS_MAX:
            last = EventDraft(tier)
            self._drafts.append(last)
        last.hashes.append(block)
        last.count += 1
        assert last.count <= EVENT_BLOCKS_MAX, f"{last.count} blocks of {tier} in one event"

    def take(self) -> Iterator[EventDraft]:
        """Return all drafts, in order, and forget them."""
        drafts, self._drafts = self._drafts, []
        assert all(draft.count for draft in drafts), f"an event without blocks: {drafts}"
        return iter(drafts)


class PublishedEvents:
    """The last events, each with its time; the oldest is forgotten when a new one comes."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, RawEvent]] = deque(maxlen=STORY_EVENTS_MAX)

    def add(self, event: RawEvent, now_ms: int) -> None:
        """Remember an event that is published now."""
        assert not self._events or self._events[-1][0] <= now_ms, f"{event} at {now_ms} ms"
        self._events.append((now_ms, event))

    def story(self, sequence_hash: SequenceHash) -> list[str]:
        """Return what was lately published about a block, newest last."""
        return [
            f"{now_ms} ms {describe(event)}"
            for now_ms, event in self._events
            if mentions(event, sequence_hash)
        ]


def mentions(event: RawEvent, sequence_hash: SequenceHash) -> bool:
    """Return whether an event is about a block; a clear is about every block."""
    match event:
        case RawStored():
            return any(sequence_hash in blocks for _, blocks in event.runs)
        case RawRemoved():
            return sequence_hash in event.hashes
        case Cleared():
            return True


def describe(event: RawEvent) -> str:
    """Return a line about an event, without its blocks."""
    kind = event.__struct_config__.tag
    return f"{kind} {event.source} rank {event.rank} epoch {event.epoch} seq {event.seq}"
