"""The disk view: which blocks the disk tiers (or object tiers) of this host have announced.

It is a hint. A block that is wrongly in it costs a failed fill, one that is missing a recompute, so
events are applied as they come; a gap in them only makes us ask for a snapshot. A block whose fill
failed is forgotten when the disk tier does not have it, and left alone for a while otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import assert_never

from kvbm_common.fates import Fates
from kvbm_common.identity import SequenceHash, hashes_from_hex
from kvbm_common.wire.events import Cleared, Event, Removed, Stored, Tier
from kvbm_common.wire.verbs import SnapshotReply

from kvbm_host_tier.messages import AskDiskSnapshot

AVOID_MS = 30_000
"""A disk in trouble is not asked for the same block by every request, nor written off for ever."""
STARTING_MS = 500
"""It had not mapped our arena yet, and asks for it once a second: no fault of the block's."""
AVOID_MAX = 65_536
AWAY_MAX = 1_048_576
"""Names of blocks; they were in the view before, so this is no memory that was not taken."""


class DiskView:
    """Block → the instance of the disk tier that has it. One view for each medium."""

    def __init__(self, tier: Tier = "disk") -> None:
        self._tier: Tier = tier
        self._instance: dict[SequenceHash, str] = {}
        self._position: dict[str, tuple[int, int]] = {}
        self._asking: set[str] = set()
        self._there: dict[str, None] = {}
        self._avoid: OrderedDict[SequenceHash, int] = OrderedDict()
        """Block whose fill failed → when it may be asked for again."""
        self._away: set[SequenceHash] = set()
        """What instances had that are away now: to explain misses, nothing else."""
        self.fates = Fates()
        """What became of the blocks that have left, as far as events have told."""

    def __contains__(self, name: SequenceHash) -> bool:
        return name in self._instance

    def missing(self, names: Iterable[SequenceHash]) -> list[SequenceHash]:
        """Those that no disk tier has."""
        known = self._instance
        return [name for name in names if name not in known]

    def __len__(self) -> int:
        return len(self._instance)

    @property
    def is_followed(self) -> bool:
        """Some instance has said something, or is being asked."""
        return bool(self._position or self._asking)

    @property
    def instances(self) -> list[str]:
        """Those that are there, whether they have told what they hold or not."""
        return list(self._there)

    def has_never_had(self, names: Collection[SequenceHash]) -> bool:
        """Is nothing known of any of these?"""
        known = (self._instance.keys(), self._away)
        return self.fates.knows_none_of(names) and all(one.isdisjoint(names) for one in known)

    def is_away(self, name: SequenceHash) -> bool:
        """Did an instance have it that is away?"""
        return name in self._away

    def epoch(self, instance: str) -> int:
        """The life of a disk tier that we know of, 0 when there is none."""
        return self._position.get(instance, (0, 0))[0]

    def usable(self, name: SequenceHash, now_ms: int) -> bool:
        """Is it worth while to ask for this block now?"""
        return self.source(name, now_ms) is not None

    def source(self, name: SequenceHash, now_ms: int) -> str | None:
        """Whom to ask for this block now; None: it is not worth while."""
        instance = self._instance.get(name)
        avoided = instance is not None and self._avoid and now_ms < self._avoid.get(name, now_ms)
        return None if avoided else instance

    def forget(self, name: SequenceHash) -> None:
        """The disk tier does not have this block: not again until it is announced anew."""
        self._instance.pop(name, None)

    def avoid(self, name: SequenceHash, now_ms: int, *, for_ms: int = AVOID_MS) -> None:
        """A fill of this block has failed, but it may be there: not again for a while."""
        self._avoid.pop(name, None)
        self._avoid[name] = now_ms + for_ms
        while len(self._avoid) > AVOID_MAX:
            self._avoid.popitem(last=False)

    def seen(self, instance: str) -> list[AskDiskSnapshot]:
        """A disk tier is there: what does it hold?"""
        self._there[instance] = None
        if instance in self._asking:
            return []
        self._asking.add(instance)
        return [AskDiskSnapshot(instance, self._tier)]

    def lost(self, instance: str) -> None:
        """A disk tier is gone."""
        self._remember_away(instance)
        self._clear(instance)
        self._position.pop(instance, None)
        self._there.pop(instance, None)

    def apply(
        self, instance: str, event: Event, now_ms: int = 0
    ) -> tuple[int, list[AskDiskSnapshot]]:
        """Take an event; returns how many blocks are new, and what to ask for after a gap."""
        epoch, seq = self._position.get(instance, (0, 0))
        if (event.epoch, event.seq) <= (epoch, seq):
            return 0, []
        is_next = (event.epoch, event.seq) == (epoch, seq + 1) or event.seq == 1
        self._position[instance] = (event.epoch, event.seq)
        self._there[instance] = None
        new = 0
        match event:
            case Stored(runs=runs):
                names = [name for run in runs for name in hashes_from_hex(run.hashes)]
                before = len(self._instance)
                self._instance.update(dict.fromkeys(names, instance))
                new = len(self._instance) - before
                for name in names:
                    self._avoid.pop(name, None)
                self._away.difference_update(names)
            case Removed(hashes=hashes, reason=reason):
                names = hashes_from_hex(hashes)
                for name in names:
                    if self._instance.get(name) == instance:
                        del self._instance[name]
                self.fates.note(names, reason, now_ms)
            case Cleared(reason=reason):
                if reason == "stop":
                    self._remember_away(instance)
                self._clear(instance)
            case _:
                assert_never(event)
        return new, [] if is_next else self.seen(instance)

    def snapshot(self, instance: str, reply: SnapshotReply | None) -> None:
        """The answer to AskDiskSnapshot; None: there was none.

        Where events of the same life have overtaken it, it only adds: asking again would be
        overtaken again by a busy disk, and what it adds wrongly costs a failed fill.
        """
        self._asking.discard(instance)
        position = self._position.get(instance, (0, 0))
        if reply is None or reply.epoch < position[0]:
            return
        if (reply.epoch, reply.seq) >= position:
            self._clear(instance)
            self._position[instance] = (reply.epoch, reply.seq)
        for part in reply.parts:
            for run in part.runs:
                names = hashes_from_hex(run.hashes)
                self._instance.update(dict.fromkeys(names, instance))
                self._away.difference_update(names)

    def _remember_away(self, instance: str) -> None:
        gone = (name for name, owner in self._instance.items() if owner == instance)
        self._away.update(gone)
        while len(self._away) > AWAY_MAX:
            self._away.pop()

    def _clear(self, instance: str) -> None:
        kept = {name: owner for name, owner in self._instance.items() if owner != instance}
        self._instance = kept
