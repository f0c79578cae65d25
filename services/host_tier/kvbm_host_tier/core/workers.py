"""The workers of an engine: each rank's memory, and which parts of a block it holds.

The ranks with replica 0 hold every part of a block once: from those blocks are pulled. Ranks that
hold what another one holds (latent attention, fewer KV heads than ranks) are replicas: they load.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from kvbm_common.tier.machine import Machine
from kvbm_common.tier.parts import PARTS_MAX, Share
from kvbm_common.wire.local import Hello, Refused


class WorkerStage(Enum):
    """The states of a worker."""

    ATTACHING = "attaching"
    """NIXL learns of its memory."""
    OUTDATED = "outdated"
    """NIXL learns of memory that has been replaced since."""
    ATTACHED = "attached"


WORKER = Machine(
    "worker",
    {
        (None, "joined"): WorkerStage.ATTACHING,
        (WorkerStage.ATTACHING, "attached"): WorkerStage.ATTACHED,
        (WorkerStage.ATTACHING, "refused"): None,
        (WorkerStage.ATTACHING, "memory replaced"): WorkerStage.OUTDATED,
        (WorkerStage.OUTDATED, "memory replaced"): WorkerStage.OUTDATED,
        (WorkerStage.OUTDATED, "attached"): WorkerStage.ATTACHING,
        (WorkerStage.OUTDATED, "refused"): WorkerStage.ATTACHING,
        (WorkerStage.ATTACHED, "attached"): WorkerStage.ATTACHED,
        (WorkerStage.ATTACHED, "memory replaced"): WorkerStage.ATTACHING,
        (WorkerStage.ATTACHED, "unreachable"): WorkerStage.ATTACHING,
    },
)


@dataclass(slots=True)
class Worker:
    """One rank's memory. `peer` is its name in NIXL, where it is ATTACHED."""

    hello: Hello
    connection: bytes
    peer: str = ""
    stage: WorkerStage = WorkerStage.ATTACHING
    block_bytes: int = field(init=False)
    """Bytes of a whole block, computed from this rank's share; 0: unknown."""
    block_count: int = field(init=False)
    """Device blocks that every region has; both are summed up once, for regions are many."""

    def __post_init__(self) -> None:
        self.take(self.hello)

    def take(self, hello: Hello) -> None:
        """Take in the memory that a rank has now."""
        assert hello.rank == self.hello.rank, f"rank {hello.rank} takes {self.hello.rank}'s place"
        self.hello = hello
        regions = hello.regions
        self.block_bytes = self.share.block_bytes(sum(one.piece_bytes for one in regions))
        self.block_count = min((one.blocks for one in regions), default=0)

    @property
    def share(self) -> Share:
        """The share that the rank holds of every block."""
        return self.hello.held_share

    @property
    def is_attached(self) -> bool:
        return self.stage is WorkerStage.ATTACHED

    @property
    def is_pulled(self) -> bool:
        """Tell whether blocks are pulled from this rank, not from one that holds the same."""
        return self.share.replica == 0


def refusal_of_worker(hello: Hello, others: Collection[Worker]) -> Refused | None:
    """Return why a worker does not fit its engine, whose other ranks are `others`, or any."""
    if hello.rank >= hello.world_size:
        return refused("rank", f"must be below world_size {hello.world_size}", "rank")
    if hello.share is None and hello.world_size > PARTS_MAX:
        return refused("world_size", f"a block has at most {PARTS_MAX} parts", "world_size")
    if not hello.regions or not hello.agent:
        return refused("regions", "a worker needs regions and agent metadata", "regions")
    worker = Worker(hello, b"")
    if not worker.block_bytes or any(one.block_bytes != worker.block_bytes for one in others):
        text = f"rank {hello.rank} does not have as many bytes for each part as other ranks have"
        return refused("part_bytes", text, "regions")
    return _refusal_of_share(worker, others)


def _refusal_of_share(worker: Worker, others: Collection[Worker]) -> Refused | None:
    """Return why the shares of all ranks that are known do not make up a block."""
    share = worker.share
    if any(one.share.grid != share.grid for one in others):
        return refused("share", "other ranks cut blocks in another way", "share")
    held = [part for one in (*others, worker) if one.is_pulled for part in one.share.parts]
    assert max(held, default=0) < share.grid.count, f"parts {held} of {share.grid}"
    if len(set(held)) < len(held):
        return refused("share", "another rank holds the same parts: one is a replica", "share")
    is_last = len(others) + 1 == worker.hello.world_size
    if is_last and len(held) < share.grid.count:
        return refused("share", "no rank but replicas holds some of the parts", "share")
    return None


def refused(code: str, message: str, field: str) -> Refused:
    """Return the refusal of a hello."""
    return Refused(about="hello", code=code, message=message, field=field)
