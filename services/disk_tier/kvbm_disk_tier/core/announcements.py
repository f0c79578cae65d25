"""Announcements: the events of this tier's blocks, numbered without a hole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.slots import Block
from kvbm_common.wire.verbs import SnapshotReply

from kvbm_disk_tier.core.effects import Publish
from kvbm_disk_tier.core.outbox import Outbox


class Announcements:
    """The events of one life: the first and the last say that the tier holds nothing."""

    def __init__(self, announcer: Announcer, outbox: Outbox) -> None:
        self.announcer = announcer
        self.stopped = False
        """The last `cleared` is out: nothing more is announced."""
        self._outbox = outbox

    def start(self) -> None:
        """Publish the first event of a life."""
        assert self.announcer.seq == 0, "a life starts once"
        assert not self.stopped, "a life that has ended does not start"
        self._outbox.emit(Publish(self.announcer.cleared("start")))

    def stop(self) -> None:
        """Publish the last event: the blocks stay in the store, but cannot be read."""
        self.stopped = True
        self._outbox.emit(Publish(self.announcer.cleared("stop")))

    def stored(self, blocks: Sequence[Block]) -> None:
        """Publish that these blocks are committed."""
        if self.stopped:
            return
        for event in self.announcer.stored(blocks):
            self._outbox.emit(Publish(event))

    def removed(self, blocks: Sequence[Block], reason: str) -> None:
        """Publish that these blocks, which were announced, are gone."""
        assert reason, "an event says why blocks are gone"
        if self.stopped:
            return
        for event in self.announcer.removed(blocks, reason):
            self._outbox.emit(Publish(event))

    def snapshot(self, blocks: Sequence[Block]) -> SnapshotReply:
        """Return these blocks as a snapshot of the last event's moment."""
        return self.announcer.snapshot(blocks)

    def pages(self, blocks: Sequence[Block]) -> Sequence[Callable[[], SnapshotReply]]:
        """Return the same in pages, each made when it is called."""
        return self.announcer.moment(blocks)
