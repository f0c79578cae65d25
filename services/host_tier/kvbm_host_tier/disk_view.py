"""The disk view: which blocks the disk tiers of this host have announced.

It is a hint. A block that is wrongly in it costs a failed fill, one that is missing a recompute, so
events are applied as they come; a gap in them only makes us ask for a snapshot.
"""

from __future__ import annotations

from typing import assert_never

from kvbm_common.identity import SequenceHash, hashes_from_hex
from kvbm_common.wire.events import Cleared, Event, Removed, Stored
from kvbm_common.wire.verbs import SnapshotReply

from kvbm_host_tier.messages import AskDiskSnapshot


class DiskView:
    """Block → the instance of the disk tier that has it."""

    def __init__(self) -> None:
        self._instance: dict[SequenceHash, str] = {}
        self._position: dict[str, tuple[int, int]] = {}
        self._asking: set[str] = set()

    def __contains__(self, name: SequenceHash) -> bool:
        return name in self._instance

    def __len__(self) -> int:
        return len(self._instance)

    def instance(self, name: SequenceHash) -> str:
        """Who has a block that is in the view."""
        return self._instance[name]

    def forget(self, name: SequenceHash) -> None:
        """A fill of this block has failed: not again until it is announced anew."""
        self._instance.pop(name, None)

    def seen(self, instance: str) -> list[AskDiskSnapshot]:
        """A disk tier is there: what does it hold?"""
        if instance in self._asking:
            return []
        self._asking.add(instance)
        return [AskDiskSnapshot(instance)]

    def lost(self, instance: str) -> None:
        """A disk tier is gone."""
        self._clear(instance)
        self._position.pop(instance, None)

    def apply(self, instance: str, event: Event) -> tuple[int, list[AskDiskSnapshot]]:
        """Take an event; returns how many blocks are new, and what to ask for after a gap."""
        epoch, seq = self._position.get(instance, (0, 0))
        if (event.epoch, event.seq) <= (epoch, seq):
            return 0, []
        is_next = (event.epoch, event.seq) == (epoch, seq + 1) or event.seq == 1
        self._position[instance] = (event.epoch, event.seq)
        new = 0
        match event:
            case Stored(runs=runs):
                names = [name for run in runs for name in hashes_from_hex(run.hashes)]
                before = len(self._instance)
                self._instance.update(dict.fromkeys(names, instance))
                new = len(self._instance) - before
            case Removed(hashes=hashes):
                for name in hashes_from_hex(hashes):
                    if self._instance.get(name) == instance:
                        del self._instance[name]
            case Cleared():
                self._clear(instance)
            case _:
                assert_never(event)
        return new, [] if is_next else self.seen(instance)

    def snapshot(self, instance: str, reply: SnapshotReply | None) -> None:
        """The answer to AskDiskSnapshot; None: there was none."""
        self._asking.discard(instance)
        if reply is None or (reply.epoch, reply.seq) < self._position.get(instance, (0, 0)):
            return
        self._clear(instance)
        self._position[instance] = (reply.epoch, reply.seq)
        for part in reply.parts:
            for run in part.runs:
                self._instance.update(dict.fromkeys(hashes_from_hex(run.hashes), instance))

    def _clear(self, instance: str) -> None:
        kept = {name: owner for name, owner in self._instance.items() if owner != instance}
        self._instance = kept
