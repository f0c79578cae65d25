"""The medium below a core: what a shell asks of a store, be it a file or a bucket."""

from __future__ import annotations

from typing import Any, Protocol

from kvbm_common.loop import CoreLoop
from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.messages import (
    AppendJournal,
    Effect,
    Journaled,
    JournalFailed,
    ReadDone,
    ReadFailed,
    ReadSlots,
    RewriteJournal,
    StoreFailed,
    StoreOpened,
    WriteFailed,
    WriteSlots,
    Written,
)


class Medium(Protocol):
    """Carries out a core's effects. Nothing raises but our own mistakes: failures are inputs."""

    where: str
    """For logs: which store it is."""

    async def recover(self) -> StoreOpened | StoreFailed | None:
        """Open what a former life has left; None: there is nothing (known yet)."""

    async def open(self, slot_bytes: int) -> StoreOpened | StoreFailed:
        """Make a store for slots of this size."""

    def use_arena(self, arena: ArenaReply) -> None:
        """Map the arena of another life; raises KvbmError or OSError."""

    def drop_arena(self, instance: str) -> None:
        """A host tier is gone: unmap its arena as soon as nothing needs it."""

    async def write(self, effect: WriteSlots) -> Written | WriteFailed:
        """Arena to store."""

    async def read(self, effect: ReadSlots) -> ReadDone | ReadFailed:
        """Store to arena, verified. Afterwards nothing of it can reach the arena any more."""

    async def append(self, effect: AppendJournal) -> Journaled | JournalFailed | None:
        """Make it last."""

    async def rewrite(self, effect: RewriteJournal) -> None:
        """Keep only these records."""

    async def run(self, loop: CoreLoop[Any, Effect]) -> None:
        """What goes on beside the effects, until cancelled. `loop` takes the medium's own inputs,
        which not every core knows: hence Any."""

    def close(self) -> None:
        """Let go of everything."""
