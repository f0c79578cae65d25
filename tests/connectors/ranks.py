"""One rank of an engine on a real arena: its device memory, its worker half, its host tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kvbm_common.checksum import block_checksum, pack_sums
from kvbm_common.wire.local import FromHostTier, Hello, Region, ToHostTier
from kvbm_connectors.client.worker import WorkerHalf
from kvbm_connectors.core.messages import Load, LoadResult

from tests.connectors.endpoints import DEADLINE_S, Endpoint, welcome
from tests.connectors.helpers import EPOCH, INCARNATION, NAMESPACE, name
from tests.libs.nixl_owner import content
from tests.waiting import wait_for

BLOCK_BYTES = 4096
SLOT_COUNT = 64
SIZE = SLOT_COUNT * BLOCK_BYTES
DEVICE_BLOCKS = 8
THEIRS = 0x7000_0000_0000
Host = Endpoint[ToHostTier, FromHostTier]


class Rank(WorkerHalf):
    """One rank of engine `ada` with device memory of its own and a bell."""

    def __init__(
        self,
        directory: Path,
        *,
        pieces: int = 1,
        mover: str = "mapped",
        block_bytes: int = BLOCK_BYTES,
        verify_every: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.news = threading.Semaphore(0)
        self.endpoint = f"ipc://{directory}/host.sock"
        self.memory = np.zeros((DEVICE_BLOCKS, block_bytes), dtype=np.uint8)
        piece_bytes = block_bytes // pieces
        base = self.memory.ctypes.data
        regions = [
            Region(address=base + i * piece_bytes, stride=block_bytes, piece_bytes=piece_bytes,
                   blocks=DEVICE_BLOCKS)
            for i in range(pieces)
        ]  # fmt: skip
        super().__init__(
            engine="ada", incarnation=INCARNATION, namespace=NAMESPACE, regions=regions,
            host_tier_endpoint=self.endpoint, verify_every=verify_every, onboard_mover=mover,
            on_news=self.news.release, rank=rank, world_size=world_size,
        )  # fmt: skip

    def meet(self, host: Host, **changes: Any) -> None:
        """Start, say hello, be welcomed, and have a reader of the arena."""
        self.start()
        assert host.hear(Hello).agent
        host.say(welcome(EPOCH, slot_bytes=BLOCK_BYTES, slot_count=SLOT_COUNT, **changes))
        epoch = changes.get("epoch", EPOCH)
        wait_for(lambda: self.epoch == epoch)

    def result(self) -> LoadResult:
        """The one load that ends."""
        while not (ended := self.drain_ended()):
            assert self.news.acquire(timeout=DEADLINE_S)
        [result] = ended
        return result


def load(
    slots: Sequence[int],
    *,
    epoch: int = EPOCH,
    in_ms: int = 60_000,
    block_bytes: int = BLOCK_BYTES,
    expected: np.ndarray | None = None,
) -> Load:
    """A load of these slots into blocks 0, 1, …, with the checksums of what is in the arena."""
    there = content(SIZE) if expected is None else expected
    blocks = [there[slot * BLOCK_BYTES : slot * BLOCK_BYTES + block_bytes] for slot in slots]
    return Load(
        request="r",
        epoch=epoch,
        lease=5,
        slots=tuple(slots),
        blocks=tuple(range(len(slots))),
        hashes=tuple(name(slot + 1) for slot in slots),
        checksums=tuple(pack_sums([block_checksum(block)]) for block in blocks),
        block_bytes=block_bytes,
        deadline_ms=time.monotonic_ns() // 1_000_000 + in_ms,
    )


def loaded(rank: Rank, slots: Sequence[int]) -> bool:
    """Are these slots' bytes in blocks 0, 1, …?"""
    expected = content(SIZE).reshape(SLOT_COUNT, BLOCK_BYTES)[list(slots)]
    return np.array_equal(rank.memory[: len(slots)], expected)
