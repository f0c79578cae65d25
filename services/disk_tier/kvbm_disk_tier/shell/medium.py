"""The medium below a core: what a shell asks of a store, be it a file or a bucket."""

from __future__ import annotations

from typing import Any, Protocol

from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.core.effects import (
    AppendJournal,
    Effect,
    ProbeStore,
    ReadSlots,
    RewriteJournal,
    WriteSlots,
)
from kvbm_disk_tier.core.messages import (
    Journaled,
    JournalFailed,
    JournalPartWritten,
    JournalRewritten,
    ReadDone,
    ReadFailed,
    StoreAbsent,
    StoreFailed,
    StoreOpened,
    StoreProbed,
    WriteFailed,
    Written,
)


class Medium(Protocol):
    """The executor of a core's effects. Only mistakes of ours raise: failures are inputs."""

    where: str
    """For logs: which store it is."""

    async def recover(self) -> StoreOpened | StoreFailed | None:
        """Open what a former life has left; None: there is nothing (known yet)."""

    async def open(self, slot_bytes: int) -> StoreOpened | StoreAbsent | StoreFailed:
        """Make a store for slots of this size, or open the one whose recovery had failed."""

    async def probe(self, effect: ProbeStore) -> StoreProbed:
        """Try what had failed."""

    def use_arena(self, arena: ArenaReply) -> None:
        """Map the arena of another life; raises KvbmError or OSError."""

    def drop_arena(self, instance: str) -> None:
        """Unmap the arena of a host tier that is gone, as soon as nothing needs it."""

    async def write(self, effect: WriteSlots) -> Written | WriteFailed:
        """Write blocks from arena to store."""

    async def read(self, effect: ReadSlots) -> ReadDone | ReadFailed:
        """Read blocks from store to arena, verified; afterwards no late byte reaches the arena."""

    async def append(self, effect: AppendJournal) -> Journaled | JournalFailed | None:
        """Make records and data durable."""

    async def rewrite(self, effect: RewriteJournal) -> JournalPartWritten | JournalRewritten | None:
        """Keep only these records."""

    async def run(self, loop: CoreLoop[Any, Effect]) -> None:
        """Do what goes on beside the effects, until cancelled.

        `loop` takes the medium's own inputs, which not every core knows: hence Any.
        """

    def close(self) -> None:
        """Let go of everything."""
